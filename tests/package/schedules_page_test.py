#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/pipeline.md: its pictures are what its commands make today, and its table is what the command says.

usage: schedules_page_test.py SOURCE_DIR LOCKSTEP_COMMAND      LOCKSTEP_UPDATE_IMAGES=1 writes the pictures anew
"""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

COMMAND = re.compile(r"^    lockstep (schedule .* --output (docs/images/\S+\.svg))$", re.MULTILINE)
PICTURE = re.compile(r"!\[[^]]*\]\((images/schedule-[^)]+)\)")
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
NUMBER = re.compile(r"(\d+\.\d+)")


def same(kept, made):
    """The last digit of a coordinate may differ between machines."""
    kept, made = NUMBER.split(kept), NUMBER.split(made)
    return len(kept) == len(made) and all(
        a == b or (i % 2 == 1 and abs(float(a) - float(b)) < 0.11) for i, (a, b) in enumerate(zip(kept, made)))


def picture_errors(root, command, page):
    commands = COMMAND.findall(page)
    shown = {"docs/" + name for name in PICTURE.findall(page)}
    if shown != {path for _, path in commands} or not shown:
        yield f"shows {sorted(shown)}, but has commands for {sorted(path for _, path in commands)}"
    for line, path in commands:
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "made.svg"
            subprocess.run([command, *shlex.split(line.replace(path, str(made)))], check=True)
            xml.etree.ElementTree.parse(made)
            if os.environ.get("LOCKSTEP_UPDATE_IMAGES") == "1":
                (root / path).write_text(made.read_text())
            elif not (root / path).is_file() or not same((root / path).read_text(), made.read_text()):
                yield f"{path} is not what `lockstep {line}` makes; LOCKSTEP_UPDATE_IMAGES=1 writes it again"


def table_errors(command, page):
    rows = ROW.findall(page)
    sections = set(re.findall(r"^### (\S+)$", page, re.MULTILINE)) - {"file"}
    if {row[0] for row in rows} != sections:
        yield f"the table has {sorted(row[0] for row in rows)}, the sections are {sorted(sections)}"
    for kind, microbatches, chunks, *numbers in rows:
        printed = subprocess.run([command, "schedule", "--kind", kind, "--stages", "4", "--microbatches", microbatches, "--chunks", chunks,
                                  "--format", "json"], capture_output=True, text=True, check=True).stdout
        result = json.loads(printed)
        v = int(chunks)
        expected = [f"{result['makespan'] / v:g}", f"{100 * result['bubble_makespan']:.1f}", f"{100 * result['bubble_span']:.1f}",
                    f"{result['peak_live'][0] / v:g}", f"{result['peak_live'][-1] / v:g}"]
        if numbers != expected:
            yield f"the row of {kind} has {numbers}, the command says {expected}"


def main():
    root, command = pathlib.Path(sys.argv[1]), sys.argv[2]
    page = (root / "docs/pipeline.md").read_text()
    found = [*picture_errors(root, command, page), *table_errors(command, page)]
    for error in found:
        print(f"docs/pipeline.md: {error}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
