# SPDX-License-Identifier: Apache-2.0
"""The peer of bench_shard_step: the same model, data and steps with PyTorch's DistributedDataParallel or fully_shard, over Gloo.

OMP_NUM_THREADS=1 python3 -m torch.distributed.run --nproc_per_node 2 bench/torch_shard.py --mode full --batch 1 --seq 16

Each block is a unit of its own; the embedding, the last norm and the head are the model's. fully_shard came with torch 2.
"""
import argparse
import json
import resource
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from torch_ddp import Llama, Training, fastest_adamw, noise


def status_of(name):
    """A line of the system's report, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def own_memory():
    """Bytes of anonymous memory in RAM: as in own_memory.h, but there is no symmetric memory."""
    return status_of("RssAnon:")


def resident_peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_peak(work):
    """The most that own_memory() gave while the work was done, looked at every millisecond."""
    samples, done = [own_memory()], threading.Event()

    def sample():
        while not done.wait(0.001):
            samples.append(own_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(samples)


def wrapped(model, mode):
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser(description="Times training steps with PyTorch's DDP or fully_shard")
    parser.add_argument("--mode", choices=("ddp", "full"), default="full")
    sizes = dict(layers=8, width=768, heads=12, ffn=2048, vocab=8192, batch=4, seq=256, steps=7)
    for name, value in sizes.items():
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = (noise(options.batch * (options.seq + 1), 1_000_000 + rank) % options.vocab).view(options.batch, -1)
    data = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    choice = [fastest_adamw((options.ffn, options.width))]
    dist.broadcast_object_list(choice)
    own_before, resident_before = own_memory(), status_of("VmRSS:")
    model = Llama(options.layers, options.width, options.heads, options.ffn, options.vocab)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    training = Training(wrapped(model, options.mode), data, choice[0])

    losses = [training.step() for _ in range(5)]
    training.samples.clear()
    for _ in range(options.steps):
        dist.barrier()
        training.step()
    seconds = training.slowest() / 1e3
    median = seconds.quantile(0.5, 0).tolist()
    peak = own_peak(training.step)
    memory = torch.tensor([own_memory() - own_before, peak - own_before, resident_peak() - resident_before])
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    line = dict(program="torch", mode=options.mode, torch=torch.__version__, optimizer=f"torch AdamW {choice[0]}".strip(),
                ranks=ranks, threads=torch.get_num_threads(), parameters=parameters, tokens=options.batch * options.seq,
                median_s=median[0], best_s=seconds[:, 0].min().item(), forward_s=median[1], backward_s=median[2],
                optimizer_s=median[3], memory=dict(zip(("own", "own_peak", "resident_peak"), memory.tolist())), losses=losses)
    if rank == 0:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
