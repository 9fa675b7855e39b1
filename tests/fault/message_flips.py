#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Flips random bits of what crosses between two hosts, one in each of COUNT runs, and counts the runs that found the flip and named its
sender. A run trains with one rank on each of two hosts, which are two launchers with names of their own on this machine, for longer than the
flip needs to come. Status 0 if at least 99 % are found and named.

usage: message_flips.py FOLDER_OF_PROGRAMS COUNT SEED [RUNS_AT_A_TIME]
"""
import concurrent.futures
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile

MESSAGES = 200  # that every run receives at least, on each rank


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(lockstep, data, fault):
    """What both hosts say, and their exit codes."""
    rendezvous = f"127.0.0.1:{free_port()}"
    jobs = []
    for node in range(2):
        words = [
            lockstep, "run", "-n", 1, "--nnodes", 2, "--node-rank", node, "--rendezvous", rendezvous, "--grace", 5000, lockstep, "train",
            "--data.path", data, "--model.layers", 1, "--model.hidden", 32, "--model.heads", 2, "--train.seq_len", 16, "--train.micro_batch", 1,
            "--train.steps", 40, "--train.threads", 1, "--train.device", "cpu", "--comm.backend", "gloo", "--checkpoint.dir", "", "--run.dir", "", "--comm.timeout", 20
        ]
        variables = os.environ | {"LOCKSTEP_HOST": f"h{node}", "LOCKSTEP_TOKEN": "a" * 64, "LOCKSTEP_FAULT": fault}
        jobs.append(subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables))
    texts = [job.communicate(timeout=120)[0] for job in jobs]
    return "\n".join(texts), [job.returncode for job in jobs]


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    lockstep, count, seed = pathlib.Path(sys.argv[1]).resolve() / "lockstep", int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(int((sys.argv + [1])[4])) as pool:
        data = pathlib.Path(folder, "text.txt")
        data.write_text("some text to train on\n" * 1000)

        def outcome(choice):
            rank, message, bit = choice
            fault = f"rank={rank},message={message},action=flip:{bit}"
            text, codes = run(lockstep, data, fault)
            found = "arrived damaged" in text and 0 not in codes
            named = found and re.search(
                rf"rank {rank} of group '.*of rank \d+ \(rank {1 - rank} of the job\b[^)]*\) arrived damaged", text) is not None
            if not named:
                print(f"{fault}: found {found}, named {named}\n{text}", flush=True)
            return found, named

        flips = [(chance.randrange(2), chance.randrange(1, MESSAGES + 1), chance.randrange(1 << 40)) for _ in range(count)]
        outcomes = list(pool.map(outcome, flips))
    found, named = (sum(column) for column in zip(*outcomes))
    print(f"found {found} of {count}, named {named} of {count} (seed {seed})")
    sys.exit(0 if named >= 0.99 * count else 1)


if __name__ == "__main__":
    main()
