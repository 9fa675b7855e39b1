#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Flips random bits of parameters and optimizer state while a run trains, one between every two votes, and counts what is found and mended.

usage: flips.py LOCKSTEP_COMMAND COUNT SEED [STEPS_BETWEEN_VOTES [RANKS]]

Not part of make test: 1000 flips take minutes. Each is at a random rank, tensor (by its size), element, bit and step.
What is not found was rounded away by the updates before the vote (low bits of moments): then all ranks held equal bits again.
"""
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

MOST = 400  # faults of one run: an environment variable has at most 128 KiB


def train(command, folder, steps, options, faults=()):
    arguments = [command, "train", "--data.path", str(folder / "text.txt"), "--model.layers", "1", "--model.hidden", "32", "--model.heads", "2",
                 "--train.seq_len", "16", "--train.micro_batch", "1", "--train.threads", "1", "--optim.warmup", "1", "--run.dir", "",
                 "--train.steps", str(steps), "--train.log_every", "1000000", *options]
    environment = os.environ | ({"LOCKSTEP_FAULT": ";".join(faults)} if faults else {})
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"flips.py: {done.stderr[-2000:]}")
    return done.stderr


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    command, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    every = int(sys.argv[4]) if len(sys.argv) > 4 else 10
    ranks = int(sys.argv[5]) if len(sys.argv) > 5 else 3
    pick = random.Random(seed)
    found = named = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text("".join(f"int f{i * i % 97}(int x) {{ return x + {i % 13}; }}\n" for i in range(400)))
        train(command, folder, 2, ["-n", "1", "--checkpoint.dir", str(folder / "names")])
        tensors = json.loads((folder / "names/step-00000002/manifest.json").read_text())["tensors"]
        sizes = {tensor: math.prod(record["shape"]) for tensor, record in tensors.items() if record["dtype"] == "F32"}
        for first in range(0, count, MOST):
            flips = []
            for i in range(min(MOST, count - first)):
                tensor = pick.choices(list(sizes), list(sizes.values()))[0]
                flips.append((pick.randrange(ranks), i * every + pick.randint(1, every), tensor, pick.randrange(sizes[tensor]), pick.randrange(32)))
            faults = [f"rank={rank},step={step},action=flip:{tensor}:{element}:{bit}" for rank, step, tensor, element, bit in flips]
            log = train(command, folder, len(flips) * every,
                        ["-n", str(ranks), "--checkpoint.dir", "", "--train.verify_every", str(every), "--train.on_corruption", "repair"], faults)
            votes = {int(step): int(rank) for step, rank in re.findall(r"step (\d+): rank (\d+) holds other bits", log)}
            for i, (rank, step, tensor, element, bit) in enumerate(flips):
                # A bad step is followed by a vote of its own.
                accused = next((votes[at] for at in range(step, (i + 1) * every + 1) if at in votes), None)
                found += accused is not None
                named += accused == rank
                if accused != rank:
                    print(f"not {'named' if accused is not None else 'found'}: bit {bit} of element {element} of {tensor}, {(i + 1) * every - step} steps before the vote")
    print(f"found {found}/{count}, named {named}/{count}: {ranks} ranks, a vote every {every} steps, seed {seed}")


if __name__ == "__main__":
    main()
