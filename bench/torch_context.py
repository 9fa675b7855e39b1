# SPDX-License-Identifier: Apache-2.0
"""What bench/context.cpp measures, by PyTorch's experimental context parallelism over Gloo. Each process is one rank (torchrun).

    torchrun --nproc-per-node N bench/torch_context.py LENGTH HEADS WIDTH ROUNDS
"""
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel


def main():
    length, heads, width, rounds = (int(word) for word in sys.argv[1:])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    least = float("inf")
    for _ in range(rounds):
        q, k, v = (torch.randn(1, heads, length, width) for _ in range(3))
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            for tensor in (q, k, v):
                tensor.requires_grad_()
            dist.barrier()
            begin = time.perf_counter()
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            dist.barrier()
            least = min(least, time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(f"{'PyTorch ' + torch.__version__:26} {1e3 * least:8.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
