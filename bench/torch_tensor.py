# SPDX-License-Identifier: Apache-2.0
"""The peer of bench_tensor: the same blocks with PyTorch's own tensor parallelism over Gloo.

OMP_NUM_THREADS=1 python3 -m torch.distributed.run --nproc_per_node 4 bench/torch_tensor.py

One JSON line: medians in milliseconds of forward and backward on a rank alone (the others wait) and of all ranks, and the speed-up. torch.distributed.tensor
came with torch 2.
"""
import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_ddp import RmsNorm, causal_attention


def rotary_table(positions, head):
    angles = torch.outer(torch.arange(positions, dtype=torch.double), torch.full((head // 2,), 0.1, dtype=torch.double))
    return angles.cos().float(), angles.sin().float()


def rotate(x, table):
    cosine, sine = table
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


class Block(nn.Module):
    """As torch_ddp's, with the heads that its projection has here and with rotary positions."""

    def __init__(self, width, heads, ffn, table):
        super().__init__()
        self.head, self.table = width // heads, table
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (f(normed).view(batch, length, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, self.table), rotate(k, self.table)
        y = x + self.out(causal_attention(q, k, v).transpose(1, 2).flatten(2))
        z = self.norm2(y)
        return y + self.down(F.silu(self.gate(z)) * self.up(z))


def share(blocks, mesh):
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")} | {name: RowwiseParallel() for name in ("out", "down")}
    for block in blocks:
        parallelize_module(block, mesh, plan)
    return blocks


def time_of(blocks, tensor):
    start = time.perf_counter()
    output = blocks(tensor.detach().requires_grad_())
    output.backward(torch.ones_like(output))
    blocks.zero_grad(set_to_none=True)
    return 1e3 * (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=2752)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    table = rotary_table(options.seq, options.width // options.heads)
    make = lambda: nn.Sequential(*[Block(options.width, options.heads, options.ffn, table) for _ in range(options.layers)])
    whole, shared = make(), share(make(), init_device_mesh("cpu", (dist.get_world_size(),)))
    tensor = torch.randn(options.batch, options.seq, options.width)

    def slowest(mine):
        value = torch.tensor([mine])
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    alone, together = [], []
    for step in range(-2, options.steps):
        dist.barrier()
        one = slowest(time_of(whole, tensor) if rank == 0 else 0.0)
        dist.barrier()
        everyone = slowest(time_of(shared, tensor))
        if step >= 0:
            alone.append(one)
            together.append(everyone)
    if rank == 0:
        print(json.dumps({"ranks": dist.get_world_size(), "alone_ms": statistics.median(alone), "tensor_ms": statistics.median(together),
                          "tensor_speedup": statistics.median(a / b for a, b in zip(alone, together))}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
