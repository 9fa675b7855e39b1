#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Freezes the command line: what --help prints is kept in tests/package/help.

usage: help_test.py LOCKSTEP_COMMAND      LOCKSTEP_UPDATE_HELP=1 writes the files again
"""
import difflib
import os
import pathlib
import re
import subprocess
import sys

HELP = pathlib.Path(__file__).parent / "help"
COMMANDS = {
    "lockstep.txt": ["--help"],
    "run.txt": ["run", "--help"],
    "selftest.txt": ["selftest", "--help"],
    "doctor.txt": ["doctor", "--help"],
    "train.txt": ["train", "--help"],
    "sample.txt": ["sample", "--help"],
    "eval.txt": ["eval", "--help"],
    "report.txt": ["report", "--help"],
    "checkpoint.txt": ["checkpoint", "--help"],
    "checkpoint_inspect.txt": ["checkpoint", "inspect", "--help"],
    "checkpoint_verify.txt": ["checkpoint", "verify", "--help"],
    "checkpoint_diff.txt": ["checkpoint", "diff", "--help"],
    "checkpoint_export.txt": ["checkpoint", "export", "--help"],
    "checkpoint_import.txt": ["checkpoint", "import", "--help"],
    "data.txt": ["data", "--help"],
    "data_pack.txt": ["data", "pack", "--help"],
    "schedule.txt": ["schedule", "--help"],
    "plan.txt": ["plan", "--help"],
    "plan_memory.txt": ["plan", "memory", "--help"],
    "plan_inventory.txt": ["plan", "inventory", "--help"],
    "bench.txt": ["bench", "--help"],
    "bench_collectives.txt": ["bench", "collectives", "--help"],
    "bench_codecs.txt": ["bench", "codecs", "--help"],
}


def main():
    command = sys.argv[1]
    failures = 0
    for name, arguments in COMMANDS.items():
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=True)
        printed = re.sub(r"^lockstep \d+\.\d+\.\d+", "lockstep VERSION", done.stdout).strip() + "\n"
        if os.environ.get("LOCKSTEP_UPDATE_HELP") == "1":
            (HELP / name).write_text(printed)
            continue
        kept = (HELP / name).read_text()
        if printed != kept:
            failures += 1
            difference = difflib.unified_diff(kept.splitlines(), printed.splitlines(), f"help/{name}", "printed", lineterm="")
            print("\n".join(difference))
    if failures:
        sys.exit(f"help_test: {failures} differ; if that is meant, run it again with LOCKSTEP_UPDATE_HELP=1")


if __name__ == "__main__":
    main()
