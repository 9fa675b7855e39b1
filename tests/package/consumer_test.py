#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs Lockstep, moves it elsewhere, and uses it from there: by find_package, by pkg-config and by its command.

usage: consumer_test.py --source DIR --build DIR --work DIR [--cmake CMAKE] [--cxx COMPILER] [--generator NAME]
"""
import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import layers_test

EXPECTED = """
bin/lockstep bin/lockstep-torch lib/liblockstep_core.a lib/liblockstep_mesh.a include/lockstep/lockstep.h
lib/cmake/Lockstep/LockstepConfig.cmake lib/cmake/Lockstep/LockstepConfigVersion.cmake
lib/cmake/Lockstep/LockstepTargets.cmake lib/cmake/Lockstep/FindLibtorch.cmake lib/pkgconfig/lockstep.pc
share/doc/lockstep/LICENSE share/doc/lockstep/docs/errors.md
""".split()


def run(*words, **options):
    """Runs a command and returns what it printed; any failure ends the test."""
    words = [str(word) for word in words]
    start = time.monotonic()
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    print(f"[{time.monotonic() - start:5.1f} s] {shlex.join(words)}", flush=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nconsumer_test: exit status {done.returncode}")
    return done.stdout


def expect(output, *lines):
    for line in lines:
        if line not in output.splitlines():
            sys.exit(f"consumer_test: expected the line '{line}' in:\n{output}")


def without_debug_information(path, work):
    """A file's bytes; of archives and programs, those that remain when debug information is stripped."""
    data = path.read_bytes()
    if not data.startswith((b"\x7fELF", b"!<arch>")):
        return data
    stripped = work / "stripped"
    run("objcopy", "--strip-debug", path, stripped)
    return stripped.read_bytes()


def check_files(prefix, source, forbidden, work):
    missing = [name for name in EXPECTED if not (prefix / name).is_file()]
    if missing:
        sys.exit(f"consumer_test: not installed: {' '.join(missing)}")
    for path in sorted(prefix.rglob("*")):
        if not path.is_file() or path.is_relative_to(prefix / "share/doc"):  # documents are copies of what is in the tree
            continue
        data = without_debug_information(path, work)
        for folder in forbidden:
            # As a whole path: /src is not part of /usr/src, nor of /src2.
            if re.search(rb"(?<![\w.-])" + re.escape(str(folder).encode()) + rb"(?![\w.-])", data):
                sys.exit(f"consumer_test: {path.relative_to(prefix)} mentions {folder}")
    headers = {path.relative_to(prefix / "include").as_posix() for path in (prefix / "include").rglob("*") if path.is_file()}
    listed = layers_test.installed_headers(source)
    if headers != listed:
        sys.exit(f"consumer_test: include/ has {sorted(headers - listed)}, which lockstep/CMakeLists.txt does not list, and lacks "
                 f"{sorted(listed - headers)}, which it does")


def main():
    parser = argparse.ArgumentParser()
    for option in ["source", "build", "work"]:
        parser.add_argument(f"--{option}", type=pathlib.Path, required=True)
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--generator", default="Ninja")
    arguments = parser.parse_args()
    source, work = arguments.source.resolve(), arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if shutil.which("ccache"):
        environment["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"

    run(arguments.cmake, "--install", arguments.build, "--prefix", work / "first")
    prefix = work / "prefix"
    (work / "first").rename(prefix)
    check_files(prefix, source, [source, arguments.build.resolve(), work / "first"], work)
    lockstep = prefix / "bin/lockstep"
    version = run(lockstep, "--version").split()[1]
    if "libtorch" in run("ldd", lockstep):
        sys.exit("consumer_test: the lockstep command links libtorch, which takes half a second to load")

    # find_package
    for project in [source / "examples/consumer", source / "tests/package/single_layer"]:
        folder = work / project.name
        run(arguments.cmake, "-S", project, "-B", folder, "-G", arguments.generator, f"-DCMAKE_PREFIX_PATH={prefix}",
            f"-DCMAKE_CXX_COMPILER={arguments.cxx}", env=environment)
        run(arguments.cmake, "--build", folder, env=environment)
    expect(run(work / "single_layer/single_layer"), f"{version} count of 64")
    consumer = work / "consumer/consumer"
    expect(run(consumer, env=environment), "ranks 1, mean gradient 2")
    expect(run(lockstep, "run", "-n", "2", consumer, env=environment), "[rank0]: ranks 2, mean gradient 3")
    # The command finds its second half beside itself, and that one finds libtorch.
    run(lockstep, "selftest", "-n", "1", "--backend", "thread", env=environment)

    # pkg-config and nothing else. Its flags come after the source, as the order of static libraries asks.
    environment["PKG_CONFIG_PATH"] = f"{prefix / 'lib/pkgconfig'}:{os.environ.get('PKG_CONFIG_PATH', '')}"
    query = ["pkg-config", "--cflags", "--libs", "lockstep"]
    flags = shlex.split(run(*query, env=environment))
    single = source / "tests/package/single_layer/main.cpp"
    run(arguments.cxx, single, "-o", work / "single", *flags, env=environment)
    expect(run(work / "single"), f"{version} count of 64")
    if "LOCKSTEP_TEST_ALL" in os.environ:
        own = work / "own_backend"
        run(arguments.cxx, source / "examples/08_custom_backend.cpp", "-o", own, *flags, env=environment)
        expect(run(lockstep, "run", "-n", "2", own, env=environment), "[rank0]: 2 ranks over sockets: all checks hold")
    found = run("pkg-config", "--modversion", "lockstep", env=environment).strip()
    if found != version:
        sys.exit(f"consumer_test: pkg-config says {found}, the command {version}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
