# SPDX-License-Identifier: Apache-2.0
"""Draws the losses in a metrics file of `lockstep train` as an SVG.

    python3 bench/plot_curve.py METRICS.jsonl OUT.svg [LABEL=LEVEL ...]

The thin line is each step's loss, the thick one its running mean, dots are validation losses; LABEL=LEVEL adds a dashed line, such as
"bigram=2.71".
"""
import json
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 60, 150, 20, 50


def main(metrics, out, *levels):
    lines = [json.loads(line) for line in open(metrics)]
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    levels = [(label, float(level)) for label, level in (text.split("=") for text in levels)]
    top = max([loss for _, loss in steps] + [level for _, level in levels])
    last = steps[-1][0]

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / top)

    def line(points, style):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        return f'<polyline points="{path}" fill="none" {style}/>'

    mean, smooth = None, []
    for step, loss in steps:
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        smooth.append((step, mean))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for loss in range(int(top) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for i in range(6):
        step = last * i // 5
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>')
    parts.append(f'<text x="16" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
                 f'transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2})">loss, nats per byte</text>')
    parts.append(line(steps, 'stroke="#9ec5e8" stroke-width="0.7"'))
    parts.append(line(smooth, 'stroke="#1f5f99" stroke-width="2"'))
    for label, level in levels:
        parts.append(line([(0, level), (last, level)], 'stroke="#b04a3a" stroke-dasharray="5 4"'))
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(level) + 4:.1f}" fill="#b04a3a">{label} {level:.2f}</text>')
    for step, loss in validation:
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="#2f8f4e"/>')
        parts.append(f'<text x="{x(step) + 8:.1f}" y="{y(loss) - 6:.1f}" fill="#2f8f4e">{loss:.2f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(smooth[-1][1]) + 22:.1f}" fill="#1f5f99">training</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(smooth[-1][1]) + 38:.1f}" fill="#2f8f4e">validation</text>')
    open(out, "w").write("\n".join(parts) + "\n</svg>\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
