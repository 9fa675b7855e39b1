# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one process beside dd, in turn, in one folder: GB/s of saving and loading, and how long a save in the background holds training up.

    python3 bench/checkpoint.py BIN_DIR FOLDER [MEGABYTES] [ROUNDS] [DEVICE]      FOLDER lies on the disk in question

dd writes as many zeros with bs=1M conv=fsync, and reads the checkpoint's file with bs=1M. Its pages are dropped from memory before; what
reads it again may find it in the memory of a virtual disk's host, so who is first changes from round to round, and the two are told apart. Warm: from this
machine's memory. Lockstep's times contain checksums, the manifest, renames and syncs of folders; starting the programs is in neither. Ratios are of medians.
"""
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys


def drop_from_memory(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def dd(arguments):
    text = subprocess.run(["dd", "bs=1M", *arguments], check=True, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}).stderr
    return float(re.search(r"copied, ([0-9.e+-]+) s", text)[1])


def main():
    bin_dir, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]) / "bench-checkpoint"
    megabytes, rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 2048, int(sys.argv[4]) if len(sys.argv) > 4 else 5
    device = sys.argv[5] if len(sys.argv) > 5 else "cpu"

    def lockstep(what):
        words = [bin_dir / "bench_checkpoint", what, folder / "checkpoints", str(megabytes), device]
        return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    times = {name: [] for name in ("dd write", "save", "dd read", "load", "dd read again", "load again", "dd read warm", "load warm")}
    folder.mkdir(parents=True)
    try:
        zeros, checkpoints = folder / "zeros", folder / "checkpoints"

        def write_zeros():
            return dd(["if=/dev/zero", f"of={zeros}", f"count={megabytes}", "conv=fsync"])

        def read_file():
            (file,) = checkpoints.glob("step-*/*.safetensors")
            return dd([f"if={file}", "of=/dev/null"])

        for round in range(rounds):
            turn = 1 if round % 2 == 0 else -1
            zeros.unlink(missing_ok=True)
            shutil.rmtree(checkpoints, ignore_errors=True)
            for name, function in (("dd write", write_zeros), ("save", lambda: lockstep("save")["seconds"]))[::turn]:
                os.sync()
                times[name].append(function())
            reads = (("dd read", read_file), ("load", lambda: lockstep("load")["seconds"]))[::turn]
            for (name, function), when in zip(reads, ("", " again")):
                drop_from_memory(folder)
                times[name + when].append(function())
            for name, function in reads:
                times[f"{name} warm"].append(function())
        background = lockstep("async")
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        rates = ", ".join(f"{megabytes / 953.674 / value:.2f}" for value in values)
        print(f"{name:14} {megabytes / 953.674 / medians[name]:6.2f} GB/s  ({rates})")
    for ours, theirs in (("save", "dd write"), ("load", "dd read"), ("load again", "dd read again"), ("load warm", "dd read warm")):
        print(f"{ours} / {theirs}: {medians[theirs] / medians[ours]:.2f}")
    print(f"in the background: training waits {background['stall_s'] * 1e3:.0f} ms of {background['save_s'] * 1e3:.0f}; "
          f"a plain copy takes {background['copy_s'] * 1e3:.0f} ms: {background['stall_s'] / background['copy_s']:.2f}x")


if __name__ == "__main__":
    main()
