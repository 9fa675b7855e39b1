# SPDX-License-Identifier: Apache-2.0
"""Attention of one row of 8192 tokens, forward and backward, by 2 and 4 ranks that share it: Lockstep's ring and gather, a ring of neighbouring
chunks, and PyTorch's experimental context parallelism over Gloo where the python3 at hand has it and it runs.

    python3 bench/context.py BIN_DIR [ROUNDS]

BIN_DIR has lockstep and bench_context (make bench). All heads have keys of their own, as PyTorch's version wants them. Ranks have one thread each.
"""
import os
import pathlib
import subprocess
import sys

LENGTH, HEADS, WIDTH = 8192, 8, 64


def main():
    folder, rounds = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else "5"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for ranks in (2, 4):
        words = [folder / "lockstep", "run", "-n", ranks, folder / "bench_context", LENGTH, HEADS, HEADS, WIDTH, rounds]
        subprocess.run([str(word) for word in words], check=True, env=environment)
        peer = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, pathlib.Path(__file__).with_name("torch_context.py"), LENGTH,
                HEADS, WIDTH, rounds]
        result = subprocess.run([str(word) for word in peer], capture_output=True, text=True, env=environment)
        errors = [line for line in result.stderr.splitlines() if "Error" in line]
        print(result.stdout.strip() if result.returncode == 0 else f"PyTorch does not run: {errors[0] if errors else 'no torch'}", flush=True)


if __name__ == "__main__":
    main()
