# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` with offload on one GPU, beside itself without and beside PyTorch's fully_shard with CPUOffloadPolicy.

    python3 bench/offload.py BIN_DIR MODEL [ROW...] [-- OPTIONS]     BIN_DIR holds lockstep; MODEL: one of LARGE in llama_sizes.py;
                                                                     OPTIONS of `lockstep train` for every row, such as --metrics.trace FOLDER

The same Llama in bfloat16 with AdamW (float32 moments and masters), blocks recomputed, 32k random tokens a step. Every row is a run of its own, one
after the other. A run's figure is the mean of its steps after the second. "ROW, micro-batches of 4" cuts the step into micro-batches of 4 rows.
Prints a line of JSON for each row, then a table.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from llama_sizes import LARGE

STEPS = 7
HERE = pathlib.Path(__file__).resolve().parent
HOST = ["--offload.host_limit", "118GB", "--offload.host_budget", "116GB"]
# What activations leave of the device.
LIMITS = {"3.1B": "100GB", "6.7B": "115GB", "13B": "108GB"}
UNCLIPPED = ["--optim.clip", 0, "--offload.clip_mode", "none"]
STATES = ["--offload.optimizer", "true", "--offload.strategy", "extreme", *HOST]
FILL = ["--offload.optimizer", "true", "--offload.strategy", "conservative", *HOST]
PARAMETERS = [*STATES, "--offload.params", "true", "--offload.param_budget", "4GB"]
ROWS = {
    "resident": ([], STEPS),
    "resident, unclipped": (["--optim.clip", 0], STEPS),
    "states": (STATES, STEPS),
    "states, unclipped": ([*STATES, *UNCLIPPED], STEPS),
    "states on the CPU": ([*STATES, "--offload.update_site", "cpu"], STEPS),
    "states, parameters": (PARAMETERS, STEPS),
    "states, parameters, unclipped": ([*PARAMETERS, *UNCLIPPED], STEPS),
    "all": ([*PARAMETERS, "--offload.grads", "true"], STEPS),
    "states where they fit": (FILL, 3),
    "8-bit states where they fit, unclipped": ([*FILL, "--offload.codec", "quantization", *UNCLIPPED], 3),
}


def torch_offload(name, accumulation):
    words = [sys.executable, HERE / "torch_llama.py", name, "offload", "3", str(accumulation)]
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode != 0:
        return dict(failed=run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit {run.returncode}")
    return dict(step_ms=json.loads(run.stdout.strip().splitlines()[-1])["median_ms"])


def train(bin_dir, name, flags, steps, accumulation, folder):
    size = LARGE[name]
    if "--offload.optimizer" in flags:
        flags = ["--offload.device_limit", LIMITS.get(name, "118GB"), *flags]
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = [bin_dir / "lockstep", "train", "--model.kind", "llama", "--train.dtype", "bfloat16", "--data.path", f"{folder}/random.bin",
             "--data.validation", "0", "--run.dir", "", "--metrics.file", metrics, "--optim.lr", "1e-4", "--optim.warmup", min(5, steps - 1), "--train.recompute", "full",
             "--train.steps", steps, "--train.seq_len", size["length"], "--train.micro_batch", size["rows"] // accumulation,
             "--train.global_batch", size["rows"], *flags]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        words += [f"--model.{key}", size[key]]
    begun = time.time()
    run = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if run.returncode != 0:
        return dict(failed=run.stderr.strip()[-600:])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps_ms = [line["step_ms"] for line in lines if "loss" in line]
    counted = steps_ms[2:] if len(steps_ms) > 3 else steps_ms[1:]
    notes = [line for line in (run.stdout + run.stderr).splitlines() if "offload" in line]
    return dict(step_ms=sum(counted) / len(counted), losses=[line["loss"] for line in lines if "loss" in line],
                norms=[line["grad_norm"] for line in lines if "loss" in line],
                peak_gb=lines[-1]["peak_bytes"] / 1e9, begun_s=time.time() - begun - sum(steps_ms) / 1e3, notes=notes)


def main():
    bin_dir, name = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
    rows, options = sys.argv[3:], []
    if "--" in rows:
        rows, options = rows[:rows.index("--")], rows[rows.index("--") + 1:]
    size, wanted = LARGE[name], rows or [*ROWS, "PyTorch offload"]
    tokens, found = size["rows"] * size["length"], {}
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(1)
        data = b"".join(draw.randrange(size["vocab"]).to_bytes(2, "little") for _ in range(1 << 19))
        (pathlib.Path(folder) / "random.bin").write_bytes(data)
        for row in wanted:
            base, _, cut = row.partition(", micro-batches of ")
            accumulation = size["rows"] // int(cut) if cut else 1
            if base == "PyTorch offload":
                found[row] = torch_offload(name, accumulation)
            else:
                flags, steps = ROWS[base]
                found[row] = train(bin_dir, name, [*flags, *options], steps, accumulation, folder)
            print(json.dumps(dict(model=name, row=row, **found[row])), flush=True)
    print(f"{name}, {size['rows']} x {size['length']} tokens a step")
    for row, result in found.items():
        if "failed" in result:
            print(f"{row:<40} failed")
            continue
        _, cut, rows_each = row.partition(", micro-batches of ")
        base = found.get(("resident, unclipped" if "unclipped" in row else "resident") + cut + rows_each, {}).get("step_ms")
        share = f"{100 * base / result['step_ms']:5.1f} % of resident" if base else ""
        print(f"{row:<40} {result['step_ms']:9.1f} ms {tokens / result['step_ms'] * 1e3:9.0f} tokens/s  {share}", flush=True)


if __name__ == "__main__":
    main()
