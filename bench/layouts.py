# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` of one model over the same ranks in different layouts, in turn: tokens per second, time in communication, and memory.

    python3 bench/layouts.py BIN_DIR RANKS [ROUNDS]      BIN_DIR holds lockstep

Every layout trains the same micro-batches of the same batch with one thread per rank on the CPU, so losses must agree; the script says if they do not.
Times are medians over the steps of all rounds without the first three. Memory is what `lockstep plan memory` predicts of the rank that takes most.
"""
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

MODEL = ["--model.kind", "llama", "--model.layers", "8", "--model.hidden", "256", "--model.heads", "8", "--model.vocab", "4096",
         "--train.seq_len", "256", "--train.micro_batch", "1", "--train.threads", "1", "--train.device", "cpu"]
STEPS = 8


def layouts(ranks):
    half = ranks // 2
    found = {"dp": [], "dp, shard full": ["--parallel.shard", "full"], "tp": ["--parallel.tp", ranks],
             "tp, sequence": ["--parallel.tp", ranks, "--parallel.sequence_parallel", "true"],
             "pp, 1f1b": ["--parallel.pp", ranks], "pp, zb-h1": ["--parallel.pp", ranks, "--parallel.schedule", "zb-h1"]}
    if ranks % 4 == 0:
        found |= {f"dp {half} x tp 2": ["--parallel.tp", 2], f"dp 2 x tp {half}": ["--parallel.tp", half],
                  f"tp 2 x pp {half}": ["--parallel.tp", 2, "--parallel.pp", half]}
    if ranks % 8 == 0:
        cube = ["--parallel.tp", 2, "--parallel.pp", 2, "--parallel.sequence_parallel", "true"]
        found |= {f"dp {ranks // 4} x tp 2 x pp 2": cube, f"dp {ranks // 4} x tp 2 x pp 2, shard full": cube + ["--parallel.shard", "full"]}
    return found


def run(words):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{words} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def train(bin_dir, ranks, options, folder, round):
    metrics = pathlib.Path(folder) / f"metrics-{round}.jsonl"
    run([bin_dir / "lockstep", "train", "-n", ranks, *options, "--data.path", f"{folder}/tokens.bin", "--data.validation", "0", "--train.steps", STEPS,
         "--run.dir", "", "--metrics.file", metrics])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    return lines


def main():
    bin_dir, ranks, rounds = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 2
    batch = 2 * ranks  # so that a pipeline over all ranks has two micro-batches for each
    options = MODEL + ["--train.global_batch", str(batch)]
    found, losses = {name: [] for name in layouts(ranks)}, {}
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(1)
        (pathlib.Path(folder) / "tokens.bin").write_bytes(b"".join(draw.randrange(4096).to_bytes(2, "little") for _ in range(1 << 18)))
        for round in range(rounds):
            for name, layout in layouts(ranks).items():
                lines = train(bin_dir, ranks, options + layout, folder, round)
                found[name] += lines[3:]
                losses[name] = lines[-1]["loss"]
        one = train(bin_dir, 1, options, folder, "one")
    print(f"{ranks} ranks, {batch} x 256 tokens per step, {rounds} x {STEPS} steps; one rank {statistics.median(line['step_ms'] for line in one[3:]):.0f} ms")
    print(f"{'layout':32}{'ms':>8}{'tokens/s':>10}{'comm ms':>9}{'memory':>10}")
    for name, layout in layouts(ranks).items():
        step = statistics.median(line["step_ms"] for line in found[name])
        comm = statistics.median(line["comm_ms"] for line in found[name])
        plan = run([bin_dir / "lockstep", "plan", "memory", "-n", ranks, *options, *layout])
        memory = re.search(r"takes most, ([^;]*);", plan).group(1)
        agrees = "" if abs(losses[name] / one[-1]["loss"] - 1) < 1e-5 else f"  loss {losses[name]}, one rank {one[-1]['loss']}"
        print(f"{name:32}{step:8.0f}{batch * 256 / step * 1e3:10.0f}{comm:9.0f}{memory:>10}{agrees}")


if __name__ == "__main__":
    main()
