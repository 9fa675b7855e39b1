# SPDX-License-Identifier: Apache-2.0
"""Step times that `lockstep plan time` predicts with the machine's own constants, beside those of `lockstep train`.

    python3 bench/own_runs.py BIN_DIR cpu RANKS [ROUNDS]     the layouts of bench/layouts.py, one thread per rank
    python3 bench/own_runs.py BIN_DIR gpu [CASE...]          six runs on one GPU: 162M to 6.7B, recomputation, offload

Before each of ROUNDS `lockstep bench machine` measures the machine, whose speed may change; --machine FILE, anywhere, takes an older file instead. Then every run is
trained for a few steps. Medians of all steps and of all predictions count. Prints a table, then one line of JSON: the mean error, the measured rank of the layout that was predicted to be
the fastest, and how many pairs that differ by more than 10 % were predicted in the right order.
"""
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

import layouts
import llama_sizes
import offload

SIZES = llama_sizes.SIZES | llama_sizes.LARGE
GPU = {
    "162M": ("162M", []),
    "162M, recomputed": ("162M", ["--train.recompute", "full"]),
    "1.2B": ("1.2B", []),
    "3.1B, recomputed": ("3.1B", ["--train.recompute", "full"]),
    "3.1B, recomputed, states offloaded": ("3.1B", ["--train.recompute", "full", *offload.STATES, "--offload.device_limit", "100GB"]),
    "6.7B, recomputed": ("6.7B", ["--train.recompute", "full"]),
}


def run(words):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def gpu_options(name, extra):
    size = SIZES[name]
    options = ["--model.kind", "llama", "--train.dtype", "bfloat16", "--train.device", "cuda", "--optim.warmup", 3, "--optim.lr", "1e-4",
               "--train.seq_len", size["length"], "--train.micro_batch", size["rows"], *extra]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        options += [f"--model.{key}", size[key]]
    return options


def medians(plans):
    return {"step_ms": statistics.median(plan["step_ms"] for plan in plans),
            "split": {part: statistics.median(plan["split"][part] for plan in plans) for part in plans[0]["split"]}}


def steps_of(lockstep, ranks, options, steps, folder):
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    run([lockstep, "train", "-n", ranks, *options, "--data.path", f"{folder}/tokens.bin", "--data.validation", 0, "--train.steps", steps, "--run.dir", "",
         "--metrics.file", metrics])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    return [line for line in lines if "loss" in line][2:]


def main():
    words = sys.argv[1:]
    machine = None
    if "--machine" in words:
        at = words.index("--machine")
        machine = words[at + 1]
        del words[at:at + 2]
    lockstep, kind = pathlib.Path(words[0]).resolve() / "lockstep", words[1]
    if kind == "gpu":
        ranks, rounds, steps, vocab = 1, 1, 9, 32000
        cases = {name: gpu_options(*case) for name, case in GPU.items() if name in words[2:] or not words[2:]}
    else:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        ranks, rounds, steps, vocab = int(words[2]), int((words + [2])[3]), layouts.STEPS, 4096
        batch = ["--train.global_batch", 2 * ranks]
        model = layouts.MODEL + batch + ["--train.threads", 0]  # as many as the machine was measured with
        cases = {name: model + layout for name, layout in layouts.layouts(ranks).items()}
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(1)
        pathlib.Path(folder, "tokens.bin").write_bytes(b"".join(draw.randrange(vocab).to_bytes(2, "little") for _ in range(1 << 18)))
        measured, predictions = {name: [] for name in cases}, {name: [] for name in cases}
        for _ in range(rounds):
            constants = machine or f"{folder}/machine.toml"
            if machine is None:
                print(run([lockstep, "bench", "machine", "-n", ranks, "--no-strategies", "--output", constants]), flush=True)
            for name, options in cases.items():
                predictions[name].append(json.loads(run([lockstep, "plan", "time", "-n", ranks, "--cluster", constants, "--json", *options])))
                measured[name] += steps_of(lockstep, ranks, options, steps, folder)
        predicted = {name: medians(each) for name, each in predictions.items()}
    print(f"{'run':36}{'measured':>10}{'predicted':>10}{'error':>8}   split in ms, measured and predicted")
    times, errors = {}, []
    for name in cases:
        times[name] = statistics.median(line["step_ms"] for line in measured[name]), predicted[name]["step_ms"]
        error = times[name][1] / times[name][0] - 1
        errors.append(abs(error))
        parts = []
        for part, value in predicted[name]["split"].items():
            found = [line["split"][part] for line in measured[name] if "split" in line]
            seen = statistics.median(found) if found else 0.0
            if seen > 0.005 * times[name][0] or value > 0.005 * times[name][0]:
                parts.append(f"{part[:-3]} {seen:.1f} {value:.1f}")
        print(f"{name:36}{times[name][0]:10.1f}{times[name][1]:10.1f}{100 * error:+7.1f}%   {', '.join(parts)}")
    best = sorted(times, key=lambda name: times[name][0])
    first = sorted(times, key=lambda name: times[name][1])
    pairs = [(a, b) for a, b in itertools.permutations(times, 2) if times[b][0] > 1.1 * times[a][0]]
    right = sum(times[b][1] > times[a][1] for a, b in pairs)
    print(json.dumps({"mean_error_percent": 100 * statistics.mean(errors), "best_is_predicted_place": first.index(best[0]) + 1, "pairs": len(pairs), "pairs_right": right}))


if __name__ == "__main__":
    main()
