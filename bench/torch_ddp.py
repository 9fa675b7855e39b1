# SPDX-License-Identifier: Apache-2.0
"""The peer of bench_ddp: the same model, data and steps with PyTorch's own DistributedDataParallel over Gloo.

OMP_NUM_THREADS=1 python3 -m torch.distributed.run --nproc_per_node 2 bench/torch_ddp.py --layers 4 --width 512 --batch 1 --seq 16
"""
import argparse
import json
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PRIME = 65521


def noise(count, seed):
    """Whole numbers in [0, PRIME), the same as in llama.cpp."""
    index = torch.arange(count)
    x = (index * 40503 + seed * 977 + 1) % PRIME
    return ((x * x + (index >> 8) * 31) % PRIME).square() % PRIME


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, (x.size(-1),), self.weight, 1e-5)
        return x * torch.rsqrt(x.square().mean(-1, True) + 1e-5) * self.weight


def causal_attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(1)
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(scores.masked_fill(hidden, -math.inf).softmax(-1), v)


class Block(nn.Module):
    def __init__(self, width, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1 = RmsNorm(width)
        self.norm2 = RmsNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        attention = causal_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        y = x + self.out(attention.transpose(1, 2).reshape(x.shape))
        z = self.norm2(y)
        return y + self.down(F.silu(self.gate(z)) * self.up(z))


class Llama(nn.Module):
    def __init__(self, layers, width, heads, ffn, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads, ffn) for _ in range(layers)])
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters(), 1):
                if parameter.dim() > 1:
                    values = (noise(parameter.numel(), seed).float() - 32760) * 1e-6
                    parameter.copy_(values.view(parameter.shape))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fastest_adamw(shape):
    """The option of AdamW that is fastest for parameters of this shape: "fused", "foreach" or "" for none."""
    seconds = {}
    for kind in ("fused", "foreach", ""):
        parameters = [nn.Parameter(torch.ones(shape)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones(shape)
        try:
            optimizer = torch.optim.AdamW(parameters, **({kind: True} if kind else {"foreach": False}))
            optimizer.step()
        except (RuntimeError, TypeError):  # unknown to this version, or not for the CPU
            continue
        start = time.perf_counter()
        for _ in range(3):
            optimizer.step()
        seconds[kind] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


class Training:
    """A model in training. Its samples are the milliseconds of each step and of its parts."""

    def __init__(self, model, data, adamw):
        self.model, self.data = model, data
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **({adamw: True} if adamw else {"foreach": False}))
        self.samples = []

    def step(self):
        start = time.perf_counter()
        loss = self.model(*self.data)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        self.samples.append([end - start, forward - start, backward - forward, end - backward])
        return loss.item()

    def slowest(self):
        """(steps, parts), of the slowest rank."""
        samples = torch.tensor(self.samples, dtype=torch.float64) * 1e3
        dist.all_reduce(samples, dist.ReduceOp.MAX)
        return samples


def medians(samples):
    return dict(zip(("step_ms", "forward_ms", "backward_ms", "optimizer_ms"), samples.quantile(0.5, 0).tolist()))


def main():
    parser = argparse.ArgumentParser(description="Times training steps alone and with PyTorch's DDP")
    sizes = dict(layers=8, width=768, heads=12, ffn=2048, vocab=8192, batch=4, seq=256, steps=12, bucket_mb=25)
    for name, value in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = (options.layers, options.width, options.heads, options.ffn, options.vocab)
    rows = (noise(options.batch * (options.seq + 1), 1_000_000 + rank) % options.vocab).view(options.batch, -1)
    data = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    replica = nn.parallel.DistributedDataParallel(Llama(*shape), gradient_as_bucket_view=True, bucket_cap_mb=options.bucket_mb)
    choice = [fastest_adamw((options.ffn, options.width))]
    dist.broadcast_object_list(choice)
    adamw = choice[0]
    alone, distributed = Training(Llama(*shape), data, adamw), Training(replica, data, adamw)

    losses = [distributed.step() for _ in range(5)]
    for _ in range(2):
        alone.step()
    alone.samples.clear()
    distributed.samples.clear()
    for _ in range(options.steps):
        dist.barrier()
        alone.step()
        dist.barrier()
        distributed.step()

    alone_ms, ddp_ms = alone.slowest(), distributed.slowest()
    line = dict(program="torch", torch=torch.__version__, optimizer=f"torch AdamW {adamw}".strip(), ranks=ranks,
                threads=torch.get_num_threads(), parameters=sum(p.numel() for p in alone.model.parameters()),
                tokens=options.batch * options.seq, alone=medians(alone_ms),
                ddp=medians(ddp_ms), cost_ms=medians(ddp_ms - alone_ms)["step_ms"], losses=losses)
    if rank == 0:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
