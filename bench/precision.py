# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` of Llama models on one GPU in bfloat16 and with 8-bit products: tokens per second, and the peak of memory.

    python3 bench/precision.py BIN_DIR [SIZE...] [--offload]      sizes of bench/llama_sizes.py; 162M, 1.2B, 3.1B and 6.7B if not given
    python3 bench/precision.py BIN_DIR --graphs                   162M with 4 x 1024 tokens, where the CPU limits: with and without CUDA graphs, in turn

The precisions run in turn. train.recompute is fit: what does not fit is recomputed, and the table says how much. --offload keeps the states of the
optimizer in host memory. The data are random tokens; the times are medians of all steps but the first four.
"""
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

import llama_sizes
import offload

SIZES = llama_sizes.SIZES | llama_sizes.LARGE
# Rows and tokens of each where they differ from the other benchmarks'.
SHAPES = {"6.7B": (32, 1024)}
STEPS = {"162M": 24, "1.2B": 14}


def train(lockstep, name, precision, extra, folder, shape=None, steps=None, first=4):
    """Medians of a run's steps without the first ones, and what the run said of recomputation."""
    size = SIZES[name]
    rows, length = shape or SHAPES.get(name, (size["rows"], size["length"]))
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    model = ["-n", 1, "--train.device", "cuda", "--train.precision", precision, "--model.kind", "llama", "--train.seq_len", length,
             "--train.micro_batch", rows]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        model += [f"--model.{key}", size[key]]
    model += extra
    words = [lockstep, "train", *model, "--data.path", f"{folder}/tokens.bin", "--data.validation", 0, "--optim.warmup", 2, "--optim.lr", "1e-4",
             "--run.dir", "", "--metrics.file", metrics, "--train.steps", steps or STEPS.get(name, 8)]
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{name} with {precision} failed:\n{result.stderr[-2000:]}")
    again = [line.strip() for line in result.stdout.splitlines() if "recompute" in line]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    counted = [line for line in lines if "loss" in line][first:]
    return {"model": model, "ms": statistics.median(line["step_ms"] for line in counted), "tokens": rows * length, "recompute": "".join(again),
            "gib": max(line["peak_bytes"] for line in counted) / 2**30}


def random_tokens(folder):
    draw = random.Random(1)
    (pathlib.Path(folder) / "tokens.bin").write_bytes(b"".join(draw.randrange(32000).to_bytes(2, "little") for _ in range(1 << 20)))


def main():
    words = sys.argv[1:]
    extra, by_graphs = [], "--graphs" in words
    words = [word for word in words if word != "--graphs"]
    if "--offload" in words:
        words.remove("--offload")
        extra = [*offload.STATES, "--offload.device_limit", "120GB"]
    lockstep, names = pathlib.Path(words[0]).resolve() / "lockstep", words[1:] or ["162M", "1.2B", "3.1B", "6.7B"]
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(folder)
        for graphs in ["off", "on"] * 3 if by_graphs else []:
            for precision in ("bfloat16", "fp8"):
                found = train(lockstep, "162M", precision, ["--train.graphs", graphs], folder, shape=(4, 1024), steps=60, first=10)
                print(f"162M {precision:9} graphs {graphs:4} {found['tokens'] / found['ms'] * 1e3:10.0f} tokens/s {found['ms']:9.2f} ms", flush=True)
        for name in [] if by_graphs else names:
            for precision in ("bfloat16", "fp8"):
                found = train(lockstep, name, precision, ["--train.recompute", "fit", *extra], folder)
                print(f"{name:6} {precision:9} {found['tokens'] / found['ms'] * 1e3:10.0f} tokens/s {found['ms']:9.1f} ms {found['gib']:7.1f} GiB  "
                      f"{found['recompute']}", flush=True)


if __name__ == "__main__":
    main()
