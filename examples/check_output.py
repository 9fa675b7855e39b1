#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands in an example's header comment ("// $ ...") and compares what they print with the lines below them.

usage: check_output.py EXAMPLE.cpp BIN_DIR

BIN_DIR holds the lockstep command and the examples. Lines of different ranks may come in any order.
"""
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile


def commands(source):
    """Pairs of a command and the lines expected from it."""
    found = []
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        text = line[2:].strip()
        if text.startswith("$ "):
            found.append((text[2:], []))
            open_block = True
        elif found and text and open_block:
            found[-1][1].append(text)
        elif not text:
            open_block = False
    return found


def main():
    example, bin_dir = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    environment = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    found = commands(example.read_text())
    if not found:
        sys.exit(f"{example.name}: its header comment names no command")
    with tempfile.TemporaryDirectory() as folder:  # files of one command are there for the next
        for command, expected in found:
            words = [word.replace("build/bin/", f"{bin_dir}/") for word in shlex.split(command)]
            run = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=folder)
            lines = [line.rstrip() for line in run.stdout.splitlines()]
            print(f"$ {command}\n{run.stdout}{run.stderr}", end="")
            if run.returncode != 0 or sorted(lines) != sorted(expected):
                sys.exit(f"{example.name}: exit status {run.returncode}; the header comment promises:\n" + "\n".join(expected))


if __name__ == "__main__":
    main()
