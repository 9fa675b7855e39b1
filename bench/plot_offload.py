# SPDX-License-Identifier: Apache-2.0
"""Draws what offload.py printed as an SVG: tokens a second of each row, model by model.

    python3 bench/plot_offload.py RESULTS... docs/images/offload.svg

RESULTS: files with offload.py's lines of JSON; other lines are passed over, of a row that occurs twice the last counts, rows that failed
have no bar. The bars of a model have a scale of their own.
"""
import json
import sys

from llama_sizes import LARGE

WIDTH, LEFT, RIGHT, TOP, BAR, GAP, TITLE = 940, 260, 210, 16, 18, 6, 34
PEER = "PyTorch offload"
OURS, PYTORCH, RESIDENT = "#1f5f99", "#b04a3a", "#9aa5b1"


def results(paths):
    """Tokens a second by model and row, in the order of the files; None: it failed."""
    found = {}
    for path in paths:
        for line in open(path):
            if not line.startswith("{"):
                continue
            each = json.loads(line)
            size = LARGE[each["model"]]
            rate = size["rows"] * size["length"] * 1e3 / each["step_ms"] if "step_ms" in each else None
            found.setdefault(each["model"], {})[each["row"]] = rate
    return found


def colour(row):
    return PYTORCH if row.startswith(PEER) else RESIDENT if row.startswith("resident") else OURS


def main(*arguments):
    *paths, out = arguments
    parts, y = [], TOP
    for model, rows in results(paths).items():
        most = max((rate for rate in rows.values() if rate), default=1)
        tokens = LARGE[model]["rows"] * LARGE[model]["length"]
        parts.append(f'<text x="{LEFT}" y="{y + 18}" font-size="14" font-weight="bold">{model}, {tokens} tokens a step</text>')
        y += TITLE
        for row, rate in rows.items():
            middle = y + BAR / 2 + 4
            parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{row}</text>')
            length = (WIDTH - LEFT - RIGHT) * (rate or 0) / most
            _, cut, rows_each = row.partition(", micro-batches of ")
            peer = rows.get(PEER + cut + rows_each)
            ratio = f" ({rate / peer:.2f} x PyTorch)" if rate and peer and not row.startswith(PEER) else ""
            label = f"{rate:.0f} tokens/s{ratio}" if rate else "failed"
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour(row)}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{label}</text>')
            y += BAR + GAP
        y += TOP
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{y}" fill="white"/>']
    open(out, "w").write("\n".join(head + parts) + "\n</svg>\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
