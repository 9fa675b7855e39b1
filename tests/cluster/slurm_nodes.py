#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains under a real Slurm of three nodes, which are simulated hosts, and stops, requeues, cancels and breaks its jobs.

Not part of `make test`: it must run as root, takes about eight minutes, and needs the Debian packages slurm-wlm and munge, which
tests/cluster/slurm.sh --install installs. h0 has the controller and is where users log in; h1, h2 and h3 are nodes.

usage: slurm_nodes.py FOLDER_OF_PROGRAMS [unittest's arguments]
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import hosts

SOURCE = pathlib.Path(__file__).resolve().parents[2]
NODES = ["h1", "h2", "h3"]
# SlurmdTimeout: after how long a silent node is down. cred_expire: how long a requeued job waits, which is two minutes by default.
CONF = """
ClusterName=nodes
SlurmctldHost=h0(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
MessageTimeout=5
KillWait=10
SchedulerParameters=sched_interval=1,batch_sched_delay=1
{nodes}
PartitionName=all Nodes=h[1-3] Default=YES MaxTime=INFINITE State=UP
"""
CONFIG = """
[data]
path = "{folder}/text.txt"
[model]
layers = 1
hidden = 32
heads = 2
[train]
seq_len = 16
micro_batch = 1
steps = 10_000_000
log_every = 20
"""


def documented_script():
    """The batch script of docs/launcher.md, with 2 ranks on each node, and a time limit that comes soon."""
    (text, ) = re.findall(r"^```bash\n(.*?)^```", (SOURCE / "docs" / "launcher.md").read_text(), re.DOTALL | re.MULTILINE)
    for old, new in (("--ntasks-per-node=8", "--ntasks-per-node=2"), ("--time=24:00:00", "--time=2"), ("=TERM@120", "=TERM@60"),
                     ("--checkpoint.every 500", "--checkpoint.every 200")):
        assert old in text, f"{old} is not in {text}"
        text = text.replace(old, new)
    return text


class Slurm(hosts.HostsTest):
    HOSTS = 4

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(cls.hosts.folder)
        for name in ("munge", "state", "work"):
            (cls.folder / name).mkdir(mode=0o700)
        key = cls.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        shape = " ".join(re.findall(r"\b(?:CPUs|Boards|SocketsPerBoard|CoresPerSocket|ThreadsPerCore)=\d+",
                                    subprocess.run(["slurmd", "-C"], check=True, capture_output=True, text=True).stdout))
        # Host h1 has the second address, and so on.
        nodes = "\n".join(f"NodeName={name} NodeAddr=10.77.0.{number} {shape} State=UNKNOWN" for number, name in enumerate(NODES, 2))
        conf = cls.folder / "slurm.conf"
        conf.write_text(CONF.format(folder=cls.folder, nodes=nodes))
        # A host has a /sys of its own, in which slurmd does not find which version of cgroups to use.
        (cls.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        os.environ["SLURM_CONF"] = str(conf)
        os.environ["PATH"] = f"{cls.BIN}:{os.environ['PATH']}"
        cls.daemons = {}
        cls.daemons["munged"] = cls.hosts.start(
            "h0", "munged", "--foreground", "--force", "--key-file", key, "--socket", cls.folder / "munge.socket", "--pid-file",
            cls.folder / "munge" / "pid", "--seed-file", cls.folder / "munge" / "seed", "--log-file", cls.folder / "munge" / "log")
        cls.until(lambda: (cls.folder / "munge.socket").exists(), "munged does not start")
        cls.daemons["slurmctld"] = cls.hosts.start("h0", "slurmctld", "-D", "-c")
        for name in NODES:
            cls.start_node(name)
        cls.until(lambda: cls.states() == ["idle"] * 3, lambda: f"{cls.states()}: {cls.logs()}")
        (cls.folder / "text.txt").write_text("".join(f"int f{i * i % 97}(int x) {{ return x + {i % 13}; }}\n" for i in range(400)))
        cls.work = cls.folder / "work"
        (cls.work / "train.toml").write_text(CONFIG.format(folder=cls.folder))

    @classmethod
    def tearDownClass(cls):
        cls.slurm("scancel", "--user", "root")
        cls.until(lambda: not cls.slurm("squeue", "-h"), "jobs remain")
        for daemon in reversed(cls.daemons.values()):
            os.killpg(daemon.process.pid, signal.SIGTERM)
            daemon.process.wait(60)
        super().tearDownClass()

    @classmethod
    def until(cls, condition, what, seconds=90):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(what() if callable(what) else what)
            time.sleep(0.1)

    @classmethod
    def slurm(cls, *words):
        """A command of Slurm on the login node: what it prints."""
        return cls.hosts.start("h0", *words).wait().out.strip()

    @classmethod
    def start_node(cls, name):
        cls.daemons[name] = cls.hosts.start(name, "slurmd", "-D", "-N", name)

    @classmethod
    def states(cls):
        return cls.slurm("sinfo", "-h", "-N", "-o", "%T").split()

    @classmethod
    def logs(cls):
        return "\n".join(f"{path}: {path.read_text()[-2000:]}" for path in cls.folder.glob("slurm*.log"))

    # ---- what a test begins and ends with ----

    def setUp(self):
        self.before = self.found()
        self.first = time.monotonic()

    def tearDown(self):
        self.slurm("scancel", "--user", "root")
        self.until(lambda: not self.slurm("squeue", "-h") and self.states() == ["idle"] * 3, lambda: f"{self.states()} {self.slurm('squeue')}")

    def found(self):
        """Processes, files in shared memory, and ports that are listened on."""
        ports = [f"{name} {line.split()[3]}" for name in self.hosts.names for line in subprocess.run(
            ["ip", "netns", "exec", name, "ss", "-Hltn"], check=True, capture_output=True, text=True).stdout.splitlines()]
        return {*hosts.processes().values(), *map(str, pathlib.Path("/dev/shm").iterdir()), *ports}

    def nothing_is_left(self):
        self.until(lambda: not self.slurm("squeue", "-h"), lambda: self.slurm("squeue"))
        self.until(lambda: not self.found() - self.before, lambda: f"left: {self.found() - self.before}", 30)

    def say(self, text):
        print(f"{self.id().rsplit('.', 1)[1]}: {text} ({time.monotonic() - self.first:.0f} s)", flush=True)

    def batch(self, text, *options, name="job", arguments=()):
        """Hands in a script; its number and its log."""
        script, log = self.work / f"{name}.sh", self.work / f"{name}.out"
        script.write_text(text)
        log.unlink(missing_ok=True)
        job = self.slurm("sbatch", "--parsable", "--chdir", self.work, "--output", log, *options, script, *arguments)
        self.assertRegex(job, r"^\d+$", self.logs())
        shutil.rmtree(self.work / "runs", ignore_errors=True)
        return job, log

    def reads(self, log, pattern, count=1, seconds=150):
        """Waits until the log has so many lines of the pattern; the last of them."""
        def lines():
            return re.findall(rf"^.*(?:{pattern}).*$", log.read_text(errors="replace"), re.MULTILINE) if log.exists() else []
        self.until(lambda: len(lines()) >= count, lambda: f"'{pattern}' is not in {log}: {log.read_text() if log.exists() else ''}\n"
                   f"{self.slurm('squeue')}", seconds)
        return lines()[-1]

    def resumes(self, log, least=0):
        """A job that was queued again continues from the step that it has saved."""
        line = self.reads(log, r"resume .*step")
        step = int(re.search(r"step[ -]0*(\d+)", line)[1])
        self.assertGreater(step, least)
        last = step // 20 * 20 + 40
        self.reads(log, rf"step +{last}/")
        return step

    def state(self, job):
        return re.search(r"JobState=(\S+)", self.slurm("scontrol", "show", "job", job))[1]

    # ---- tests ----

    def test_steps_on_two_nodes(self):
        """Ranks of srun, and ranks of lockstep run under srun."""
        train = ["lockstep", "train", "--config", "train.toml", "--train.steps", 5, "--run.dir", "", "--checkpoint.dir", ""]
        launcher = 'exec lockstep run -n 2 --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rendezvous h1:29400 "$@"'
        for ranks, words in ((2, train), (1, ["sh", "-c", launcher, "sh", *train])):
            job = self.hosts.start("h0", "srun", "-D", self.work, "-w", "h1,h2", "-N", 2, f"--ntasks-per-node={ranks}", *words,
                                   LOCKSTEP_TOKEN="a secret")
            self.finish(job)
            self.assertRegex(job.out, r"4 ranks \(.*gloo")
            self.assertIn("5/5", job.out)
        self.nothing_is_left()
        self.say("4 ranks on 2 nodes train under srun, and under lockstep run under srun")

    def test_the_time_limit_of_a_job(self):
        """Slurm's signal comes before the time limit: the ranks save, the job is queued again and resumes."""
        job, log = self.batch(documented_script())
        saved = self.reads(log, "stopped at step")
        step = int(re.search(r"step (\d+)", saved)[1])
        self.say(f"stopped at step {step} by Slurm's signal")
        self.assertEqual(self.resumes(log, 20), step)
        self.assertIn("Restarts=1", self.slurm("scontrol", "show", "job", job))
        self.say(f"queued again, resumed at step {step}")
        self.slurm("scancel", job)
        self.nothing_is_left()

    def test_signals_to_a_step(self):
        """Each signal that a user may choose for --signal."""
        for name in ("TERM", "INT", "USR1", "HUP"):
            with self.subTest(name):
                job, log = self.batch(documented_script(), "--time", 30, "--signal", f"{name}@60", name=name)
                self.reads(log, "step +40/")
                self.slurm("scancel", f"--signal={name}", job)
                try:
                    self.reads(log, "stopped at step", seconds=30)
                    self.say(f"SIG{name}: saved, then resumed at step {self.resumes(log, 20)}")
                finally:
                    self.slurm("scancel", job)
                    self.nothing_is_left()

    def test_the_example(self):
        """examples/slurm.sbatch on two nodes: requeued after SIGUSR1 to the script; scancel ends it for good."""
        job, log = self.batch((SOURCE / "examples" / "slurm.sbatch").read_text(), "--gpus-per-node", 0, "--export", "ALL,RANKS=2",
                              name="example", arguments=["train.toml"])
        self.reads(log, "step +40/")
        self.slurm("scancel", "--batch", "--signal=USR1", job)
        self.reads(log, "is queued again")
        step = self.resumes(log, 20)
        self.slurm("scancel", job)
        self.nothing_is_left()
        self.assertEqual(self.state(job), "CANCELLED")
        self.say(f"queued again, resumed at step {step}, then cancelled")

    def test_scancel(self):
        """The ranks save, and the job is not queued again."""
        job, log = self.batch(documented_script(), name="cancelled")
        self.reads(log, "step +40/")
        start = time.monotonic()
        self.slurm("scancel", job)
        self.nothing_is_left()
        self.assertEqual(self.state(job), "CANCELLED")
        self.assertIn("stopped at step", log.read_text())
        self.say(f"everything ended {time.monotonic() - start:.1f} s after scancel")

    def test_the_time_limit_of_a_step(self):
        """srun --time: the ranks get SIGTERM and save."""
        job = self.hosts.start("h0", "srun", "-D", self.work, "--time", 1, "-N", 2, "--ntasks-per-node=2", "lockstep", "train",
                               "--config", "train.toml", "--run.dir", "runs/limit", LOCKSTEP_TOKEN="a secret")
        self.finish(job, code=None, seconds=200)
        self.assertIn("stopped at step", job.out, job.describe())
        self.assertTrue(list((self.work / "runs" / "limit" / "checkpoints").glob("step-*")))
        self.nothing_is_left()
        self.say(f"srun ended with code {job.code}, {job.err.strip().splitlines()[-1]!r}")

    def test_a_node_that_fails(self):
        """Its processes are killed and its cable is pulled: Slurm takes it for down, and the job resumes on the nodes that remain."""
        job, log = self.batch(documented_script(), "--time", 30, name="failed")
        self.reads(log, "step-0*200")
        victim = self.slurm("scontrol", "show", "hostnames", self.slurm("squeue", "-h", "-j", job, "-o", "%N")).split()[1]
        start = time.monotonic()
        self.hosts.cut(victim)
        for pid in self.hosts.pids(victim):
            os.kill(pid, signal.SIGKILL)
        self.daemons[victim].process.wait()
        try:
            named = self.reads(log, r"rank [23]\b.*lost|lost.*ranks? [23]\b|for ranks? [23]\b|rank [23] reported last")
            self.say(f"after {time.monotonic() - start:.1f} s: {named}")
            self.until(lambda: "down" in " ".join(self.states()), f"{victim} is not down")
            self.say(f"down after {time.monotonic() - start:.1f} s")
            step = self.resumes(log, 199)
            self.say(f"resumed at step {step} on {self.slurm('squeue', '-h', '-j', job, '-o', '%N')} after {time.monotonic() - start:.1f} s")
        finally:
            self.slurm("scancel", job)
            self.hosts.plug(victim)
            self.start_node(victim)
            self.until(lambda: self.states() == ["idle"] * 3, lambda: f"{self.states()}: {self.logs()}")
        self.nothing_is_left()


if __name__ == "__main__":
    if os.getuid() != 0:
        sys.exit("slurm_nodes.py: slurmd starts steps as their users, so it must run as root")
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if not shutil.which(name)]
    if missing:
        sys.exit(f"slurm_nodes.py: {', '.join(missing)} missing; tests/cluster/slurm.sh --install installs slurm-wlm and munge")
    hosts.run_tests()
