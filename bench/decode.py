# SPDX-License-Identifier: Apache-2.0
"""Greedy text from a Llama with random weights on one GPU, bfloat16, beside transformers in the same run.

    python3 bench/decode.py BIN_DIR [ROW...]      BIN_DIR holds bench_decode; python3 has torch 2.x and transformers

A row is MODEL:TEXTS:PROMPT, with ":host" for weights that are streamed from the host. Prints a line of JSON for each program.
"""
import json
import pathlib
import subprocess
import sys

from llama_sizes import LARGE, SIZES

HERE = pathlib.Path(__file__).resolve().parent
ROWS = ["1.2B:1:128", "6.7B:1:128", "6.7B:1:2048", "30B:1:128", "6.7B:64:16:host"]
HOST = ["--offload.params", "true", "--offload.strategy", "extreme", "--offload.device_limit", "8GB", "--offload.param_budget", "4GB",
        "--offload.host_limit", "60GB", "--offload.host_budget", "50GB"]
LINK = """
import time, torch
host, device = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
best = 0
for _ in range(5):
    torch.cuda.synchronize(); begun = time.perf_counter()
    device.copy_(host, non_blocking=True); torch.cuda.synchronize()
    best = max(best, host.numel() / (time.perf_counter() - begun) / 1e9)
print(best)
"""


def run(words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        return dict(failed=(done.stderr or done.stdout).strip()[-300:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    for row in sys.argv[2:] or ROWS:
        name, texts, prompt, *where = row.split(":")
        size = {**SIZES, **LARGE}[name]
        tokens = 24 if where else 256
        words = [pathlib.Path(sys.argv[1]) / "bench_decode", texts, prompt, tokens, "--model.kind", "llama", "--train.dtype", "bfloat16",
                 "--train.device", "cuda", "--train.seq_len", 4096]
        for key in ("layers", "hidden", "heads", "ffn", "vocab"):
            words += [f"--model.{key}", size[key]]
        print(json.dumps(dict(row=row, program="lockstep", **run(words + (HOST if where else [])))), flush=True)
        if where:
            print(json.dumps(dict(row=row, program="copy from pinned memory", gb_per_s=run([sys.executable, "-c", LINK]))), flush=True)
        if where or name == "30B":
            continue
        for how in ([], ["static"]) if name == "1.2B" else ([],):  # compiling takes minutes
            print(json.dumps(dict(row=row, **run([sys.executable, HERE / "torch_decode.py", name, texts, prompt, tokens, *how]))), flush=True)


if __name__ == "__main__":
    main()
