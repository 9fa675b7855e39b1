# SPDX-License-Identifier: Apache-2.0
"""What a model computes between its products, in kernels of Lockstep and in PyTorch's, eager and compiled, forward and backward, on one GPU.

    python3 bench/kernels.py BIN_DIR [SIZE...]      sizes of bench/llama_sizes.py; 162M and 1.2B if not given

BIN_DIR holds bench_kernels; python3 has torch 2.x. The last column is the time that the memory needs for the bytes that must be moved, as a
part of Lockstep's time; a copy of a tensor of the model says how fast the memory is. AdamW is PyTorch's fused one with float32 parameters (28 bytes each), and
Lockstep's with bfloat16 parameters and float32 masters (30 bytes). PyTorch's cross entropy computes with logits that were cast to float32.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from llama_sizes import LARGE, SIZES

BATCHES, REPEATS = 7, 20


def milliseconds(work):
    found = []
    for _ in range(BATCHES + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start) / REPEATS)
    return statistics.median(found[1:])


def peers(size):
    """Of each kernel, functions that run it eagerly and compiled."""
    torch._dynamo.reset()  # else the second size is compiled for any size
    rows, length, hidden, heads, ffn, vocab = (size[key] for key in ("rows", "length", "hidden", "heads", "ffn", "vocab"))
    made = dict(device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(hidden, **made)
    angles = torch.outer(torch.arange(length, device="cuda"), 1 / torch.arange(1, hidden // heads // 2 + 1, device="cuda"))
    cosine, sine = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    targets = torch.randint(vocab, (rows * length,), device="cuda")

    def norm(x):
        return F.rms_norm(x, (hidden,), weight, 1e-5), x.view_as(x)

    def swiglu(x):
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) * up,)

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    def split(x):
        q, k, v = x.view(rows, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
        return turned(q), turned(k), v.contiguous()

    def cross_entropy(x):
        return (F.cross_entropy(x.float(), targets),)

    def embedding(table):
        return (F.embedding(targets, table),)

    def both_ways(function, shape):
        x = torch.randn(shape, requires_grad=True, **made)
        gradients = [torch.randn_like(out) for out in function(x)]
        return lambda: torch.autograd.grad(function(x), [x], gradients)

    shapes = {"norm": (norm, (rows, length, hidden)), "swiglu": (swiglu, (rows, length, 2 * ffn)), "heads": (split, (rows, length, 3 * hidden)), "embedding": (embedding, (vocab, hidden)),
              "cross entropy": (cross_entropy, (rows * length, vocab))}
    for name, (function, shape) in shapes.items():
        yield name, both_ways(function, shape), both_ways(torch.compile(function), shape)
    parameters = []
    for shape in 8 * [(3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]:
        parameters.append(torch.randn(shape, device="cuda", requires_grad=True))
        parameters[-1].grad = torch.randn(shape, device="cuda")
    fused = torch.optim.AdamW(parameters, fused=True)
    yield "adamw", fused.step, None


def main():
    program = pathlib.Path(sys.argv[1]).resolve() / "bench_kernels"
    for name in sys.argv[2:] or ["162M", "1.2B"]:
        size = (SIZES | LARGE)[name]
        words = [program, *(size[key] for key in ("rows", "length", "hidden", "heads", "ffn", "vocab"))]
        lines = subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout.splitlines()
        ours = {line["kernel"]: line for line in map(json.loads, lines)}
        speed = ours["copy"]["bytes"] / ours["copy"]["ms"]
        print(f"{name}: memory {speed / 1e9:.2f} TB/s")
        print(f"{'kernel':16}{'Lockstep ms':>12}{'eager ms':>10}{'compiled':>10}{'ratio':>8}{'of memory':>11}")
        for kernel, eager, compiled in peers(size):
            mine = ours[kernel]["ms"]
            times = [milliseconds(work) if work else float("nan") for work in (eager, compiled)]
            best = min(value for value in times if value == value)
            print(f"{kernel:16}{mine:12.3f}{times[0]:10.3f}{times[1]:10.3f}{best / mine:7.2f}x{100 * ours[kernel]['bytes'] / speed / mine:10.0f}%", flush=True)


if __name__ == "__main__":
    main()
