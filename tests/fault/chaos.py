#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Disturbs a training job at random moments, and reports what each fault cost.

usage: chaos.py [--mtbf S] [--kinds kill,stop,...] [--seconds S] [--seed N] [--hosts H] [--compare] -- LOCKSTEP train -n N --run.max_restarts K ...

Faults come at random times, S seconds apart on average (--mtbf), to a random rank:
  kill   SIGKILL
  stop   SIGSTOP, until the launcher replaces the rank
  pause  SIGSTOP for half a second, which the job must ride through
  disk   the file system of the checkpoints, 2 GB of memory, is full for two seconds (root)
  link   the cable of a host is unplugged for 0.3 s; needs --hosts
  nan    the rank's loss is NaN in one step
  flip   one of the upper 20 bits of a float in a parameter or in optimizer state flips after a step; only state that ranks hold alike
         (data parallelism without sharding) is compared, so only there it is found
--hosts H starts `lockstep run` with N ranks on each of H simulated hosts (tests/cluster/hosts.py). --compare runs the same command without
faults first, as nan and flip do, too: the weights at the end must have the same SHA-256. After --seconds no more faults come, and the job
trains to its end. The seed fixes times, kinds and ranks. Metrics and checkpoints go to a temporary folder.
Status 1 if the job fails or the weights differ.
"""
import argparse
import hashlib
import json
import math
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
import hosts  # noqa: E402

NUMBERS = ("nan", "flip")  # the rank does it to itself
KINDS = ("kill", "stop", "pause", "disk", "link", *NUMBERS)


def metrics_of(path):
    """The lines of steps; the last one may be cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if "loss" in line]


def last_step(path):
    """The last finished step, from the end of the file alone: this is asked often, on the cores that train."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        steps = re.findall(rb'^{"step":(\d+),.*"loss".*}$', file.read(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def ranks_of(launchers):
    """rank -> pid of the children of launchers that are ranks."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent not in launchers:
                continue
            name = re.fullmatch(r"lockstep-r(\d+)", (path / "comm").read_text().strip())
            own = re.search(rb"(?:^|\0)RANK=(\d+)\0", (path / "environ").read_bytes())
        except OSError:
            continue
        if name or (len(launchers) > 1 and own):
            found[int((name or own).group(1))] = int(path.name)
    return found


def sha256(folder):
    newest = sorted(folder.glob("step-*"))[-1]
    digest = hashlib.sha256()
    for path in sorted(newest.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Job:
    """The command, or one launcher on each host. All output goes to one file."""

    def __init__(self, options, folder, faults=()):
        words = [*options.command, "--metrics.file", folder / "metrics.jsonl", "--checkpoint.dir", folder / "checkpoints", "--run.dir", ""]
        environment = os.environ | ({"LOCKSTEP_FAULT": ";".join(faults)} if faults else {})
        self.cluster, self.processes, self.folder = None, [], folder
        with open(folder / "output", "a") as output:
            start = lambda argv: subprocess.Popen([str(word) for word in argv], stdout=output, stderr=output, env=environment)
            if options.hosts == 1:
                self.processes.append(start(words))
                return
            self.cluster = hosts.Hosts(options.hosts)
            parser = argparse.ArgumentParser()
            parser.add_argument("-n", default="1")
            parser.add_argument("--run.max_restarts", "--max-restarts", dest="restarts", default="0")
            known, rest = parser.parse_known_args([str(word) for word in words[2:]])
            for node, name in enumerate(self.cluster.names):
                self.processes.append(start(["sh", "-c", hosts.ENTER, name, words[0], "run", "-n", known.n, "--nnodes", options.hosts, "--node-rank", node,
                                             "--rendezvous", f"h0:{hosts.PORT}", "--token-file", self.cluster.token_file, "--max-restarts",
                                             known.restarts, words[0], "train", *rest]))

    def poll(self):
        codes = [process.poll() for process in self.processes]
        return None if None in codes else max(codes, key=abs)

    def wait(self):
        codes = [process.wait() for process in self.processes]
        if self.cluster:
            self.cluster.remove()
        return max(codes, key=abs)

    def ranks(self):
        return ranks_of([process.pid for process in self.processes])


def wait_for(condition, job, seconds=120):
    """How long it took until the condition held; None if the job ended or the time was over."""
    start = time.monotonic()
    while not condition():
        if job.poll() is not None or time.monotonic() - start > seconds:
            return None
        time.sleep(0.02)
    return time.monotonic() - start


def fill(folder):
    """Takes the space that is left in the file system; returns the file that has it."""
    file = folder / "full"
    with open(file, "wb", buffering=0) as full:
        try:
            while True:
                full.write(bytes(1 << 20))
        except OSError:
            return file


def disturb(job, folder, kind, pick):
    """One fault. The rank or host, the seconds until it was named, and the seconds until the next step."""
    metrics, output = folder / "metrics.jsonl", folder / "output"
    ranks = job.ranks()
    if not ranks:
        return None
    next_step = lambda step: wait_for(lambda: last_step(metrics) > step, job)
    if kind == "disk":
        file = fill(folder / "checkpoints")
        wait_for(lambda: False, job, 2)
        file.unlink()
        return "", None, next_step(last_step(metrics))
    if kind == "link":
        name = pick.choice(job.cluster.names)
        job.cluster.cut(name)
        time.sleep(0.3)
        job.cluster.plug(name)
        return f"host {name}", None, next_step(last_step(metrics))
    rank = pick.choice(sorted(ranks))
    pid, said = ranks[rank], len(output.read_text())
    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    moment = time.monotonic()
    if kind == "pause":
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        return f"rank {rank}", None, next_step(last_step(metrics))
    named = wait_for(lambda: re.search(rf"rank {rank}\b", output.read_text()[said:]), job)
    wait_for(lambda: not set(ranks.values()) & set(job.ranks().values()), job)
    size = metrics.stat().st_size if metrics.exists() else 0
    back = wait_for(lambda: metrics.exists() and metrics.stat().st_size > size, job)
    return f"rank {rank}", named, None if back is None else time.monotonic() - moment


def numbers_that_go_wrong(options, kinds, whole, run, pick):
    """LOCKSTEP_FAULT for as many faults of numbers as come in --seconds: each once, at a random step of the undisturbed run. Files show which came."""
    steps = metrics_of(whole / "metrics.jsonl")
    seconds = statistics.median(step["step_ms"] for step in steps) / 1e3
    manifest = json.loads((sorted((whole / "checkpoints").glob("step-*"))[-1] / "manifest.json").read_text())
    sizes = {name: math.prod(record["shape"]) for name, record in manifest["tensors"].items() if record["dtype"] == "F32" and record["shape"]}
    ranks = len(steps[-1].get("busy_ms", [0]))
    count = round(options.seconds / options.mtbf * len(set(kinds) & set(NUMBERS)) / len(kinds))
    last = min(len(steps) - 5, int(options.seconds / seconds))
    faults = []
    for number in range(count):
        kind, rank, step = pick.choice([kind for kind in kinds if kind in NUMBERS]), pick.randrange(ranks), pick.randint(2, max(2, last))
        name = pick.choices(list(sizes), list(sizes.values()))[0]
        action = "nan" if kind == "nan" else f"flip:{name}:{pick.randrange(sizes[name])}:{pick.randint(12, 31)}"
        faults.append(f"rank={rank},step={step},action={action},once={run / f'{kind}-{number}-step-{step}'}")
    return faults


def watch(options, kinds, job, run, pick, counts):
    """Disturbs the job until it ends. Whether it failed."""
    start = time.monotonic()
    wait_for(lambda: last_step(run / "metrics.jsonl") > 0, job)
    first, recoveries = time.monotonic(), []
    share = len(kinds) / len(options.kinds.split(","))
    while job.poll() is None:
        if not kinds:
            wait_for(lambda: False, job, 1)
            continue
        pause, kind = pick.expovariate(share / options.mtbf), pick.choice(kinds)
        wait_for(lambda: False, job, pause)
        if job.poll() is not None or time.monotonic() - first > options.seconds:
            break
        fault = disturb(job, run, kind, pick)
        if fault is None:
            continue
        counts[kind] += 1
        what, named, back = fault
        recoveries += [back] if back is not None and kind in ("kill", "stop") else []
        seconds = ["-" if each is None else f"{each:.2f} s" for each in (named, back)]
        print(f"{time.monotonic() - first:7.1f} s: {kind} {what}: named after {seconds[0]}, next step after {seconds[1]}", flush=True)
    code = job.wait()
    took = time.monotonic() - start
    for kind in NUMBERS:
        came = sorted(path.name for path in run.glob(f"{kind}-*"))
        if kind in options.kinds.split(","):
            counts[kind] = len(came)
    steps = metrics_of(run / "metrics.jsonl")
    useful = len(steps) * statistics.median(step["step_ms"] for step in steps) / 1e3 if steps else 0
    print(f"{sum(counts.values())} faults ({', '.join(f'{n} {kind}' for kind, n in counts.items())}); exit code {code}; {len(steps)} steps in {took:.1f} s")
    if recoveries:
        print(f"recovery: median {statistics.median(recoveries):.2f} s, longest {max(recoveries):.2f} s")
    print(f"goodput: {100 * useful / took:.1f} % of the time would do for these steps, without start, faults and recovery")
    if code != 0:
        print((run / "output").read_text()[-1000:])
    else:
        print(f"weights: SHA-256 {sha256(run / 'checkpoints')}")
    return code != 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1][len("usage: "):])
    parser.add_argument("--mtbf", type=float, default=20)
    parser.add_argument("--kinds", default="kill")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if set(kinds) - set(KINDS):
        sys.exit(f"chaos.py: --kinds {options.kinds}: must be some of {','.join(KINDS)}, separated by commas")
    if not options.mtbf > 0:
        sys.exit(f"chaos.py: --mtbf {options.mtbf}: must exceed 0")
    if "link" in kinds and options.hosts == 1:
        sys.exit("chaos.py: --kinds link: needs --hosts 2 or more")
    if options.hosts > 1:
        hosts.enter()
    options.compare = options.compare or bool(set(kinds) & set(NUMBERS))
    outside = [kind for kind in kinds if kind not in NUMBERS]
    pick, counts, failed = random.Random(options.seed), dict.fromkeys(outside, 0), False
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as temporary:
        whole, run = pathlib.Path(temporary, "whole"), pathlib.Path(temporary, "run")
        whole.mkdir()
        (run / "checkpoints").mkdir(parents=True)
        if options.compare and Job(options, whole).wait() != 0:
            sys.exit(f"chaos.py: the undisturbed run failed: {(whole / 'output').read_text()[-500:]}")
        faults = numbers_that_go_wrong(options, kinds, whole, run, pick) if set(kinds) & set(NUMBERS) else []
        if "disk" in kinds:
            hosts.call("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(run / "checkpoints"))
        try:
            failed = watch(options, outside, Job(options, run, faults), run, pick, counts)
            if options.compare and not failed:
                failed = sha256(run / "checkpoints") != sha256(whole / "checkpoints")
                print("undisturbed run:", "other weights" if failed else "equal weights")
        finally:
            if "disk" in kinds:
                hosts.call("umount", str(run / "checkpoints"))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
