#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What must not compile does not, and what must compile without torch does.

usage: negative_compile_test.py SOURCE_DIR COMPILER [HEADER...]

HEADERs are the installed ones of the half without torch.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

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


def check_without_torch(source_dir, compiler, headers):
    """libtorch may lie in the system's own include folder, so the files that were read are checked too."""
    text = "".join(f'#include "{header}"\n' for header in headers)
    with tempfile.TemporaryDirectory() as folder:
        dependencies = pathlib.Path(folder) / "dependencies"
        done = compile_text(source_dir, compiler, text, "-MD", "-MF", str(dependencies))
        if done.returncode != 0:
            sys.exit(f"negative_compile_test: headers of the half without torch do not compile:\n{done.stdout}")
        read = dependencies.read_text().split()
    if not any(name.endswith(headers[0]) for name in read):
        sys.exit(f"negative_compile_test: {headers[0]} is not among the files read")
    torch = [name for name in read if re.search(r"/(torch|ATen|c10|caffe2)/", name)]
    if torch:
        sys.exit(f"negative_compile_test: headers of the half without torch include {torch[0]}")


def main():
    source_dir, compiler, headers = sys.argv[1], sys.argv[2], sys.argv[3:]
    check_without_torch(source_dir, compiler, headers)
    check_discarded_work(source_dir, compiler)
    print(f"negative_compile_test: {len(headers)} headers without torch, {len(BAD_USES)} discarded promises refused")


if __name__ == "__main__":
    main()
