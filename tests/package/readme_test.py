#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every C++ block of README.md is part of an example, which ctest builds and runs.

usage: readme_test.py SOURCE_DIR
"""
import pathlib
import re
import sys


def main():
    root = pathlib.Path(sys.argv[1])
    examples = {path.name: path.read_text() for path in (root / "examples").glob("*.cpp")}
    blocks = re.findall(r"^```cpp\n(.*?)^```", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    if not blocks:
        sys.exit("readme_test: README.md has no C++ block")
    for block in blocks:
        if not any(block in text for text in examples.values()):
            sys.exit(f"readme_test: not in {', '.join(sorted(examples))}:\n{block}")


if __name__ == "__main__":
    main()
