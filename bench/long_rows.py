# SPDX-License-Identifier: Apache-2.0
"""Long rows on one GPU: `lockstep train` of Llama models in bfloat16 with rows of up to 131,072 tokens, and the rate that attention allows.

    python3 bench/long_rows.py BIN_DIR [ROW...]      ROW: one of ROWS; all if none is given

The rate that is allowed is that of rows of 2,048 tokens, times the floating-point operations of a token there, over those of a token of the long row: the
products of the weights, and those of causal attention. Peak memory is compared with `lockstep plan memory`.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

import precision

LIMIT = ["--memory.max_per_device", "139GB"]
ROWS = {
    "1.2B, 16 x 2048": ("1.2B", (16, 2048), 10, ["--train.recompute", "none"]),
    "1.2B, 1 x 32768": ("1.2B", (1, 32768), 10, ["--train.recompute", "none"]),
    "1.2B, 1 x 32768, tiles": ("1.2B", (1, 32768), 8, ["--train.recompute", "none", "--train.tile", 4096]),
    "1.2B of 16 heads, 16 x 2048": ("1.2B", (16, 2048), 10, ["--train.recompute", "none", "--model.heads", 16]),
    "1.2B of 16 heads, 1 x 32768": ("1.2B", (1, 32768), 10, ["--train.recompute", "none", "--model.heads", 16]),
    "1.2B, 1 x 131072": ("1.2B", (1, 131072), 3, ["--train.recompute", "fit"]),
    "6.7B, 1 x 65536": ("6.7B", (1, 65536), 3, ["--train.recompute", "fit"]),
}


def operations(name, length):
    """Of a token. Backward of attention multiplies five matrices for two of forward: it computes the scores again."""
    size = precision.SIZES[name]
    weights = size["layers"] * (4 * size["hidden"] ** 2 + 3 * size["hidden"] * size["ffn"]) + size["hidden"] * size["vocab"]
    return 3 * 2 * weights + 3.5 * 2 * size["layers"] * length * size["hidden"]


def planned(lockstep, model):
    text = subprocess.run([str(word) for word in [lockstep, "plan", "memory", *model]], capture_output=True, text=True).stdout
    value, unit = re.search(r"rank 0 takes most, ([0-9.]+) ([MG])B", text).groups()
    return float(value) / (1024 if unit == "M" else 1)


def main():
    lockstep, names = pathlib.Path(sys.argv[1]).resolve() / "lockstep", sys.argv[2:] or list(ROWS)
    base = {}
    with tempfile.TemporaryDirectory() as folder:
        precision.random_tokens(folder)
        for row in names:
            name, shape, steps, extra = ROWS[row]
            found = precision.train(lockstep, name, "bfloat16", extra + LIMIT, folder, shape, steps, first=min(4, steps - 2))
            rate = found["tokens"] / found["ms"] * 1e3
            kind = row.split(",")[0]
            if shape[1] == 2048:
                base[kind] = rate * operations(name, 2048)
            allowed = f"{rate * operations(name, shape[1]) / base[kind]:.2f} of what is allowed" if kind in base else ""
            print(f"{row:38}{rate:9.0f} tokens/s {found['ms']:9.1f} ms, peak {found['gib']:6.1f} GiB, planned {planned(lockstep, found['model']):6.1f}  "
                  f"{allowed}  {found['recompute']}", flush=True)


if __name__ == "__main__":
    main()
