# SPDX-License-Identifier: Apache-2.0
"""The launcher, signals, and an environment that is short of something."""
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

from support import Failure, case, inside, is_alive

IGNORES = "import signal\nfor s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\nprint('ready', flush=True)\nwhile True: signal.pause()"
# A clock that jumps: LD_PRELOAD replaces the calendar, and leaves the monotonic clock alone.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) {
  static long calls;
  return ++calls % 200 < 100 ? 0 : atol(getenv("CLOCK_SHIFT"));
}
int clock_gettime(clockid_t id, struct timespec* t) {
  int (*real)(clockid_t, struct timespec*) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += shift();
  return result;
}
int gettimeofday(struct timeval* t, void* zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


@case
def d1(trial):
    """TERM, INT, USR1 and HUP to the launcher, TERM to one rank; while training, starting, and without a folder.

    All ranks save at one step, exit code 75."""
    failed = []
    kinds = [(name, "launcher", "training") for name in ("TERM", "INT", "USR1", "HUP")]
    kinds += [("TERM", "rank", "training"), ("TERM", "launcher", "starting"), ("USR1", "launcher", "without a folder")]
    for name, target, phase in kinds:
        for number in range(trial.count(1, 20)):
            run = f"{name}-{target}-{phase.split()[0]}-{number}"
            folder = {"run__dir": "", "checkpoint__dir": "", "checkpoint__every": None} if phase == "without a folder" else {}
            job = trial.train(2, run, **folder)
            try:
                if phase == "starting":
                    trial.ranks(2)
                else:
                    trial.steps(job, 5, run)
                os.kill(trial.ranks(2)[1] if target == "rank" else job.process.pid, getattr(signal, f"SIG{name}"))
                trial.finish(job, 75, 20)
                if phase == "training":
                    trial.verify(run)
            except Failure as failure:
                failed.append(f"{name} to the {target}, {phase}: {failure}"[:160])
                if job.process.poll() is None:
                    os.killpg(job.process.pid, signal.SIGKILL)
                    job.process.wait()
    trial.require(not failed, f"{len(failed)} of {len(kinds) * trial.count(1, 20)}: " + "; ".join(failed[:4]))


def is_pending(pid, number):
    """Whether a process has not yet taken a signal: a second one of the same number would be the first."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return any(int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"(?:SigPnd|ShdPnd):\s+(\w+)", status))


@case
def d2(trial):
    """A second SIGTERM, and a second SIGINT, to a job whose ranks ignore the first.

    It ends within 1 s."""
    for name in (signal.SIGTERM, signal.SIGINT):
        job = trial.start(trial.lockstep, "run", "-n", 2, "python3", "-c", IGNORES)
        trial.until(lambda: job.out.count("ready") == 2, "not ready")
        job.process.send_signal(name)
        trial.until(lambda: not is_pending(job.process.pid, name), "the first signal is not taken")
        job.process.send_signal(name)
        moment = time.monotonic()
        trial.finish(job, since=moment)
        trial.within(time.monotonic() - moment, 1.0, f"{name.name} twice: ended")
    trial.gtest("launch_tests", "LauncherEnd.ASecondSignalUrgesAndAThirdKills")


@case
def d3(trial):
    """Ranks ignore SIGTERM, --stop-grace is 1000.

    They are killed 1 s after it, 0.2 s more or less."""
    job = trial.start(trial.lockstep, "run", "-n", 2, "--stop-grace", 1000, "python3", "-c", IGNORES)
    trial.until(lambda: job.out.count("ready") == 2, "not ready")
    job.process.send_signal(signal.SIGTERM)
    taken = trial.finish(job, seconds=90)
    trial.require(0.8 <= taken, f"ended after {taken:.2f} s")
    trial.within(taken, 1.2, "ended")
    trial.gtest("launch_tests", "LauncherEnd.ThePatience*:LauncherEnd.RanksThatIgnoreSigterm*")


@case
def d4(trial):
    """The reader of the output leaves; the output is closed, or on a full device.

    The run continues, exit code 0."""
    words = '"$0" "$@"'
    for number, shell in enumerate((f"{words} | head -1 >&2; exit ${{PIPESTATUS[0]}}", f"{words} >&- 2>&-", f"{words} > /dev/full 2>&1")):
        trial.finish(trial.train(2, f"run{number}", steps=50, train__log_every=1, before=["bash", "-c", shell]), 0)
        trial.require(trial.last_step(f"run{number}") == 50, f"{shell}: step {trial.last_step(f'run{number}')}")
    trial.gtest("launch_tests", "LauncherOutput.AFullDisk*:LauncherOutput.AReader*")
    trial.gtest("train_tests", "Train.ContinuesWithoutAReaderOfItsOutput")


@case
def d5(trial):
    """The port is in use; the same port for one job after another.

    The port is named within 1 s; no job fails."""
    with socket.create_server(("127.0.0.1", 29400)):
        job = trial.start(trial.lockstep, "run", "-n", 1, "--nnodes", 2, "--node-rank", 0, "--rendezvous", "127.0.0.1:29400", "true",
                          LOCKSTEP_TOKEN="a secret")
        trial.finish(job)
        trial.require(job.code != 0 and "29400" in job.err, f"code {job.code}: {job.err}")
        trial.within(trial.end, 1.0, "ended")
    trial.gtest("launch_tests", "Launcher.APortThatIsTakenIsNamed:Launcher.AHundredStarts*:Launcher.TheSamePort*")


@case
def d6(trial):
    """/dev/shm of 1 MB, read-only, and full of another job's files.

    The job trains, or says what is missing; no SIGBUS."""
    for number, options in enumerate(("size=1m", "ro,size=1m", "size=64k")):
        shell = f'mount -t tmpfs -o {options} tmpfs /dev/shm && {{ head -c 60k /dev/zero > /dev/shm/old; exec "$0" "$@"; }}'
        job = trial.train(3, f"run{number}", steps=20, comm__backend="shm", before=["unshare", "-m", "sh", "-c", shell])
        trial.finish(job)
        trial.require(job.code < 128 and job.code >= 0, f"{options}: exit code {job.code}")
        trial.notes.append(f"{options}: code {job.code}")
    trial.gtest("comm_tests", "SymmetricMemory.NoRoomIsAnError")
    trial.gtest("fabric_tests", "Segment.NoRoomIsAnError")


@case
def d7(trial):
    """A rank exceeds the memory of its cgroup; an address space that is limited.

    The rank is named, and that memory ended it."""
    grow = "import os\nkept = []\nwhile os.environ['RANK'] == '1': kept.append(bytearray(1 << 20))\nimport signal; signal.pause()"
    for _ in range(trial.count(1, 20)):
        with trial.cgroup("memory", limit_in_bytes=150 << 20) as group:
            job = trial.start(*inside(group), trial.lockstep, "run", "-n", 2, "python3", "-c", grow)
            trial.finish(job, (137, 1))
            trial.says(job, "out of memory", seconds=1, rank=1)
    trial.gtest("train_tests", "Train.ARankWithoutMemorySaysWhatItWasFor")


@case
def d8(trial):
    """32 descriptors, few processes, no network, an odd host name.

    A typed error within seconds, or the job trains; no crash."""
    kinds = {
        "32 descriptors": ["prlimit", "--nofile=32:32"],
        "no network": ["unshare", "-n"],
        "odd host name": ["unshare", "--uts", "sh", "-c", 'hostname "a b;\\$(x)"; exec "$0" "$@"'],
    }
    with trial.cgroup("pids", max=12) as group:
        kinds["12 processes"] = inside(group)
        for number, (kind, words) in enumerate(kinds.items()):
            job = trial.train(2, f"run{number}", steps=10, before=words)
            try:
                taken = trial.finish(job, seconds=90)
            except Failure as failure:
                raise Failure(f"{kind}: {failure}") from None
            trial.require(0 <= job.code < 128, f"{kind}: exit code {job.code}: {job.err[-300:]}")
            trial.require(job.code == 0 or job.err.strip(), f"{kind}: nothing is said")
            if job.code != 0:
                trial.within(taken, 5, f"{kind}: ended")  # two of them are the start of the ranks
            trial.notes.append(f"{kind}: code {job.code}")


@case
def d9(trial):
    """The calendar jumps by an hour and by ten years, both ways; the monotonic clock has another origin.

    Nothing happens, exit code 0."""
    source, shim = trial.folder / "clock.c", trial.folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    for shift in (3600, -3600, 10 * 365 * 86400, -10 * 365 * 86400):
        job = trial.train(2, f"run{shift}", steps=100, variables={"LD_PRELOAD": shim, "CLOCK_SHIFT": shift})
        trial.finish(job, 0)
        trial.verify(f"run{shift}")
    job = trial.train(2, "monotonic", steps=100, before=["unshare", "--time", "--fork", "--monotonic", "100000000", "--boottime", "100000000"])
    trial.finish(job, 0)


def fuzzed(trial, keys):
    """A command line that is wrong in one place."""
    values = ["", "nan", "inf", "-1", "1e999", "9" * 40, "\x7f", "true", "1,2,x", "../..", "'", "\\", "$(x)", "0x10", "\u00e9", b"\xff\xfe", "{}", "-"]
    kind = trial.random.randrange(3)
    if kind == 0:  # a key that does not exist
        key = list(trial.random.choice(keys))
        key[trial.random.randrange(len(key))] = trial.random.choice("abcxyz._-")
        return ["--" + "".join(key), "1"], "".join(key) not in keys
    value = trial.random.choice(values)
    if kind == 1:
        return ["--" + trial.random.choice(keys), value], False
    path = trial.folder / "fuzz.toml"
    text = f"[train]\nsteps = {trial.random.choice(['nan', '1e999', '[', '99999999999999999999', 'true', '[1,2]', chr(34)])}\n"
    path.write_bytes(text.encode() + (value if isinstance(value, bytes) else value.encode()))
    return ["--config", path], True


@case
def d10(trial):
    """Wrong keys, values and configuration files.

    One line that names the key, exit code 2, within 0.5 s; no rank is started."""
    printed = trial.call(trial.lockstep, "train", "--data", trial.data, "--print-config").out
    section, keys = "", []
    for line in printed.splitlines():
        words = line.strip()
        if words.startswith("["):
            section = words.split("]")[0][1:]
        elif "=" in words and not words.startswith("#"):
            keys.append(f"{section}.{words.split('=')[0].strip()}" if section else words.split("=")[0].strip())
    trial.require(len(keys) > 50, f"{len(keys)} keys in {printed[:200]}")
    worst = (0.0, [])
    for number in range(trial.count(200, 100_000)):
        words, must_fail = fuzzed(trial, keys)
        start = time.monotonic()
        done = subprocess.run([os.fsencode(word) for word in (trial.lockstep, "train", "-n", "2", "--data", trial.data, *words, "--print-config")],
                              capture_output=True, cwd=trial.folder, timeout=30, check=False)
        worst = max(worst, (time.monotonic() - start, [str(word) for word in words]))
        error = done.stderr.decode(errors="replace").strip()
        trial.require(done.returncode in (0, 1, 2), f"{words}: exit code {done.returncode}: {error[-200:]}")
        trial.require(not must_fail or done.returncode == 2, f"{words}: exit code {done.returncode}")
        trial.require(done.returncode == 0 or error.count("\n") <= 2, f"{words}: {error[-300:]}")
        trial.seen(code=done.returncode)
    trial.notes.append(f"{number + 1} inputs, the slowest, {worst[1]}, took {worst[0]:.2f} s")
    trial.within(worst[0], 0.5, "the slowest ended")
    trial.gtest("config_tests", "SchemaTest.*:TrainArguments.RefusesBadFlags")


@case
def d11(trial):
    """A rank that SIGKILL does not end (frozen in a cgroup).

    The launcher ends within its grace and 2 s, and names the rank."""
    with trial.cgroup("freezer") as group:
        job = trial.start(trial.lockstep, "run", "-n", 2, "--stop-grace", 1000, "sleep", 1000)
        pids = trial.ranks(2)
        (group / "cgroup.procs").write_text(str(pids[1]))
        (group / "freezer.state").write_text("FROZEN")
        job.process.send_signal(signal.SIGTERM)
        moment = time.monotonic()
        try:
            trial.finish(job, seconds=10, since=moment)
            trial.says(job, "unkillable", seconds=1, rank=1, pid=pids[1])
            trial.within(trial.end, 3.0, "the launcher ended")
        finally:
            (group / "freezer.state").write_text("THAWED")
            with contextlib.suppress(Failure):
                trial.until(lambda: not is_alive(pids[1]), "", 5)


@case
def d12(trial):
    """Jobs that are killed at any moment, one after another.

    Nothing is left."""
    for number in range(trial.count(15, 1000)):
        job = trial.train(2, f"run{number}")
        time.sleep(trial.random.random() * 2)  # any moment
        victim = trial.random.choice(["launcher", 0, 1])
        pid = job.process.pid
        if victim != "launcher":
            with contextlib.suppress(Failure):
                pid = trial.ranks(2)[victim]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        trial.finish(job, seconds=20)
        trial.until(lambda: not [words for words in map(words_of, os.listdir("/proc")) if "lockstep" in words], "processes are left", 10)
    trial.notes.append(f"{number + 1} jobs")


def words_of(name):
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc", name, "cmdline").read_text(errors="replace") if name.isdigit() and int(name) != os.getpid() else ""
    return ""


@case
def d13(trial):
    """Each kind of failure.

    Its exit code is the one that docs/launcher.md promises."""
    run = [trial.lockstep, "run", "-n", 2]
    train = [trial.lockstep, "train", "-n", 2]
    table = [
        (0, [*run, "true"]),
        (7, [*run, "sh", "-c", "[ $RANK = 0 ] || exit 7"]),
        (93, [*run, "--max-restarts", 3, "sh", "-c", "exit 93"]),
        (78, [*run, "--max-restarts", 3, "sh", "-c", "exit 78"]),
        (137, [*run, "sh", "-c", "kill -9 $$"]),
        (139, [*run, "sh", "-c", "kill -SEGV $$"]),
        (127, [*run, "/no/such/program"]),
        (2, [trial.lockstep, "run", "-n", 0, "true"]),
        (2, [trial.lockstep, "train", "--no.such.key", 1]),
        (2, [*train, "--data", "/no/such/file"]),
        (0, [*train, *trial.options(steps=2)]),
    ]
    wrong = []
    for code, words in table:
        job = trial.start(*words)
        trial.finish(job)
        if job.code != code:
            wrong.append(f"{' '.join(map(str, words[1:6]))}: {job.code}, not {code}")
    trial.notes.append(f"{len(table)} kinds")
    trial.require(not wrong, "; ".join(wrong))
    trial.gtest("launch_tests", "Launcher.ReturnsTheCode*:Launcher.SomeCodes*:Launcher.ACodeThatForbids*:LauncherEnd.RanksMaySave*")
    trial.gtest("train_tests", "Train.DataThatChangesEndsTheRunAndIsRefusedAfterwards:Train.ASignalSavesAndExits75")
