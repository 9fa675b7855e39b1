# SPDX-License-Identifier: Apache-2.0
"""Death and silence: ranks, launchers and links that end, stop, or become slow."""
import os
import re
import signal
import time

from support import Failure, case, inside, is_alive, processes


def kill(trial, ranks, victim, name, **more):
    """Kills one rank in the middle of its training; the job, and the moment."""
    job = trial.train(ranks, name, **more)
    trial.steps(job, 25, name)
    pid = trial.ranks(ranks)[victim]
    time.sleep(trial.random.random() * 0.03)  # another place in the step each time
    os.kill(pid, signal.SIGKILL)
    return job, pid, time.monotonic()


@case
def a1(trial):
    """Kill -9 of one rank.

    The rank and its pid are named within 0.25 s, exit code 137; survivors name rank, operation and shape."""
    for backend in ("shm", "gloo"):
        for number in range(trial.count(1, 20)):
            for victim in (0, 1, 2):
                job, pid, moment = kill(trial, 3, victim, f"{backend}{number}{victim}", comm__backend=backend)
                trial.says(job, "gone", rank=victim)  # by a survivor or the launcher
                detect = time.monotonic() - moment
                trial.seen(detect=detect)
                trial.finish(job, 137, since=moment)
                trial.says(job, "dead", seconds=0, rank=victim, pid=pid)
                trial.within(detect, 0.25, f"{backend} rank {victim}: named")
                trial.verify(f"{backend}{number}{victim}")
    trial.gtest("fault_tests", "*AKilled*:*ASenderThatDies*:Mpi.ADeadRankEndsTheJob:Launcher.*")


def restarted(trial, job, ranks, old, name="run"):
    """Waits for the first step of the ranks that replace the old ones; when it came."""
    trial.until(lambda: not any(map(is_alive, old)), "the old ranks do not end", 20)
    size = trial.metrics(name).stat().st_size

    def stepped():
        trial.require(job.process.poll() is None, lambda: f"ended with code {job.process.returncode}: {job.err[-300:]}")
        return trial.metrics(name).stat().st_size > size
    trial.until(stepped, "no step after the restart", 30)
    return time.monotonic()


LAYOUTS = {  # name -> ranks, and what differs from data parallelism
    "dp": (2, {}),
    "tp": (2, {"parallel__tp": 2}),
    "pp": (2, {"parallel__pp": 2, "model__layers": 2, "train__global_batch": 2}),
    "shard": (2, {"parallel__shard": "full"}),
    "hybrid": (4, {"parallel__shard": "hybrid", "parallel__shard_size": 2}),
    "dp and pp": (4, {"parallel__pp": 2, "model__layers": 2, "train__global_batch": 4}),
}


def weights(trial, name):
    """The bytes of the tensors in the last checkpoint."""
    folder = sorted((trial.folder / name / "checkpoints").glob("step-*"))[-1]
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


@case
def a2(trial):
    """Kill -9 of any rank at any moment of a job that may restart, in six layouts.

    The ranks continue from the newest checkpoint, first step within 2 s (95 of 100), and end with the bits of a run without the kill."""
    taken = []
    for layout, (ranks, options) in LAYOUTS.items():
        trial.finish(trial.train(ranks, f"whole {layout}", steps=120, **options), 0, measured=False)
        for number in range(trial.count(1, 20)):
            name = f"{layout} {number}"
            job = trial.train(ranks, name, steps=120, run__max_restarts=1, **options)
            trial.steps(job, trial.random.randrange(1, 80), name)
            old = trial.ranks(ranks)
            time.sleep(trial.random.random() * 0.03)
            os.kill(trial.random.choice(list(old.values())), signal.SIGKILL)
            moment = time.monotonic()
            taken.append(restarted(trial, job, ranks, old.values(), name) - moment)
            trial.finish(job, 0, measured=False)
            trial.require(weights(trial, name) == weights(trial, f"whole {layout}"), f"{name}: the weights differ")
    taken.sort()
    slow = taken[int(len(taken) * 0.95 - 1e-9)]
    trial.seen(detect=slow)
    trial.notes.append(f"{len(taken)} kills: first step after {taken[len(taken) // 2]:.2f} s (median), {slow:.2f} s (95 of 100), {taken[-1]:.2f} s (longest)")
    program = trial.start(trial.lockstep, "run", "-n", 2, "--max-restarts", 1, trial.lockstep, "train", *trial.options("run"))
    trial.steps(program, 45)
    old = trial.ranks(2)
    os.kill(old[1], signal.SIGKILL)
    moment = time.monotonic()
    trial.notes.append(f"under lockstep run, which loads the program again: {restarted(trial, program, 2, old.values()) - moment:.2f} s")
    trial.require(trial.last_step() > 20, f"began again at step {trial.last_step()}")
    trial.stop(program)
    trial.verify()
    trial.within(slow, 2.0, "first step")


RECOVERED = {  # with four ranks, as the promise has it
    "dp": {},
    "tp": {"parallel__tp": 2},
    "sequence": {"parallel__tp": 2, "parallel__sequence_parallel": "true"},
    "pp": {"parallel__pp": 2, "model__layers": 2},
    "interleaved": {"parallel__pp": 2, "parallel__chunks": 2, "model__layers": 4},
    "tp and pp": {"parallel__tp": 2, "parallel__pp": 2, "model__layers": 2},
    "shard optimizer": {"parallel__shard": "optimizer"},
    "shard grad_op": {"parallel__shard": "grad_op"},
    "shard full": {"parallel__shard": "full"},
    "hybrid": {"parallel__shard": "hybrid", "parallel__shard_size": 2},
    "shard and pp": {"parallel__shard": "full", "parallel__pp": 2, "model__layers": 2},
    "offload": {"parallel__shard": "full", "offload__params": "true", "offload__optimizer": "true"},
}


def recovered(trial, layout, name, lose, before=None, fault=""):
    """A run whose ranks die as lose() does it, and continue from memory; seconds from the last death to the next step, and the steps lost.
    `before`: that lose() is called after so many steps."""
    steps = 60
    whole = f"whole {layout}"
    options = {"train__global_batch": 4, "checkpoint__every": 0, "run__recovery": None, **RECOVERED[layout]}
    if not trial.metrics(whole).exists():
        trial.finish(trial.train(4, whole, steps=steps, **options), 0, 180, measured=False)
    job = trial.train(4, name, steps=steps, variables={"LOCKSTEP_FAULT": fault} if fault else None, **{**options, "run__recovery": "memory", "run__max_restarts": 5})
    trial.steps(job, before or trial.random.randrange(1, 40), name)
    if before is None:
        time.sleep(trial.random.random() * 0.03)
    moment, old = lose(job)
    trial.until(lambda: not any(map(is_alive, old)), "the old ranks do not end", 20)
    reached = trial.last_step(name)
    taken = restarted(trial, job, 4, old, name) - moment
    trial.finish(job, 0, 180, measured=False)
    resumed = [int(step) for step in re.findall(r"memory at step (\d+)", job.out)]
    trial.require(resumed, lambda: f"{name}: not from memory: {job.err[-300:]}")
    trial.require(weights(trial, name) == weights(trial, whole), f"{name}: the weights differ")
    return taken, reached - resumed[-1]


PHASES = range(1, 60, 3)  # twenty places of a step: signs of life that the flight recorder counts after the step before


@case
def a3(trial):
    """Kill -9 of any of four ranks at twenty places of a step, in twelve layouts, with copies in memory and no checkpoint.

    The ranks continue within 2 s (95 of 100), at most one step is lost, and they end with the bits of a run without the kill."""
    taken, lost = [], []
    for layout in RECOVERED:
        for number, sign in enumerate(trial.count([trial.random.choice(PHASES)], PHASES)):
            def see_one_die(_):
                old = trial.ranks(4)
                trial.until(lambda: not all(map(is_alive, old.values())), "no rank dies", 60)
                return time.monotonic(), list(old.values())
            fault = f"rank={(number + len(taken)) % 4},step={trial.random.randrange(25, 45)},sign={sign},action=kill"
            seconds, steps = recovered(trial, layout, f"{layout} {sign}", see_one_die, before=3, fault=fault)
            taken.append(seconds)
            lost.append(steps)
    taken.sort()
    slow = taken[int(len(taken) * 0.95 - 1e-9)]
    trial.seen(detect=slow)
    trial.notes.append(f"{len(taken)} kills: first step after {taken[len(taken) // 2]:.2f} s (median), {slow:.2f} s (95 of 100), "
                       f"{taken[-1]:.2f} s (longest); {sum(lost) / len(lost):.2f} steps lost, at most {max(lost)}")
    trial.require(max(lost) <= 1, f"{max(lost)} steps were lost")
    trial.within(slow, 2.0, "first step")


@case
def a14(trial):
    """Kill -9 of two ranks 100 ms apart, and of a rank during the recovery, with copies in memory.

    The ranks continue from memory, and end with the bits of a run without the kills."""
    def kill_two(_):
        old = trial.ranks(4)
        first, second = trial.random.sample(sorted(old), 2)
        os.kill(old[first], signal.SIGKILL)
        time.sleep(0.1)
        if is_alive(old[second]):
            os.kill(old[second], signal.SIGKILL)
        return time.monotonic(), list(old.values())

    def kill_again(job):
        old = trial.ranks(4)
        os.kill(old[trial.random.randrange(4)], signal.SIGKILL)
        trial.until(lambda: not any(map(is_alive, old.values())), "the old ranks do not end", 20)
        new = trial.ranks(4)
        time.sleep(trial.random.random() * 0.5)
        os.kill(new[trial.random.randrange(4)], signal.SIGKILL)
        return time.monotonic(), list(new.values())

    for layout in trial.count(["dp", "hybrid"], list(RECOVERED)):
        for number in range(trial.count(1, 10)):
            recovered(trial, layout, f"two {layout} {number}", kill_two)
            recovered(trial, layout, f"again {layout} {number}", kill_again)


def stop_and_replace(trial):
    job = trial.train(3, run__max_restarts=1)
    trial.steps(job, 25)
    old = trial.ranks(3)
    os.kill(old[1], signal.SIGSTOP)
    moment = time.monotonic()
    trial.says(job, "stopped", rank=1, pid=old[1])
    named = time.monotonic() - moment
    trial.seen(detect=named)
    trial.within(named, 1.5, "named")
    return job, old, moment


@case
def a4(trial):
    """SIGSTOP of one rank.

    The launcher names the rank and its pid within 1.5 s, and replaces it at 3.5 s."""
    for _ in range(trial.count(1, 10)):
        job, old, moment = stop_and_replace(trial)
        taken = restarted(trial, job, 3, old.values()) - moment
        trial.notes.append(f"first new step after {taken:.2f} s")
        trial.stop(job)
        trial.verify()
        trial.within(taken, 3.5 + 2.0, "first new step")


@case
def a5(trial):
    """One rank sleeps in a step, its threads alive.

    It is named within 2.5 s, with the stacks of its threads; the job ends at the deadline."""
    job = trial.train(3, variables={"LOCKSTEP_FAULT": "rank=1,step=7,action=sleep:60"}, comm__timeout=6)
    trial.steps(job, 6)
    moment = time.monotonic()
    trial.says(job, "late", rank=1)
    trial.seen(detect=time.monotonic() - moment)
    trial.says(job, "stacks")
    trial.within(trial.detect, 2.5, "named")
    trial.require(0 < trial.finish(job, seconds=30, since=moment) < 20 and job.code != 0, f"ended with {job.code}")


@case
def a6(trial):
    """One rank is slow: 3 s in one step, then 5 % of a core.

    It is named; nothing is killed and the job ends with 0."""
    job = trial.train(3, steps=20, variables={"LOCKSTEP_FAULT": "rank=1,step=7,action=sleep:3"})
    trial.says(job, "late", rank=1)
    trial.finish(job, 0)
    with trial.cgroup("cpu", cfs_period_us=100_000, cfs_quota_us=5_000) as group:
        job = trial.train(3, "slow")
        trial.steps(job, 5, "slow")
        (group / "cgroup.procs").write_text(str(trial.ranks(3)[1]))
        before, start = trial.last_step("slow"), time.monotonic()
        trial.until(lambda: time.monotonic() - start > trial.count(10, 60), "", 90)
        trial.require(job.process.poll() is None, f"ended with code {job.process.returncode}")
        trial.notes.append(f"{trial.last_step('slow') - before} steps with a slow rank")
        trial.require(trial.last_step("slow") > before, "no step")
        trial.stop(job)


@case
def a7(trial):
    """The whole job is frozen for 30 s.

    It continues: no restart, no lost step, exit code 0."""
    with trial.cgroup("freezer") as group:
        job = trial.train(3, before=inside(group), steps=2000)
        trial.steps(job, 5)
        (group / "freezer.state").write_text("FROZEN")
        start, frozen = time.monotonic(), trial.last_step()
        trial.until(lambda: time.monotonic() - start > 30, "", 40)
        (group / "freezer.state").write_text("THAWED")
        trial.finish(job, 0, 120)
        trial.require(trial.last_step() == 2000, f"step {trial.last_step()}")
        trial.notes.append(f"frozen at step {frozen}; 2000 of 2000 steps")


@case
def a8(trial):
    """SIGCONT of a rank that was replaced.

    It has ended, or ends within 1 s, and writes nothing."""
    trial.gtest("formats_tests", "Lock.AWriterWhoseLockWasTakenOverCommitsNothing")
    trial.gtest("launch_tests", "Rendezvous.EarlierGenerations*:Rendezvous.ANewGeneration*")
    job, old, _ = stop_and_replace(trial)
    restarted(trial, job, 3, [pid for rank, pid in old.items() if rank != 1])
    if is_alive(old[1]):
        os.kill(old[1], signal.SIGCONT)
        trial.seen(end=trial.until(lambda: not is_alive(old[1]), "the old rank lives", 5))
        trial.within(trial.end, 1.0, "the old rank ended")
    trial.stop(job)
    trial.verify()


@case
def a9(trial):
    """A cable is pulled between two hosts.

    Both sides end, and a rank behind the cable is named within 2 s; under mpirun, whose ranks give links ten seconds, when it is late."""
    trial.script("tests/cluster/fault_test.py", "-k", "pulled")
    for backend, event, seconds in re.findall(r"(\w+): (named|ended) ([\d.]+) s after", "\n".join(trial.notes)):
        trial.seen(**{"detect" if event == "named" else "end": float(seconds)})
        if event == "named":
            trial.within(float(seconds), 6.0 if backend == "mpi" else 2.0, f"{backend}: named")


@case
def a10(trial):
    """A cable is off for 0.3 s and 0.8 s.

    No restart and no error; exit code 0."""
    trial.script("tests/cluster/fault_test.py", "-k", "loose")


@case
def a11(trial):
    """A link of 1 Mbit/s; flipped bits in messages between hosts.

    Slow but right; every flip is found and its rank named."""
    trial.script("tests/cluster/fault_test.py", "-k", "slow")
    trial.script("tests/fault/message_flips.py", trial.count(10, 1000), 1)


@case
def a12(trial):
    """Kill -9 of the launcher, of mpirun, and of its daemon.

    Everything ends within 1 s, nothing is left."""
    for number in range(trial.count(2, 20)):
        job = trial.train(3, f"run{number}")
        trial.steps(job, 25, f"run{number}")
        pids = trial.ranks(3).values()
        job.process.kill()
        moment = time.monotonic()
        trial.until(lambda: not any(map(is_alive, pids)), "ranks live", 10)
        trial.seen(end=time.monotonic() - moment)
        job.process.wait()
        trial.verify(f"run{number}")
    trial.within(trial.end, 1.0, "the last rank ended")
    trial.gtest("launch_tests", "LauncherEnd.KillingTheLauncherLeavesNothing:LauncherEnd.TheGuardEndsWithTheJob")
    trial.script("tests/cluster/fault_test.py", "-k", "mpirun")


@case
def a13(trial):
    """Kill -9 of the launcher that hosts the rendezvous of two nodes.

    The other node ends within 2 s and names it."""
    nodes = [trial.start(trial.lockstep, "run", "-n", 1, "--nnodes", 2, "--node-rank", node, "--rendezvous", "127.0.0.1:29400",
                         trial.lockstep, "train", *trial.options(), LOCKSTEP_TOKEN="a secret") for node in (0, 1)]
    trial.steps(nodes[0], 5)
    nodes[0].process.kill()
    nodes[0].process.wait()
    moment = time.monotonic()
    trial.says(nodes[1], "lost", rank=0)
    trial.seen(detect=time.monotonic() - moment)
    trial.finish(nodes[1], since=moment)
    trial.require(nodes[1].code != 0, "exit code 0")
    trial.within(trial.end, 2.0, "ended")
    trial.gtest("launch_tests", "Nodes.ALostNodeEndsTheOther:Rendezvous.AServerThatGoesAway*")


@case
def a15(trial):
    """A rank that always dies at step 3, with 10 restarts.

    Three restarts without progress, then exit code 93, within 20 s."""
    job = trial.train(2, variables={"LOCKSTEP_FAULT": "rank=1,step=3,action=kill,start=each"}, run__max_restarts=10)
    trial.finish(job, 93)
    trial.says(job, "no progress")
    trial.within(trial.end, 20, "ended")
    if [words for _, _, words in processes().values() if "train" in words]:
        raise Failure("ranks live")
