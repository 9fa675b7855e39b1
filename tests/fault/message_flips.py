#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Flips random bits of what crosses between two hosts, one in each of COUNT runs, and counts the runs that found the flip and named its
sender. A run trains on two simulated hosts (tests/cluster/hosts.py) of one rank each, for longer than the flip needs to come. Status 0 if
at least 99 % are found and named.

usage: message_flips.py FOLDER_OF_PROGRAMS COUNT SEED
"""
import pathlib
import random
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
import hosts  # noqa: E402

MESSAGES = 200  # that every run receives at least, on each rank


def train(lockstep, data):
    return [
        lockstep, "train", "--data.path", data, "--model.layers", 1, "--model.hidden", 32, "--model.heads", 2, "--train.seq_len", 16,
        "--train.micro_batch", 1, "--train.steps", 40, "--comm.backend", "gloo", "--checkpoint.dir", "", "--run.dir", "", "--comm.timeout", 20
    ]


def main():
    hosts.enter()
    lockstep, count, seed = pathlib.Path(sys.argv[1]).resolve() / "lockstep", int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    found = named = 0
    with hosts.Hosts(2) as both:
        data = pathlib.Path(both.folder, "text.txt")
        data.write_text("some text to train on\n" * 1000)
        for number in range(1, count + 1):
            rank, message, bit = chance.randrange(2), chance.randrange(1, MESSAGES + 1), chance.randrange(1 << 40)
            fault = f"rank={rank},message={message},action=flip:{bit}"
            jobs = both.lockstep_run(lockstep, 1, train(lockstep, data), options=["--grace", 5000], LOCKSTEP_FAULT=fault)
            for job in jobs:
                job.wait(120)
            text = "\n".join(job.err + job.out for job in jobs)
            is_found = "arrived damaged" in text and all(job.code != 0 for job in jobs)
            is_named = is_found and re.search(
                rf"rank {rank} of group '.*of rank \d+ \(rank {1 - rank} of the job, host h{1 - rank}\) arrived damaged", text) is not None
            found += is_found
            named += is_named
            if not is_named:
                print(f"{fault}: found {is_found}, named {is_named}\n{text}", flush=True)
            if number % 50 == 0:
                print(f"{number} runs: {found} found, {named} named", flush=True)
    print(f"found {found} of {count}, named {named} of {count} (seed {seed})")
    sys.exit(0 if named >= 0.99 * count else 1)


if __name__ == "__main__":
    main()
