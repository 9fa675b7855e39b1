#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether two builds train alike, bit for bit: the losses and gradient norms of 20 steps in six layouts. For changes that
should move code and no number.

usage: same_losses.py BEFORE/bin/lockstep AFTER/bin/lockstep
"""
import json
import pathlib
import subprocess
import sys
import tempfile

LAYOUTS = {
    "1": [],
    "dp 2": ["-n", "2"],
    "shard full 4": ["-n", "4", "--parallel.shard", "full"],
    "tp 2 x pp 2": ["-n", "4", "--parallel.tp", "2", "--parallel.pp", "2"],
    "offload": ["-n", "2", "--parallel.shard", "full", "--offload.params", "true", "--offload.grads", "true", "--offload.optimizer", "true"],
    "reproducible 4": ["-n", "4", "--train.reproducible", "true"],
}
CONFIG = pathlib.Path(__file__).resolve().parent.parent.parent / "examples/train.toml"


def curve(lockstep, options):
    with tempfile.TemporaryDirectory() as folder:
        metrics = f"{folder}/metrics.jsonl"
        subprocess.run([pathlib.Path(lockstep).resolve(), "train", *options, "--config", CONFIG, "--train.steps", "20", "--optim.warmup", "5",
                        "--train.global_batch", "32", "--train.threads", "1", "--train.eval_tokens", "4096", "--checkpoint.dir", "", "--metrics.file", metrics],
                       cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in open(metrics)]
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


def main():
    different = 0
    for name, options in LAYOUTS.items():
        before, after = (curve(lockstep, options) for lockstep in sys.argv[1:3])
        same = before == after and len(before) == 20
        different += not same
        print(f"{name:<16} loss {before[0][0]!r} to {before[-1][0]!r}: {'the same bits' if same else f'DIFFERENT, {after[-1][0]!r}'}", flush=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
