#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Injects every fault of the catalogue and prints what was seen, case by case. `make faults` and `make faults-all` call it.

usage: run.py FOLDER_OF_PROGRAMS [--all] [--only A1,A4] [--markdown FILE] [--patience FACTOR]

It runs in namespaces of its own, so that everything that a case leaves behind is seen: processes, zombies, ports, files in /dev/shm and in
/tmp. It must be root for the cases that need cgroups, and needs strace. Status 1 if a case fails.
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import support
from support import SOURCE, hosts

import a_death  # noqa: F401  (each declares its cases)
import b_program  # noqa: F401
import c_storage  # noqa: F401
import d_environment  # noqa: F401
import e_peers  # noqa: F401


def text_of(seconds):
    return "" if seconds is None else f"{seconds:.2f} s"


def row_of(row):
    return [row["case"], row["inject"], row["expect"], text_of(row["detect"]), text_of(row["end"]),
            "" if row["code"] is None else str(row["code"]), "pass" if row["passed"] else "**fail**", row["note"]]


def markdown(rows):
    head = ["case", "injected", "must be seen", "time to detection", "time to the end", "exit code", "result", "measured or missing"]
    lines = ["| " + " | ".join(words.replace("|", "\\|").replace("\n", " ") for words in row) + " |" for row in
             [head, *map(row_of, rows)]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def main():
    parser = argparse.ArgumentParser(description="the catalogue of faults")
    parser.add_argument("programs", type=pathlib.Path)
    parser.add_argument("--all", action="store_true", help="the full number of injections of each case, and ten minutes of fuzzing")
    parser.add_argument("--only", default="", help="cases, or letters of cases, separated by commas")
    parser.add_argument("--markdown", type=argparse.FileType("w"), help="file for the table")
    parser.add_argument("--patience", type=float, default=1, help="factor on all limits of time, for a loaded machine")
    options = parser.parse_args()
    programs = options.programs.resolve()
    if not (programs / "lockstep").exists():
        sys.exit(f"run.py: {programs}/lockstep is missing; run make tests")
    names = sorted(support.CASES, key=lambda name: (name[0], int(name[1:])))
    only = [word for word in options.only.split(",") if word]
    unknown = [word for word in only if word not in names and word not in {name[0] for name in names}]
    if unknown:
        sys.exit(f"run.py: --only {','.join(unknown)}: the cases are {', '.join(names)}")
    os.environ.setdefault("LOCKSTEP_MPIRUN", shutil.which("mpirun") or "")
    hosts.enter()
    if not str(programs).startswith("/tmp/") and not str(SOURCE).startswith("/tmp/"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/tmp"], check=True)  # ours, so that what is left behind can be seen
        os.environ["LOCKSTEP_CATALOGUE_TMP"] = "1"
    for name in ("OMP_NUM_THREADS", "LOCKSTEP_FAULT", "LOCKSTEP_CHECK"):
        os.environ.pop(name, None)
    rows = []
    start = time.monotonic()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="catalogue"))
    folder.chmod(0o755)
    for name in names:
        if only and name not in only and name[0] not in only:
            continue
        row = support.run(name, programs, folder / name, options.all, options.patience)
        rows.append(row)
        _, inject, _, detect, end, code, _, note = row_of(row)
        times = ", ".join(filter(None, [detect and f"detected after {detect}", end and f"ended after {end}", code and f"code {code}"]))
        print(f"{name:4}{'pass' if row['passed'] else 'FAIL'}  {inject}: {times} ({row['seconds']:.1f} s)" + (f"\n        {note}" if note else ""),
              flush=True)
        if options.markdown:
            options.markdown.seek(0)
            options.markdown.truncate()
            options.markdown.write(markdown(rows))
            options.markdown.flush()
    folder.rmdir()
    failed = [row["case"] for row in rows if not row["passed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} cases pass in {time.monotonic() - start:.0f} s" +
          (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
