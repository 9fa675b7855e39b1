# SPDX-License-Identifier: Apache-2.0
"""The peer for bench_adamw: torch.optim.AdamW from Python, in every form this version of torch has.

OMP_NUM_THREADS=2 python3 bench/torch_adamw.py [MILLIONS OF ELEMENTS]
"""
import inspect
import json
import statistics
import sys
import time

import torch


def transformer():
    channels = 640
    shapes = [(16384, channels)]
    for _ in range(12):
        shapes += [(rows * channels, channels) for rows in (3, 1, 4)] + [(channels, 4 * channels)]
        shapes += [(size * channels,) for size in (3, 1, 4, 1, 1, 1, 1, 1)]
    return shapes


def measure(what, shapes, form):
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    optimizer = torch.optim.AdamW(parameters, **form)
    optimizer.step()
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        optimizer.step()
        samples.append(time.perf_counter() - start)
    elements = sum(parameter.numel() for parameter in parameters)
    best, median = min(samples), statistics.median(samples)
    print(json.dumps({
        "what": what, "torch": torch.__version__, "form": next((name for name in form if form[name]), "plain"), "tensors": len(shapes), "elements": elements,
        "threads": torch.get_num_threads(), "best_ms": round(best * 1e3, 2), "median_ms": round(median * 1e3, 2),
        "ns_per_element": round(best / elements * 1e9, 3), "GB_per_s": round(28 * elements / best * 1e-9, 1)}), flush=True)


elements = int(sys.argv[1] if len(sys.argv) > 1 else 64) << 20
known = inspect.signature(torch.optim.AdamW).parameters
for what, shapes in (("one float32 tensor", [(elements,)]), ("transformer, float32", transformer())):
    for name in ("foreach", "fused"):
        if name in known:
            measure(what, shapes, {name: True})
    measure(what, shapes, {"foreach": False} if "foreach" in known else {})
