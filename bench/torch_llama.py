# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of trainer.py and offload.py: a Llama-style model on one GPU, bf16, AdamW (fused), random tokens.

    torch_llama.py MODEL MODE STEPS [ACCUMULATION]      MODEL: one of llama_sizes.py; its batch is cut into ACCUMULATION micro-batches

MODE: plain (float32 weights under autocast), eager (fully_shard over one rank: bf16 weights, float32 masters), compile (the same with
compiled blocks), offload (fully_shard with CPUOffloadPolicy: all but the computation is on the host). No positions, no clipping: less work than Lockstep's model and trainer do. Prints one JSON line with the best step.
"""
import json
import os
import sys
import time

for key, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1").items():
    os.environ.setdefault(key, value)
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from llama_sizes import LARGE, SIZES


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        width = size["hidden"]
        self.heads = size["heads"]
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, size["ffn"], bias=False), nn.Linear(width, size["ffn"], bias=False)
        self.down = nn.Linear(size["ffn"], width, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, size, recompute):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(size["vocab"], size["hidden"])
        self.blocks = nn.ModuleList([Block(size) for _ in range(size["layers"])])
        self.norm = RmsNorm(size["hidden"])
        self.head = nn.Linear(size["hidden"], size["vocab"], bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def main(name, mode, steps, accumulation=1):
    size = {**SIZES, **LARGE}[name]
    plain, offload = mode == "plain", mode == "offload"
    torch.manual_seed(0)
    with torch.device("cuda" if plain else "meta"):
        model = Model(size, name in LARGE)
    if not plain:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        options = dict(mp_policy=policy, **({"offload_policy": CPUOffloadPolicy()} if offload else {}))
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        model.to_empty(device="cpu" if offload else "cuda")
    for parameter in model.parameters():
        getattr(parameter, "_local_tensor", parameter.data).normal_(0, 0.02)
    if mode == "compile":
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    accumulation = int(accumulation)
    shape = (size["rows"] // accumulation, size["length"])
    tokens, targets = (torch.randint(size["vocab"], shape, device="cuda") for _ in range(2))
    seconds = []
    for _ in range(int(steps)):
        torch.cuda.synchronize()
        start = time.time()
        for _ in range(accumulation):
            with torch.autocast("cuda", torch.bfloat16, enabled=plain):
                loss = model(tokens, targets) / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    print(json.dumps(dict(best_ms=1e3 * min(seconds[1:]), median_ms=1e3 * sorted(seconds[1:])[len(seconds[1:]) // 2])))


if __name__ == "__main__":
    dist.init_process_group("nccl")
    main(*sys.argv[1:5])
    dist.destroy_process_group()
