#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lockstep's DDP and fully_shard beside PyTorch's: the time of a training step and the memory of a rank, where computing
dominates (4 x 256 tokens a rank) and where communication does (1 x 16). The programs take turns, so that a disturbance meets
all of them; medians over the rounds of medians over the steps. All with AdamW, blocks as units, cores / ranks threads.

python3 bench/shard.py             the 69M model (8 layers of width 768), 2 and 4 ranks
python3 bench/shard.py --quick     one round of few steps

Memory is a rank's, the largest of all, less what the process had before it made the model: "own" is the most anonymous and own shared
memory during a step; "resident" is ru_maxrss, in which pages of other ranks' shared memory count as soon as they have been
read, and which includes making the model. malloc is as it is by default: to keep freed memory would change both.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

from ddp import MODELS, find_python, run

BATCHES = {"compute": dict(batch=4, seq=256), "communication": dict(batch=1, seq=16)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="timed steps in a round, after five that are not")
    parser.add_argument("--quick", action="store_true", help="one round of five steps")
    parser.add_argument("--model", choices=MODELS, default="69M")
    parser.add_argument("--bound", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--mode", nargs="+", default=["ddp", "full"], help="Lockstep's; grad_op, optimizer, none, hybrid too")
    parser.add_argument("--python", help="one with torch; default: the first of python3, /usr/bin/python3 that has it")
    parser.add_argument("--build", default="build")
    parser.add_argument("--json", help="append the result of every run to this file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 5

    python = options.python or find_python()
    peer_modes = ["ddp"]
    probe = subprocess.run([python, "-c", "from torch.distributed.fsdp import fully_shard"], stderr=subprocess.DEVNULL)
    if probe.returncode == 0:
        peer_modes.append("full")
    else:
        print(f"PyTorch's fully_shard is left out: the torch of {python} has none")
    here = os.path.dirname(os.path.abspath(__file__))
    for ranks in options.ranks:
        lockstep = [f"{options.build}/bin/lockstep", "run", "-n", str(ranks), f"{options.build}/bin/bench_shard_step"]
        # Debian's torch 1.13 cannot read its own defaults of the last two.
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
                    "--redirects", "1", "--tee", "1", f"{here}/torch_shard.py"]
        programs = {f"PyTorch {mode}": torchrun + ["--mode", mode] for mode in peer_modes}
        programs.update({f"Lockstep {mode}": lockstep + ["--mode", mode] for mode in options.mode})
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
        for bound in options.bound:
            sizes = {**MODELS[options.model], **BATCHES[bound], "steps": options.steps}
            arguments = [text for name, value in sizes.items() for text in ("--" + name, str(value))]
            results = {name: [] for name in programs}
            for _ in range(options.rounds):
                for name, command in programs.items():
                    results[name].append(run(command + arguments, {**os.environ, **threads}))
                    if options.json:
                        with open(options.json, "a") as file:
                            print(json.dumps({"bound": bound, "name": name, **results[name][-1]}), file=file)
            tokens = sizes["batch"] * sizes["seq"]
            print(f"\n{bound}-bound: {options.model}, {tokens} tokens per rank, {ranks} ranks")
            print_table(results)
            check_losses(results)


def print_table(results):
    """The last column: how many times the peer's step of the same mode is this one's."""
    print("| program | torch | threads | step ms | best ms | forward ms | backward ms | optimizer ms | own MB | resident MB "
          "| PyTorch's step / this |")
    print("|---" * 11 + "|")
    for name, runs in results.items():
        def median(value):
            return statistics.median(value(run) for run in runs)

        times = [1e3 * median(lambda run: run[key]) for key in ("median_s", "best_s", "forward_s", "backward_s", "optimizer_s")]
        memory = [median(lambda run: run["memory"][key]) / 1e6 for key in ("own_peak", "resident_peak")]
        peer = results.get("PyTorch " + runs[0]["mode"], [])
        ratio = "-" if not peer or peer is runs else f"{1e3 * statistics.median(run['median_s'] for run in peer) / times[0]:.2f}"
        cells = [name, runs[0]["torch"], str(runs[0]["threads"]), *(f"{value:.1f}" for value in times),
                 *(f"{value:.0f}" for value in memory), ratio]
        print("| " + " | ".join(cells) + " |")


def check_losses(results):
    """All programs compute the same: the first is not ours."""
    reference = next(iter(results.values()))[0]["losses"]
    for name, runs in results.items():
        difference = max(abs(loss - expected) / expected for loss, expected in zip(runs[0]["losses"], reference))
        if difference > 1e-4:
            sys.exit(f"the losses of {name} differ by {difference:.0e}: the programs do not compute the same")
    print(f"losses of all programs agree to 1e-4: {' '.join(f'{loss:.6f}' for loss in reference)}", flush=True)


if __name__ == "__main__":
    main()
