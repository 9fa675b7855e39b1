# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` of Llama models on one GPU in bfloat16 and with 8-bit products: tokens per second, and the peak of memory.

    python3 bench/precision.py BIN_DIR [SIZE...] [--offload] [--micro ROWS] [--only PRECISION] [-- OPTIONS]
                                                                  sizes of bench/llama_sizes.py; 162M, 1.2B, 3.1B and 6.7B if not given
    python3 bench/precision.py BIN_DIR --graphs                   162M with 4 x 1024 tokens, where the CPU limits: with and without CUDA graphs, in turn

The precisions run in turn. train.recompute is fit: what does not fit is recomputed, and the table says how much. --offload keeps the states of the
optimizer in host memory, --micro cuts the step into micro-batches of so many rows, and OPTIONS of `lockstep train` go to every run. The data are random tokens; the times are medians of all steps but the first four, or the first half of fewer than eight.
"""
import argparse
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
SHAPES = {"6.7B": (32, 1024), "13B": (64, 2048)}
STEPS = {"162M": 24, "1.2B": 14, "13B": 4}


def train(lockstep, name, precision, extra, folder, shape=None, steps=None, first=None, micro=None):
    """Medians of a run's steps without the first ones, and what the run said of recomputation."""
    size = SIZES[name]
    rows, length = shape or SHAPES.get(name, (size["rows"], size["length"]))
    steps = steps or STEPS.get(name, 8)
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    model = ["-n", 1, "--train.device", "cuda", "--train.precision", precision, "--model.kind", "llama", "--train.seq_len", length,
             "--train.micro_batch", micro or rows, "--train.global_batch", rows]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        model += [f"--model.{key}", size[key]]
    model += extra
    words = [lockstep, "train", *model, "--data.path", f"{folder}/tokens.bin", "--data.validation", 0, "--optim.warmup", 2, "--optim.lr", "1e-4",
             "--run.dir", "", "--metrics.file", metrics, "--train.steps", steps]
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{name} with {precision} failed:\n{result.stderr[-2000:]}")
    again = [line.strip() for line in result.stdout.splitlines() if "recompute" in line]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    counted = [line for line in lines if "loss" in line][min(4, steps // 2) if first is None else first:]
    return {"model": model, "ms": statistics.median(line["step_ms"] for line in counted), "tokens": rows * length, "recompute": "".join(again),
            "gib": max(line["peak_bytes"] for line in counted) / 2**30}


def random_tokens(folder):
    draw = random.Random(1)
    (pathlib.Path(folder) / "tokens.bin").write_bytes(b"".join(draw.randrange(32000).to_bytes(2, "little") for _ in range(1 << 20)))


def main():
    words, options = sys.argv[1:], []
    if "--" in words:
        words, options = words[:words.index("--")], words[words.index("--") + 1:]
    given = argparse.ArgumentParser()
    given.add_argument("bin_dir", type=pathlib.Path)
    given.add_argument("sizes", nargs="*", metavar="SIZE")
    given.add_argument("--graphs", action="store_true")
    given.add_argument("--offload", action="store_true")
    given.add_argument("--micro", type=int)
    given.add_argument("--only", choices=["bfloat16", "fp8"])
    given = given.parse_intermixed_args(words)
    if given.offload:
        options = [*offload.STATES, "--offload.device_limit", "120GB", *options]
    lockstep = given.bin_dir.resolve() / "lockstep"
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(folder)
        for graphs in ["off", "on"] * 3 if given.graphs else []:
            for precision in ("bfloat16", "fp8"):
                found = train(lockstep, "162M", precision, ["--train.graphs", graphs, *options], folder, shape=(4, 1024), steps=60, first=10)
                print(f"162M {precision:9} graphs {graphs:4} {found['tokens'] / found['ms'] * 1e3:10.0f} tokens/s {found['ms']:9.2f} ms", flush=True)
        for name in [] if given.graphs else given.sizes or ["162M", "1.2B", "3.1B", "6.7B"]:
            for precision in [given.only] if given.only else ("bfloat16", "fp8"):
                found = train(lockstep, name, precision, ["--train.recompute", "fit", *options], folder, micro=given.micro)
                print(f"{name:6} {precision:9} {found['tokens'] / found['ms'] * 1e3:10.0f} tokens/s {found['ms']:9.1f} ms {found['gib']:7.1f} GiB  "
                      f"{found['recompute']}", flush=True)


if __name__ == "__main__":
    main()
