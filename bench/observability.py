# SPDX-License-Identifier: Apache-2.0
"""What it costs to observe a run: `lockstep train` without a run folder, with everything that a report shows, and with the health of layers too, in turn.

    python3 bench/observability.py BIN_DIR cpu|gpu [ROUNDS]     cpu: the GPT of `make train` on 2 ranks; gpu: 162M

A run's figure is the wall time between the lines that the trainer prints after step FIRST and after the last step, so what happens between steps counts.
"""
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from llama_sizes import SIZES

FIRST = 10
WAYS = {
    "nothing": ["--run.dir", "", "--metrics.file", "", "--checkpoint.dir", ""],
    "everything": ["--metrics.tensorboard", "auto", "--metrics.trace", "auto"],
    "everything, health every 10 steps": ["--metrics.tensorboard", "auto", "--metrics.trace", "auto", "--metrics.health_every", 10],
}


def options_of(kind, data):
    if kind == "cpu":
        return ["-n", 2, "--config", pathlib.Path(__file__).resolve().parent.parent / "examples/train.toml", "--train.steps", 60, "--train.eval_every", 0]
    size = SIZES["162M"]
    words = ["--model.kind", "llama", "--train.dtype", "bfloat16", "--data.path", data, "--train.steps", 150, "--train.seq_len", size["length"],
             "--train.micro_batch", size["rows"]]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        words += [f"--model.{key}", size[key]]
    return words


def milliseconds(lockstep, options, way, folder):
    words = [lockstep, "train", *options, "--data.validation", 0, "--checkpoint.every", 0, "--train.log_every", 1, "--run.dir", f"{folder}/run", *way]
    with subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        times, text = [], []
        for line in job.stdout:
            text.append(line)
            if line.startswith("step ") and "loss" in line:
                times.append(time.monotonic())
    if job.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{''.join(text)}")
    return 1e3 * (times[-1] - times[FIRST - 1]) / (len(times) - FIRST)


def main():
    lockstep, kind, rounds = pathlib.Path(sys.argv[1]).resolve() / "lockstep", sys.argv[2], int((sys.argv + [5])[3])
    found = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            with tempfile.TemporaryDirectory() as folder:
                data = pathlib.Path(folder, "tokens.bin")
                draw = random.Random(1)
                data.write_bytes(b"".join(draw.randrange(32000).to_bytes(2, "little") for _ in range(1 << 18)))
                found[way].append(milliseconds(lockstep, options_of(kind, data), WAYS[way], folder))
    print(f"{'observed':36}{'best ms':>10}{'median ms':>11}{'of nothing':>12}   ratio of medians")
    base = found["nothing"]
    for way, times in found.items():
        print(f"{way:36}{min(times):10.2f}{statistics.median(times):11.2f}{min(times) / min(base):12.4f}   {statistics.median(times) / statistics.median(base):.4f}")


if __name__ == "__main__":
    main()
