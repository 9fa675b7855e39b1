# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of several runs of `lockstep train` over each other as an SVG, and prints how far apart they are.

    python3 bench/plot_layouts.py OUT.svg [--mean STEPS] LABEL=METRICS.jsonl ...

With --mean a point of a curve is the mean of so many steps.
The first run is the widest curve and the last the thinnest, so that curves that coincide are all visible.
"""
import json
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 400, 60, 310, 20, 50
COLOURS = ["#d9d9d9", "#f2c14e", "#e4572e", "#8ac6a5", "#2e86ab", "#b28dd6", "#8d5a2b", "#111111"]


def losses(path):
    lines = [json.loads(line) for line in open(path)]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def means(run, count):
    steps = sorted(run)
    return {steps[i]: sum(run[step] for step in steps[i - count + 1:i + 1]) / count for i in range(count - 1, len(steps), count)}


def main(out, *runs):
    count = 1
    if runs[0] == "--mean":
        count, runs = int(runs[1]), runs[2:]
    runs = [(label, means(losses(path), count)) for label, path in (text.rsplit("=", 1) for text in runs)]
    steps = sorted(runs[0][1])
    top = max(max(run.values()) for _, run in runs)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps[-1]

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / top)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for loss in range(int(top) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for i in range(6):
        step = steps[-1] * i // 5
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">training loss, nats per token</text>')
    legend = WIDTH - RIGHT + 20
    parts.append(f'<text x="{legend}" y="{TOP + 10}" font-weight="bold">run, loss of step {steps[-1]}{f", mean of {count}" if count > 1 else ""}</text>')
    for i, (label, run) in enumerate(runs):
        style = f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="{1.5 * (len(runs) - i) - 0.5}"'
        path = " ".join(f"{x(step):.1f},{y(run[step]):.1f}" for step in steps)
        parts.append(f'<polyline points="{path}" fill="none" stroke-linejoin="round" {style}/>')
        parts.append(f'<line x1="{legend}" x2="{legend + 24}" y1="{TOP + 32 + 24 * i}" y2="{TOP + 32 + 24 * i}" {style}/>')
        parts.append(f'<text x="{legend + 32}" y="{TOP + 36 + 24 * i}">{label}: {run[steps[-1]]:.5f}</text>')
    open(out, "w").write("\n".join(parts) + "\n</svg>\n")

    first = runs[0][1]
    for label, run in runs[1:]:
        apart = max(abs(run[step] / first[step] - 1) for step in steps)
        print(f"{label}: at most {apart:.1e} from {runs[0][0]}, relative, in {len(steps)} points")


if __name__ == "__main__":
    main(*sys.argv[1:])
