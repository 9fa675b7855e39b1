# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` of Llama models on one GPU in bfloat16 and with 8-bit products: tokens per second, and the peak of memory.

    python3 bench/precision.py BIN_DIR [SIZE...] [--offload]      sizes of bench/llama_sizes.py; 162M, 1.2B, 3.1B and 6.7B if not given

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


def train(lockstep, name, precision, extra, folder):
    size = SIZES[name]
    rows, length = SHAPES.get(name, (size["rows"], size["length"]))
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    words = [lockstep, "train", "-n", 1, "--train.device", "cuda", "--train.precision", precision, "--train.recompute", "fit", "--data.path",
             f"{folder}/tokens.bin", "--data.validation", 0, "--model.kind", "llama", "--optim.warmup", 3, "--optim.lr", "1e-4", "--run.dir", "",
             "--metrics.file", metrics, "--train.seq_len", length, "--train.micro_batch", rows, "--train.steps", STEPS.get(name, 8), *extra]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        words += [f"--model.{key}", size[key]]
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{name} with {precision} failed:\n{result.stderr[-2000:]}")
    again = [line.strip() for line in result.stdout.splitlines() if "recompute" in line]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    steps = [line for line in lines if "loss" in line][4:]
    milliseconds = statistics.median(line["step_ms"] for line in steps)
    peak = max(line["peak_bytes"] for line in steps) / 2**30
    print(f"{name:6} {precision:9} {rows * length / milliseconds * 1e3:10.0f} tokens/s {milliseconds:9.1f} ms {peak:7.1f} GiB  {''.join(again)}", flush=True)


def main():
    words = sys.argv[1:]
    extra = []
    if "--offload" in words:
        words.remove("--offload")
        extra = [*offload.STATES, "--offload.device_limit", "120GB"]
    lockstep, names = pathlib.Path(words[0]).resolve() / "lockstep", words[1:] or ["162M", "1.2B", "3.1B", "6.7B"]
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        tokens = b"".join(draw.randrange(32000).to_bytes(2, "little") for _ in range(1 << 20))
        (pathlib.Path(folder) / "tokens.bin").write_bytes(tokens)
        for name in names:
            for precision in ("bfloat16", "fp8"):
                train(lockstep, name, precision, extra, folder)


if __name__ == "__main__":
    main()
