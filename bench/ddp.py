#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lockstep's DDP beside PyTorch's: the time of a training step and what distribution adds to it, where computing dominates
and where communication does. The programs take turns, so that a disturbance meets all of them; medians over the rounds.

python3 bench/ddp.py               sizes for this machine, 2 ranks
python3 bench/ddp.py --model 69M   8 layers of width 768
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

MODELS = {
    "5M": dict(layers=4, width=256, heads=4, ffn=704, vocab=4096),
    "21M": dict(layers=4, width=512, heads=8, ffn=1408, vocab=8192),
    "69M": dict(layers=8, width=768, heads=12, ffn=2048, vocab=8192),
}
# glibc gives freed memory back to the kernel and takes it again in every step. That costs a model that trains alone, which
# frees all gradients at once, more than it costs DDP, and would hide what distribution costs.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
PEER = "PyTorch"


def main():
    cores = len(os.sched_getaffinity(0))
    large = cores >= 8
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20 if large else 12, help="timed steps of each kind in a round")
    parser.add_argument("--model", choices=MODELS, help="default: 69M; on less than 8 cores 5M (compute) and 21M (communication)")
    parser.add_argument("--bound", nargs="+", choices=("compute", "communication"), default=["compute", "communication"])
    parser.add_argument("--bucket-mb", type=int, default=25)
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep", help="keep: freed memory stays in the process")
    parser.add_argument("--torch-launcher", choices=("torchrun", "lockstep"), default="torchrun",
                        help="who starts PyTorch's ranks; lockstep gives each its own cores")
    parser.add_argument("--python", help="one with torch; default: the first of python3, /usr/bin/python3 that has it")
    parser.add_argument("--build", default="build")
    parser.add_argument("--json", help="append the result of every run to this file")
    options = parser.parse_args()

    python = options.python or find_python()
    lockstep = [f"{options.build}/bin/lockstep", "run", "-n", str(options.ranks)]
    # Debian's torch 1.13 cannot read its own defaults of the last two.
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks),
                "--redirects", "1", "--tee", "1"]
    # torchrun gives a rank one thread unless told; Lockstep's launcher shares out the cores by itself.
    threads = {"OMP_NUM_THREADS": str(max(1, cores // options.ranks))}
    by_torchrun = options.torch_launcher == "torchrun"
    programs = {
        PEER: ((torchrun if by_torchrun else lockstep + [python]) + ["bench/torch_ddp.py"], threads if by_torchrun else {}),
        "Lockstep": (lockstep + [f"{options.build}/bin/bench_ddp"], {}),
        "Lockstep, torch's AdamW": (lockstep + [f"{options.build}/bin/bench_ddp", "--optimizer", "torch"], {}),
    }
    memory = KEEP_MEMORY if options.malloc == "keep" else {}
    for bound in options.bound:
        model = options.model or ("69M" if large else {"compute": "5M", "communication": "21M"}[bound])
        data = {"compute": dict(batch=4, seq=256), "communication": dict(batch=1, seq=16)}[bound]
        sizes = {**MODELS[model], **data, "steps": options.steps, "bucket-mb": options.bucket_mb}
        arguments = [text for name, value in sizes.items() for text in ("--" + name, str(value))]
        results = {name: [] for name in programs}
        for _ in range(options.rounds):
            for name, (command, variables) in programs.items():
                results[name].append(run(command + arguments, {**os.environ, **memory, **variables}))
                if options.json:
                    with open(options.json, "a") as file:
                        print(json.dumps({"bound": bound, "name": name, **results[name][-1]}), file=file)
        print(f"\n{bound}-bound: {model}, {data['batch'] * data['seq']} tokens per rank, {options.ranks} ranks")
        print_table(results)
        check_losses(results)


def find_python():
    for python in ("python3", "/usr/bin/python3"):
        if subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0:
            return python
    sys.exit("no python3 with torch found; name one with --python")


def run(command, environment):
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in result.stdout.splitlines():
        if "{" in line:  # launchers put the rank before it
            return json.loads(line[line.index("{"):])
    sys.exit(f"{' '.join(command)}\nended with {result.returncode}:\n{result.stdout}{result.stderr}")


def print_table(results):
    """The last two columns: how many times the peer's step and cost are those of this program."""
    columns = ["alone ms", "DDP ms", "cost ms", "forward ms", "backward ms", "optimizer ms", "step ratio", "cost ratio"]
    print("| program | torch, optimizer | threads | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 3) + "|")
    peer = None
    for name, runs in results.items():
        values = [statistics.median(value(run) for run in runs) for value in (
            lambda run: run["alone"]["step_ms"], lambda run: run["ddp"]["step_ms"], lambda run: run["cost_ms"],
            lambda run: run["ddp"]["forward_ms"], lambda run: run["ddp"]["backward_ms"], lambda run: run["ddp"]["optimizer_ms"])]
        peer = peer or values
        ratios = [f"{peer[1] / values[1]:.2f}", f"{peer[2] / values[2]:.1f}" if min(peer[2], values[2]) > 0 else "-"]
        cells = [name, f"{runs[0]['torch']}, {runs[0]['optimizer']}", str(runs[0]["threads"])]
        print("| " + " | ".join(cells + [f"{value:.1f}" for value in values] + ratios) + " |")


def check_losses(results):
    """All programs compute the same: PyTorch's is the one that is not ours."""
    reference = results[PEER][0]["losses"]
    for name, runs in results.items():
        losses = runs[0]["losses"]
        difference = max(abs(loss - expected) / expected for loss, expected in zip(losses, reference))
        print(f"losses of {name}: {' '.join(f'{loss:.6f}' for loss in losses)}, relative difference {difference:.0e}")
        if difference > 1e-4:
            sys.exit("the losses differ by more than 1e-4: the programs do not compute the same")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
