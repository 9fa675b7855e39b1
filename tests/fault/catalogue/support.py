# SPDX-License-Identifier: Apache-2.0
"""What the cases of the catalogue share: how a case is declared, a small training job, what programs must say, and the leak oracle."""
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(SOURCE / "tests" / "cluster"))
import hosts  # noqa: E402

# What programs must say, by facts and loosely, because wording changes. {rank} and {pid} are filled in.
PATTERNS = {
    "dead": r"rank {rank}\b[^\n]*pid {pid}\b[^\n]*(SIG|signal|code)",
    "gone": r"rank {rank}\b[^\n]*(lost|died|SIGKILL|signal 9)|lost[^\n]*rank {rank}\b",
    "stopped": r"rank {rank}\b[^\n]*pid {pid}\b[^\n]*stopped",
    "late": r"rank {rank} is late|waited [^\n]*\bfor ranks? (\d+, )*{rank}\b",
    "stacks": r"#\d+ +0x|#\d+ |\bstack\b",
    "lost": r"rank {rank}\b[^\n]*lost|lost[^\n]*\b(rank|node) {rank}\b|node {rank}\b[^\n]*lost",
    "no progress": r"(without|no) progress|restart",
    "not finite": r"rank {rank}\b[^\n]*(nan|finite)|(nan|finite)[^\n]*rank {rank}\b",
    "spike": r"step {step}\b[^\n]*spike|spike[^\n]*step {step}\b",
    "corrupt": r"rank {rank}\b[^\n]*(differ|corrupt|disagree|bits|agree)|(differ|corrupt|disagree|bits|agree)[^\n]*rank {rank}\b",
    "thrown": r"\[rank{rank}\]|rank {rank} \(pid",
    "out of memory": r"rank {rank}\b[^\n]*(out of memory|OOM|memory limit)|(out of memory|OOM|memory limit)[^\n]*rank {rank}\b",
    "unkillable": r"rank {rank}\b[^\n]*(pid {pid}\b|still|does not end|cannot)",
}
CASES = {}


class Failure(Exception):
    """What must be seen was not seen."""


def case(function):
    """Declares a case, a function that takes a Trial and raises Failure. Its docstring says what is injected, then what must be seen."""
    inject, expect = (" ".join(part.split()).rstrip(".") for part in function.__doc__.split("\n\n"))
    CASES[function.__name__.upper()] = (inject, expect, function)
    return function


def processes():
    """The state of every process of these namespaces: pid -> (state, parent, command line)."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found[int(path.name)] = (state, int(parent), words)
    return found


def variables_of(pid):
    with contextlib.suppress(OSError):
        text = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
    return {}


def name_of(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def is_alive(pid):
    return processes().get(pid, ("Z", 0, ""))[0] != "Z"


def listening():
    out = subprocess.run(["ss", "-Hltn"], check=True, capture_output=True, text=True).stdout
    return sorted(line.split()[3] for line in out.splitlines())


def left_behind(folder):
    """The leak oracle: everything that a case has no business to leave. The namespaces have nothing else in them."""
    found = []
    for pid, (state, parent, words) in processes().items():
        if pid == os.getpid():
            continue
        if state == "Z" and parent == os.getpid():  # an orphan: this process is the init of the namespace
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            continue
        found.append(f"{'zombie' if state == 'Z' else 'process'} {pid} {words}")
    found += [f"port {place}" for place in listening()]
    found += [str(path) for path in pathlib.Path("/dev/shm").iterdir()]
    found += [str(path) for path in pathlib.Path(folder, "tmp").iterdir()]
    return found + [str(path) for path in pathlib.Path("/tmp").glob("*") if private_tmp() and path != pathlib.Path(folder).parent]


def private_tmp():
    return os.environ.get("LOCKSTEP_CATALOGUE_TMP") == "1"


class Trial:
    """One case as it runs: its folder, its programs, and what it has measured."""

    def __init__(self, programs, folder, everything, patience):
        self.bin, self.folder, self.all, self.patience = programs, folder, everything, patience
        self.lockstep = programs / "lockstep"
        self.detect = self.end = self.code = None
        self.notes, self.late = [], []
        self.random = random.Random(1)
        (folder / "tmp").mkdir(parents=True)
        self.data = folder / "text.txt"
        self.data.write_text("".join(f"int f{i * i % 97}(int x) {{ return x + {i % 13}; }}\n" for i in range(400)))

    def count(self, one, full):
        return full if self.all else one

    # ---- judging ----

    def require(self, condition, what):
        if not condition:
            raise Failure(what() if callable(what) else what)

    def seen(self, detect=None, end=None, code=None):
        """The worst of several injections counts."""
        if detect is not None:
            self.detect = max(self.detect or 0, detect)
        if end is not None:
            self.end = max(self.end or 0, end)
        if code is not None:
            self.code = code

    def within(self, seconds, limit, what):
        """What comes too late fails the case, which is carried on nevertheless."""
        if seconds > limit * self.patience:
            self.late.append(f"{what} after {seconds:.2f} s; the limit is {limit} s")

    def until(self, condition, what, seconds=60):
        """Waits for what must come; how long that took."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > seconds:
                raise Failure(f"{what() if callable(what) else what}, after {seconds} s")
            time.sleep(0.002)
        return time.monotonic() - start

    def says(self, job, pattern, seconds=10, **facts):
        """Waits until the job has said it, on either stream; how long that took."""
        text = PATTERNS[pattern].format(**facts)

        def said():
            ended = job.process.poll() is not None
            found = re.search(text, job.err + job.out, re.IGNORECASE)
            self.require(found or not ended, lambda: f"not said: {pattern} {facts}; said: {tail(job)}")
            return found
        return self.until(said, lambda: f"not said: {pattern} {facts}; said: {tail(job)}", seconds)

    # ---- programs ----

    def start(self, *argv, cwd=None, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp"), **{k: str(v) for k, v in variables.items()}}
        before = os.getcwd()
        os.chdir(cwd or self.folder)
        try:
            return hosts.Process([str(word) for word in argv], environment, self.folder)
        finally:
            os.chdir(before)

    def finish(self, job, code=None, seconds=60, since=None, measured=True):
        """The job ends, with one of these codes if some are given; how long that took. What only helps a case is not measured."""
        start = since or time.monotonic()
        try:
            job.code = job.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
            raise Failure(f"still running after {seconds} s: {tail(job)}") from None
        taken = time.monotonic() - start
        if measured:
            self.seen(end=taken, code=job.code)
        if code is not None:
            codes = code if isinstance(code, tuple) else (code, )
            self.require(job.code in codes, lambda: f"exit code {job.code}, not {code}: {tail(job)}")
        return taken

    def call(self, *argv, code=0, seconds=60, **variables):
        job = self.start(*argv, **variables)
        self.finish(job, code, seconds, measured=False)
        return job

    def gtest(self, program, pattern, seconds=300):
        """A test of the suite that injects this case."""
        # Programs shorten paths below their folder, which tests do not expect.
        job = self.start(self.bin / program, f"--gtest_filter={pattern}", cwd=self.bin, **({"LOCKSTEP_TEST_ALL": 1} if self.all else {}))
        taken = self.finish(job, seconds=seconds, measured=False)
        ran = re.search(r"Running (\d+) test", job.out)
        self.require(ran and int(ran[1]) > 0, f"{program} has no test {pattern}")
        self.require(job.code == 0, lambda: f"{program} {pattern}: " + "; ".join(re.findall(r": Failure\n((?:.*\n){1,4})", job.out)[:2])[-500:])
        self.notes.append(f"{program}: {ran[1]} tests in {taken:.0f} s")

    def script(self, path, *arguments, seconds=600):
        """A test of the suite that makes namespaces of its own."""
        self.require((SOURCE / path).exists(), f"{path} is missing")
        environment = {key: value for key, value in os.environ.items() if key != hosts.INSIDE}
        job = hosts.Process([sys.executable, str(SOURCE / path), str(self.bin), *map(str, arguments)], environment, self.folder)
        self.finish(job, 0, seconds, measured=False)
        self.notes += [line for line in job.out.splitlines() if " s" in line or "of" in line][-4:]

    def selftest(self, backend):
        """Every way in which ranks can disagree; one run is enough for all cases that need it."""
        if backend not in Trial.selftests:
            job = self.start(self.lockstep, "selftest", "-n", 3, "--backend", backend)
            self.finish(job, seconds=200, measured=False)
            Trial.selftests[backend] = (job.code, tail(job))
        code, said = Trial.selftests[backend]
        self.require(code == 0, f"selftest {backend}: {said}")
        self.notes.append(f"selftest {backend}")

    selftests = {}

    # ---- a small training job ----

    def options(self, name="run", steps=10_000_000, **more):
        words = {
            "data.path": self.data, "model.layers": 1, "model.hidden": 32, "model.heads": 2, "train.seq_len": 16, "train.micro_batch": 1,
            "train.steps": steps, "train.log_every": 1000, "comm.timeout": 60, "run.dir": self.folder / name, "metrics.file": self.metrics(name),
            "checkpoint.every": 20
        }
        words.update({key.replace("__", "."): value for key, value in more.items()})
        return [str(word) for key, value in words.items() if value is not None for word in (f"--{key}", value)]

    def train(self, ranks=3, name="run", steps=10_000_000, variables=None, before=(), **more):
        return self.start(*before, self.lockstep, "train", "-n", ranks, *self.options(name, steps, **more), **(variables or {}))

    def metrics(self, name="run"):
        return self.folder / f"{name}.jsonl"

    def last_step(self, name="run"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            return json.loads(self.metrics(name).read_text().splitlines()[-1]).get("step", 0)
        return 0

    def steps(self, job, least=3, name="run", seconds=60):
        """Waits until the job has made so many steps."""
        def come():
            self.require(job.process.poll() is None or self.last_step(name) >= least,
                         lambda: f"ended with code {job.process.returncode} before step {least}: {tail(job)}")
            return self.last_step(name) >= least
        self.until(come, lambda: f"no step {least}: {tail(job)}", seconds)

    def ranks(self, count):
        """rank -> pid: processes that have a rank, and whose parent has none."""
        found = {}

        def look():
            found.clear()
            for pid, (state, parent, _) in processes().items():
                if state == "Z":  # of a job that has ended
                    continue
                # A copy of the fork server has the server's environment in /proc, and a name of its own.
                copy = re.fullmatch(r"lockstep-r(\d+)", name_of(pid))
                rank = variables_of(pid).get("RANK")
                if copy:
                    found[int(copy.group(1))] = pid
                elif rank is not None and "RANK" not in variables_of(parent) and "LOCKSTEP_FORK_SERVER" not in variables_of(pid):
                    found[int(rank)] = pid
            return len(found) == count
        self.until(look, lambda: f"{len(found)} of {count} ranks", 30)
        return dict(found)

    def stop(self, job, code=75, seconds=60):
        """Asks the job to stop: it saves, and its checkpoint is sound."""
        job.process.send_signal(signal.SIGTERM)
        taken = self.finish(job, code, seconds, measured=False)
        self.seen(code=job.code)
        return taken

    def verify(self, name="run"):
        """The newest checkpoint loads, and its checksums are right."""
        self.call(self.lockstep, "checkpoint", "verify", self.folder / name / "checkpoints")

    @contextlib.contextmanager
    def cgroup(self, controller, **files):
        """A group of processes of cgroup v1 with these limits."""
        path = pathlib.Path("/sys/fs/cgroup", controller, f"lockstep-{os.getpid()}-{time.monotonic_ns()}")
        try:
            path.mkdir()
        except OSError as failure:
            raise Failure(f"no cgroup v1 here: {failure}") from None
        try:
            for name, value in files.items():
                (path / f"{controller}.{name}").write_text(str(value))
            yield path
        finally:
            with contextlib.suppress(OSError):
                (path / "freezer.state").write_text("THAWED")
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    path.rmdir()
                    break
                time.sleep(0.02)


def inside(group):
    """Words before a command that put it into a cgroup."""
    return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]


def tail(job):
    return (job.err.strip() or job.out.strip())[-400:].replace("\n", " | ")


def run(name, programs, folder, everything, patience):
    """Injects one case: a row of the table."""
    inject, expect, function = CASES[name]
    trial = Trial(programs, folder, everything, patience)
    start = time.monotonic()
    before = left_behind(folder)
    try:
        if before:
            raise Failure(f"something was there before: {before[:3]}")
        function(trial)
        error = "; ".join(trial.late)
    except Failure as failure:
        error = "; ".join([*trial.late, str(failure)])
    except Exception as failure:  # a case must not end those after it
        error = "; ".join([*trial.late, repr(failure)])
    # What a failed case has left is ended here, so that the next case begins with nothing.
    deadline = time.monotonic() + (5 if not error else 0.5)
    while (left := left_behind(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left and not error:
        error = f"left behind: {left[:3]}"
    for pid in set(processes()) - {os.getpid()}:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    while [words for words in left_behind(folder) if words.startswith(("process", "zombie"))]:
        time.sleep(0.02)
    shutil.rmtree(folder)
    (folder / "tmp").mkdir(parents=True)  # where the oracle looks
    for path in map(pathlib.Path, left_behind(folder)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder)
    return {"case": name, "inject": inject, "expect": expect, "detect": trial.detect, "end": trial.end, "code": trial.code,
            "note": "; ".join(dict.fromkeys([error] * bool(error) + trial.notes)), "passed": not error, "seconds": time.monotonic() - start}
