# SPDX-License-Identifier: Apache-2.0
"""The peer for `lockstep bench collectives --backends gloo`: torch.distributed's all_reduce from Python.

build/bin/lockstep run -n 2 python3 bench/torch_gloo.py 4096 4194304 67108864
"""
import statistics
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)
for size in map(int, sys.argv[1:]):
    data = torch.zeros(size // 4)
    samples = []
    for i in range(3 + (500 if size < 100_000 else 20)):
        start = time.perf_counter()
        dist.all_reduce(data)
        samples.append((time.perf_counter() - start) * 1e6)
    if dist.get_rank() == 0:
        print(f"torch gloo all_reduce {size:>10} bytes {dist.get_world_size()} ranks p50 {statistics.median(samples[3:]):.2f} us")
