# SPDX-License-Identifier: Apache-2.0
"""The peer of bench_pipeline: the same sizes and steps with PyTorch's own pipelines over Gloo.

OMP_NUM_THREADS=1 python3 -m torch.distributed.run --nproc_per_node 4 bench/torch_pipeline.py --schedule 1f1b zb-h1 zb-v:2

One JSON line for each schedule. A step is forward and backward of all micro-batches; the slowest rank's time counts. torch.distributed.pipelining came
with torch 2.
"""
import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import pipelining

from torch_ddp import Block, RmsNorm, noise

SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe, "interleaved": pipelining.ScheduleInterleaved1F1B,
             "zb-h1": pipelining.ScheduleInterleavedZeroBubble, "zb-v": pipelining.ScheduleZBVZeroBubble}


def stage_module(stage, stages, options):
    """Equal shares of the blocks; the embedding with the first, norm and head with the last."""
    layers = [Block(options.width, options.heads, options.ffn) for _ in range(options.layers // stages)]
    if stage == 0:
        layers.insert(0, nn.Embedding(options.vocab, options.width))
    if stage == stages - 1:
        layers += [RmsNorm(options.width), nn.Linear(options.width, options.vocab, bias=False)]
    return nn.Sequential(*layers)


def connect():
    """A message for every pair: Gloo's pipelines fail where a pair has not met before."""
    rank, word = dist.get_rank(), torch.zeros(1)
    for low in range(dist.get_world_size()):
        for high in range(low + 1, dist.get_world_size()):
            if rank == low:
                dist.send(word, high)
                dist.recv(word, high)
            elif rank == high:
                dist.recv(word, low)
                dist.send(word, low)


class Training:
    def __init__(self, name, options):
        kind, _, chunks = name.partition(":")
        self.name, self.chunks, self.samples = kind, int(chunks or 1), []
        rank, ranks = dist.get_rank(), dist.get_world_size()
        stages = ranks * self.chunks
        mine = [rank, stages - 1 - rank] if kind == "zb-v" else [rank + chunk * ranks for chunk in range(self.chunks)]
        self.parts = [pipelining.PipelineStage(stage_module(stage, stages, options), stage, stages, torch.device("cpu")) for stage in mine]
        self.first, self.last = 0 in mine, stages - 1 in mine
        many = kind not in ("1f1b", "gpipe")
        self.schedule = SCHEDULES[kind](self.parts if many else self.parts[0], options.microbatches,
                                        loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))
        rows = options.batch * options.microbatches
        tokens = (noise(rows * (options.seq + 1), 1_000_000) % options.vocab).view(rows, -1)
        self.data = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer = torch.optim.AdamW([p for part in self.parts for p in part.submod.parameters()], 1e-3, foreach=True)

    def step(self):
        dist.barrier()
        start = time.perf_counter()
        arguments = (self.data[0],) if self.first else ()
        self.schedule.step(*arguments, **(dict(target=self.data[1]) if self.last else {}))
        self.samples.append(time.perf_counter() - start)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main():
    parser = argparse.ArgumentParser(description="Times pipeline steps of PyTorch")
    parser.add_argument("--schedule", nargs="+", default=["1f1b", "zb-h1"])
    sizes = dict(layers=8, width=512, heads=8, ffn=1408, vocab=512, batch=2, seq=256, microbatches=8, warmup=2, steps=10)
    for name, value in sizes.items():
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    connect()
    trainings = [Training(name, options) for name in options.schedule]
    for i in range(options.warmup + options.steps):
        for training in trainings:
            if i == options.warmup:
                training.samples.clear()
            training.step()
    for training in trainings:
        seconds = torch.tensor(training.samples)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(json.dumps(dict(program="torch", torch=torch.__version__, schedule=training.name, chunks=training.chunks,
                                  ranks=dist.get_world_size(), microbatches=options.microbatches, median_s=seconds.quantile(0.5).item(),
                                  best_s=seconds.min().item())), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
