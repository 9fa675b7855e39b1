#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What must not compile does not, and installed headers of the half without torch compile without it.

usage: negative_compile_test.py SOURCE_DIR COMPILER [FLAG...]

FLAGs are what headers with torch need. Headers are compiled together, in both orders: a header that needs an include of another comes first in
one of them. LOCKSTEP_TEST_ALL=1 compiles every header alone, those with torch too, which takes minutes.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import layers_test

FLAGS = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]

# The good uses must compile, or the bad ones would fail for another reason.
USES_OF_WORK = """
#include "lockstep/comm/collectives.h"
using namespace lockstep::comm;
Work start(const at::Tensor& tensor, const Group& group) { return all_reduce(tensor, group); }
void use(const at::Tensor& tensor, const Group& group) {
  %s
}
"""
GOOD_USES = ["all_reduce(tensor, group).wait();", "Work work = barrier(group); work.wait();", "start(tensor, group).wait();"]
BAD_USES = ["all_reduce(tensor, group);", "barrier(group);", "start(tensor, group);"]


def compile_text(source_dir, compiler, text, *flags):
    words = [compiler, *FLAGS, *flags, f"-I{source_dir}", "-x", "c++", "-"]
    return subprocess.run(words, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_discarded_work(source_dir, compiler):
    done = compile_text(source_dir, compiler, USES_OF_WORK % "\n  ".join(GOOD_USES))
    if done.returncode != 0:
        sys.exit(f"negative_compile_test: must compile, but does not:\n{done.stdout}")
    done = compile_text(source_dir, compiler, USES_OF_WORK % "\n  ".join(BAD_USES), "-Wno-error", "-Werror=unused-result")
    refused = [line for line in done.stdout.splitlines() if "error:" in line]
    if len(refused) != len(BAD_USES) or not all("-Werror=unused-result" in line for line in refused):
        sys.exit(f"negative_compile_test: each of these must fail because it discards a Work: {BAD_USES}\n{done.stdout}")


def includes_torch(root, header):
    """Whether the header, or one that it includes, names a header of torch or of another library."""
    texts = [(root / name).read_text() for name in layers_test.reachable(root, header)]
    return any(layers_test.TORCH.match(name) or name == "mpi.h" for text in texts for mark, name in layers_test.INCLUDE.findall(text))


def check_headers(source_dir, compiler, headers, *flags):
    """libtorch may lie in the system's own include folder, so of the half without torch the files that were read are checked too."""
    with tempfile.TemporaryDirectory() as folder:
        dependencies = pathlib.Path(folder) / "dependencies"
        text = "".join(f'#include "{header}"\n' for header in headers)
        done = compile_text(source_dir, compiler, text, "-MD", "-MF", str(dependencies), *flags)
        if done.returncode != 0:
            sys.exit(f"negative_compile_test: {', '.join(headers)}: does not compile:\n{done.stdout}")
        read = dependencies.read_text().split()
    for header in headers:
        if not any(name.endswith(header) for name in read):
            sys.exit(f"negative_compile_test: {header} is not among the files read")
    torch = [name for name in read if re.search(r"/(torch|ATen|c10|caffe2)/", name)]
    if torch and any(header.split("/")[1] in layers_test.WITHOUT_TORCH for header in headers):
        sys.exit(f"negative_compile_test: {', '.join(headers)}: belong to the half without torch and include {torch[0]}")


def main():
    source_dir, compiler, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    root = pathlib.Path(source_dir)
    headers = sorted(layers_test.installed_headers(root))
    quick = [header for header in headers if not includes_torch(root, header)]
    check_headers(source_dir, compiler, quick)
    check_headers(source_dir, compiler, quick[::-1])
    # A Lockstep that was built without torch.
    check_headers(source_dir, compiler, [layers_test.UMBRELLA], "-DLOCKSTEP_WITHOUT_TORCH")
    alone = headers if flags and "LOCKSTEP_TEST_ALL" in os.environ else []
    for header in alone:
        check_headers(source_dir, compiler, [header], *(flags if header not in quick else []))
    check_discarded_work(source_dir, compiler)
    print(f"negative_compile_test: {len(quick)} headers compile without torch, {len(alone)} of {len(headers)} alone, "
          f"{len(BAD_USES)} discarded promises refused")


if __name__ == "__main__":
    main()
