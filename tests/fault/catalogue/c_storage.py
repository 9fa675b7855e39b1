# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and storage: saves that are interrupted, disks that are full or fail, files that are damaged."""
import os
import pathlib
import re
import resource
import shutil
import subprocess
import time

from support import SOURCE, case

CALLS = "openat,write,pwrite64,writev,pwritev,fsync,fdatasync,rename,renameat2,mkdir,unlink,unlinkat"


def traced(trial, inject, name, steps):
    """A resumed run of one rank under strace, which injects into the system calls that follow its start."""
    return trial.start("strace", "-f", "-qq", "-o", trial.folder / "strace", "-e", f"trace={CALLS}", "-e", inject, trial.lockstep, "train",
                       "--resume", trial.folder / name, "--train.steps", steps)


def saved(trial):
    """A run that has saved, to be copied."""
    trial.finish(trial.train(1, "base", steps=4, checkpoint__every=2, metrics__file="auto"), 0)
    return trial.folder / "base"


@case
def c1(trial):
    """SIGKILL at system calls of a save.

    The newest sound checkpoint loads, and the run resumes."""
    trial.gtest("checkpoint_crash_test", "*ACrashAtAnySystemCall*:KilledSave.*")
    trial.gtest("checkpoint_tests", "Saver.SurvivesKills")
    base = saved(trial)
    trial.call("strace", "-f", "-qq", "-o", trial.folder / "all", "-e", f"trace={CALLS}", trial.lockstep, "train", "--resume",
               shutil.copytree(base, trial.folder / "count"), "--train.steps", 8)
    # strace counts the calls of each kind, in each process.
    points, counts = [], {}
    for line in (trial.folder / "all").read_text().splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if not found or points and found[1] != points[0][0]:
            continue
        pid, call = found.groups()
        counts[pid, call] = counts.get((pid, call), 0) + 1
        # Before its first write in the folder a run only loads libraries.
        if points or (str(trial.folder / "count") in line and re.search("O_WRONLY|O_RDWR|O_CREAT|mkdir", line)):
            points.append((pid, call, counts[pid, call]))
    trial.require(points, "strace has seen no write in the folder")
    chosen = points[::max(1, len(points) // trial.count(8, 500))]
    for _, call, number in chosen:
        name = f"run-{call}-{number}"
        shutil.copytree(base, trial.folder / name)
        job = traced(trial, f"inject={call}:signal=KILL:when={number}", name, 8)
        trial.finish(job, (-9, 137))
        trial.verify(name)
        trial.call(trial.lockstep, "train", "--resume", trial.folder / name, "--train.steps", 8, seconds=90)
        left = [path.name for path in (trial.folder / name / "checkpoints").iterdir() if "tmp" in path.name or "part" in path.name]
        trial.require(not left, f"killed at {call} {number}: {left} after the restart")
        shutil.rmtree(trial.folder / name)
    trial.notes.append(f"strace: killed at {len(chosen)} of {len(points)} calls")


@case
def c2(trial):
    """The same, and data that no fsync covers is lost.

    The newest sound checkpoint loads."""
    trial.gtest("checkpoint_crash_test", "*ACrashAtAnySystemCall*")


@case
def c3(trial):
    """No space before, in and after the shards of a save.

    Path and sizes are said, training continues, the old checkpoint is sound."""
    trial.gtest("formats_tests", "FullDisk.AFullFileSystem*")
    trial.gtest("train_tests", "Train.ContinuesWithoutDiskSpaceAndKeepsTheOldCheckpoint:TrainDisk.AFullDiskIsSaid")
    mounted = trial.folder / "small"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mounted], check=True)
    try:
        job = trial.train(2, steps=200, checkpoint__dir=mounted, checkpoint__every=5, checkpoint__keep=0)
        trial.finish(job, (0, 74, 1))
        trial.require(str(mounted) in job.err + job.out, "the folder is not named")
        trial.call(trial.lockstep, "checkpoint", "verify", mounted)
    finally:
        subprocess.run(["umount", mounted], check=True)


@case
def c4(trial):
    """EIO of fsync, EROFS, EACCES, a limit of file sizes, a folder that is deleted.

    Errno and path are said; no crash."""
    trial.gtest("formats_tests", "FullDisk.AFileSizeLimit*:FullDisk.AFolderThatCannotBeWritten*:Folder.CannotBeWritten")
    trial.gtest("checkpoint_crash_test", "CheckpointFailure.*")
    trial.gtest("checkpoint_tests", "*SaverFailure*:Checkpoint.OneRanksFailureIsEveryRanks")
    base = saved(trial)
    for number, inject in enumerate(("inject=fsync:error=EIO", "inject=fsync:error=EIO:when=3+", "inject=rename:error=EROFS",
                                     "inject=rename:error=EROFS:when=4+", "inject=mkdir:error=EACCES")):
        name = shutil.copytree(base, trial.folder / f"run{number}").name
        job = traced(trial, inject, name, 8)
        trial.finish(job, seconds=90)
        trial.require(0 < job.code < 128, f"{inject}: exit code {job.code}: {job.err[-300:]}")
        error = {"EIO": "Input/output", "EROFS": "Read-only", "EACCES": "Permission denied"}[re.search("E[A-Z]+", inject)[0]]
        trial.require(error in job.err and str(trial.folder / name) in job.err, f"{inject}: {job.err[-300:]}")
        trial.verify(name)
        trial.notes.append(f"{inject.split('=', 1)[1]}: code {job.code}")
    job = trial.train(2, steps=300, checkpoint__every=100)
    trial.steps(job, 10)
    shutil.rmtree(trial.folder / "run" / "checkpoints", ignore_errors=True)
    trial.finish(job, (0, 1, 74))
    trial.notes.append(f"deleted folder: code {job.code}")


@case
def c5(trial):
    """Files cut and bits flipped.

    Refused with file and tensor, or read right; the run falls back to the checkpoint before."""
    trial.gtest("formats_tests", "*Mutations*:Manifest.EveryDamagedBitIsNoticed:Reader.*", 900)
    trial.gtest("checkpoint_tests", "Resume.*:Checkpoint.DamageIsNoticed", 900)
    trial.gtest("train_tests", "Train.DamagedCheckpointsAreRefused:Train.ResumesFromTheNewestSoundCheckpoint")


@case
def c6(trial):
    """Headers made to mislead: lengths, overlaps, names, nesting, links, other formats.

    A typed error before memory is taken."""
    trial.gtest("formats_tests", "Safetensors.*:Manifest.*:Hf.*:Folder.*")
    trial.gtest("command_tests", "Input.*")
    if trial.all:
        for name in ("safetensors_fuzz", "manifest_fuzz"):
            program = SOURCE / "build" / "fuzz" / "bin" / name
            trial.require(program.exists(), f"{program} is missing; make faults-all builds it")
            corpus = trial.folder / name
            corpus.mkdir()
            trial.call(program, "-max_total_time=300", "-rss_limit_mb=512", "-timeout=1", corpus, seconds=400)
            trial.notes.append(f"{name}: 300 s")


@case
def c7(trial):
    """A run is stopped and resumed on the same ranks.

    Losses and weights are the bits of an uninterrupted run."""
    trial.gtest("checkpoint_tests", "CheckpointLayouts.TheSameLayoutResumesBitForBit", 900)
    trial.gtest("train_tests", "Train.AResumedRunHasTheLosses*")
    whole = trial.train(2, "whole", steps=150)
    trial.finish(whole, 0)
    part = trial.train(2, "part", steps=150)
    trial.steps(part, 40, "part")
    trial.stop(part, (75, 0))
    trial.call(trial.lockstep, "train", "-n", 2, "--resume", trial.folder / "part")
    trial.call(trial.lockstep, "checkpoint", "diff", trial.folder / "whole", trial.folder / "part")
    trial.notes.append("stopped run: 150 steps, equal bits")


@case
def c8(trial):
    """A run is resumed on other numbers of ranks and other layouts.

    The loaded state is the same."""
    trial.gtest("checkpoint_tests", "CheckpointLayouts.*:Checkpoint.AnyLayoutReadsAnyOther", 1500)
    trial.gtest("train_tests", "*ResumeInOtherLayouts*:*ResumesInOtherLayouts*", 900)


@case
def c9(trial):
    """Checkpoints every 100 steps, asynchronous.

    A run takes at most 3 % longer than without."""
    best, cost = {}, 1
    for number in range(trial.count(6, 8)):  # the best of each kind counts: other work of the machine only adds to them
        if cost <= 0.03 and number >= 3:
            break
        for every in (0, 100):
            job = trial.train(1, f"run{every}{number}", model__hidden=128, model__layers=2, train__seq_len=64, checkpoint__every=every or None,
                              checkpoint__async="true", steps=10_000_000)
            trial.steps(job, 10, f"run{every}{number}")
            first, start = trial.last_step(f"run{every}{number}"), time.monotonic()
            trial.steps(job, first + 400, f"run{every}{number}", 120)
            taken = (time.monotonic() - start) / (trial.last_step(f"run{every}{number}") - first)
            trial.stop(job)
            best[every] = min(best.get(every, taken), taken)
        cost = best[100] / best[0] - 1
    trial.notes.append(f"{1000 * best[0]:.2f} ms without, {1000 * best[100]:.2f} ms with: {100 * cost:+.1f} %")
    trial.require(cost <= 0.03, f"a step takes {100 * cost:.1f} % longer")


@case
def c10(trial):
    """Two jobs save in one folder; a writer whose lock was taken over.

    The second is refused; nothing is mixed."""
    trial.gtest("formats_tests", "Lock.*")
    trial.gtest("train_tests", "Train.ASecondJobIsRefusedTheFolder")


@case
def c11(trial):
    """A save in each of many steps.

    Memory grows by at most 1 MB, no descriptor is lost, exactly 3 checkpoints are kept."""
    steps = trial.count(600, 10_000)
    job = trial.train(1, steps=steps + 200, checkpoint__every=1)
    used = []
    (pid, ) = trial.ranks(1).values()
    for step in (steps // 2, steps):
        trial.steps(job, step, seconds=steps)
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        used.append((int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))))
    trial.stop(job, (75, 0))
    growth = (used[1][0] - used[0][0]) / resource.getpagesize() * resource.getpagesize()
    kept = [path.name for path in (trial.folder / "run" / "checkpoints").glob("step-*")]
    trial.notes.append(f"{steps // 2} saves: {growth / 1e6:+.2f} MB, {used[1][1] - used[0][1]:+d} descriptors")
    trial.require(len(kept) == 3, f"kept: {kept}")
    trial.require(growth <= 1e6 and used[1][1] <= used[0][1] + 1, f"grew by {growth} bytes, descriptors {used[0][1]} -> {used[1][1]}")
