#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/porting.md: its diffs turn examples/porting/before.cpp into after.cpp, whose losses do not depend on the number of ranks, nor on a stop in between.

usage: porting_test.py SOURCE_DIR BIN_DIR
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def program(path):
    """Without the comment at its top."""
    text = path.read_text()
    return text[text.index("#include"):]


def applied(text, diff):
    lines = diff.splitlines()
    old = "".join(line[1:] + "\n" for line in lines if line[:1] in " -")
    new = "".join(line[1:] + "\n" for line in lines if line[:1] in " +")
    if text.count(old) != 1:
        sys.exit(f"docs/porting.md: this diff fits in {text.count(old)} places of the program, must in one:\n{diff}")
    return text.replace(old, new)


def losses(bin_dir, folder, *launcher):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*launcher, bin_dir / "porting_after"], cwd=folder, env=environment, capture_output=True, text=True)
    print(run.stdout + run.stderr, end="")
    if run.returncode != 0:
        sys.exit(f"exit status {run.returncode}")
    return [tuple(map(float, found)) for found in re.findall(r"epoch (\d+): loss (\S+), test (\S+)", run.stdout)]


def require_close(found, expected, what):
    close = len(found) == len(expected) and all(abs(x - y) <= 1e-4 * abs(y) for a, b in zip(found, expected) for x, y in zip(a, b))
    if not close:
        sys.exit(f"{what}: {found}, must be {expected}")


def main():
    source, bin_dir = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    text = program(source / "examples/porting/before.cpp")
    for diff in re.findall(r"```diff\n(.*?)```", (source / "docs/porting.md").read_text(), re.DOTALL):
        text = applied(text, diff)
    if text != program(source / "examples/porting/after.cpp"):
        sys.exit("docs/porting.md: its diffs do not lead to examples/porting/after.cpp, but to:\n" + text)
    two = [bin_dir / "lockstep", "run", "-n", "2"]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        alone = losses(bin_dir, first)
        if [epoch for epoch, loss, test in alone] != [0, 1, 2] or not alone[2][1] < alone[0][1] / 4:
            sys.exit(f"nothing was learned: {alone}")
        require_close(losses(bin_dir, second, *two), alone, "losses on two ranks")
        # Each continues from a checkpoint, with the ranks exchanged.
        require_close(losses(bin_dir, first, *two), losses(bin_dir, second), "losses after a restart on two ranks")
        subprocess.run([bin_dir / "porting_before"], cwd=first, check=True)


if __name__ == "__main__":
    main()
