#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Simulated hosts: network namespaces on one switch, each with a name, an IPv4 and an IPv6 address of its own.

Everything lives in namespaces of this process and its children, so it ends with them, however they end, and nothing outside is
touched. A user who may make user namespaces needs no root.

usage: hosts.py --check                        status 0 where such hosts can be made, else says why not
       hosts.py [-H HOSTS] [-n RANKS] [--rate RATE] LOCKSTEP PROGRAM [ARGS...]
                                               lockstep run of PROGRAM on all of them, RANKS on each; RATE as tc takes it (1gbit)
"""
import argparse
import itertools
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

INSIDE = "LOCKSTEP_TEST_HOSTS"
NAMESPACES = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Enters the host named by the first word; the network alone does not make a host: it needs a name of its own.
ENTER = 'ip netns exec "$0" unshare --uts sh -c \'hostname "$0"; exec "$@"\' "$0" "$@"'
# Lockstep's rendezvous needs a port that all know; namespaces of our own have them all free.
PORT = 29400
# What the build has found: mpirun, and a python3 whose torch is the one that Lockstep is built with. Empty where there is none, and then
# no test needs it.
MPIRUN = os.environ.get("LOCKSTEP_MPIRUN", "")
TORCHRUN_PYTHON = os.environ.get("LOCKSTEP_TORCHRUN_PYTHON", "")


def call(*words):
    subprocess.run(words, check=True)


def unshare_words():
    """How to get namespaces here; or the reason why there are none."""
    reasons = []
    for user in ([], ["--user", "--map-root-user"]):
        words = ["unshare", *user, *NAMESPACES]
        probe = "mount -t tmpfs tmpfs /run && ip netns add probe && ip link add probe0 type veth peer name probe1 netns probe"
        try:
            done = subprocess.run([*words, "sh", "-c", probe], capture_output=True, text=True, timeout=30)
        except OSError as failure:
            return None, str(failure)
        if done.returncode == 0:
            return words, ""
        reasons.append((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return None, "; ".join(reasons)


def enter():
    """Starts this program again inside namespaces of its own, unless it is there."""
    if INSIDE in os.environ:
        for path in ("/run", "/dev/shm"):  # ours, so that what is left behind can be seen
            call("mount", "-t", "tmpfs", "tmpfs", path)
        call("ip", "link", "set", "lo", "up")
        return
    words, reason = unshare_words()
    if words is None:
        sys.exit(f"no network namespaces here: {reason}")
    os.environ[INSIDE] = "1"
    os.execvp(words[0], [*words, sys.executable, *sys.argv])


class Process:
    """A program on a host. Its output goes to files, so that nobody has to read while it runs."""

    def __init__(self, argv, environment, folder):
        self.argv = argv
        number = next(Process.count)
        self.files = [pathlib.Path(folder, f"{number}.{name}") for name in ("out", "err")]
        self.start = time.monotonic()
        with open(self.files[0], "wb") as out, open(self.files[1], "wb") as err:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True)

    count = itertools.count()

    @property
    def out(self):
        return self.files[0].read_text(errors="replace")

    @property
    def err(self):
        return self.files[1].read_text(errors="replace")

    def wait(self, seconds=60):
        try:
            self.code = self.process.wait(max(0.1, self.start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"still running after {seconds} s: {self.describe()}") from None
        self.seconds = time.monotonic() - self.start
        return self

    def describe(self):
        # First what says why: reports of failed tests cut the end.
        return f"--- err\n{self.err}\n--- out\n{self.out}\n--- {shlex.join(self.argv)}"


class Hosts:
    """h0, h1, ...: 10.77.0.1 and fd77::1 on eth0 are h0's, and so on. With `second`, eth1 with 10.78.0.1 and fd78::1."""

    def __init__(self, count, second=False, rate=None):
        self.folder = tempfile.mkdtemp(prefix="hosts")
        self.names = [f"h{index}" for index in range(count)]
        networks = {"eth0": ("10.77.0.", "fd77::")}
        if second:
            networks["eth1"] = ("10.78.0.", "fd78::")
        call("ip", "netns", "add", "switch")
        for interface in networks:
            call("ip", "-n", "switch", "link", "add", f"br-{interface}", "type", "bridge", "forward_delay", "0")
            call("ip", "-n", "switch", "link", "set", f"br-{interface}", "up")
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for number, name in enumerate(self.names, 1):
            call("ip", "netns", "add", name)
            call("ip", "-n", name, "link", "set", "lo", "up")
            for interface, (v4, v6) in networks.items():
                port = f"{name}-{interface}"
                call("ip", "-n", name, "link", "add", interface, "type", "veth", "peer", "name", port, "netns", "switch")
                call("ip", "-n", name, "address", "add", f"{v4}{number}/24", "dev", interface)
                call("ip", "-n", name, "address", "add", f"{v6}{number}/64", "dev", interface, "nodad")
                call("ip", "-n", name, "link", "set", interface, "up")
                call("ip", "-n", "switch", "link", "set", port, "master", f"br-{interface}", "up")
                if rate:
                    call("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate,
                         "burst", "256kb", "latency", "50ms")
            lines.append(f"{networks['eth0'][0]}{number} {name}")
            lines.append(f"{networks['eth0'][1]}{number} {name}-v6")
        # No name server is needed, and no file of the machine changes.
        self.names_file = pathlib.Path(self.folder, "names")
        self.names_file.write_text("\n".join(lines) + "\n")
        call("mount", "--bind", str(self.names_file), "/etc/hosts")
        self.agent = pathlib.Path(self.folder, "agent")
        self.agent.write_text(f"#!/bin/sh\nhost=$1; shift\nexec sh -c {shlex.quote(ENTER)} \"$host\" sh -c \"$*\"\n")
        self.agent.chmod(0o755)
        self.token_file = pathlib.Path(self.folder, "token")
        self.token_file.write_text("a secret of all hosts\n")
        self.token_file.chmod(0o600)

    def remove(self):
        for name in [*self.names, "switch"]:
            call("ip", "netns", "delete", name)
        call("umount", "/etc/hosts")
        shutil.rmtree(self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()

    def add_names(self, names):
        with open(self.names_file, "a", encoding="ascii") as file:
            file.writelines(f"{address} {name}\n" for name, address in names.items())

    def cut(self, name, interface="eth0"):
        """Unplugs the host's cable."""
        call("ip", "-n", "switch", "link", "set", f"{name}-{interface}", "down")

    def plug(self, name, interface="eth0"):
        """Puts the cable back."""
        call("ip", "-n", "switch", "link", "set", f"{name}-{interface}", "up")

    def pids(self, name):
        """The processes on a host, with their command lines."""
        found = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout.split()
        return {pid: words for pid, words in processes().items() if str(pid) in found}

    def connections(self, name):
        """How many have come to the rendezvous on this host."""
        found = subprocess.run(["ip", "netns", "exec", name, "ss", "-Htn", "state", "established", f"sport = :{PORT}"],
                               check=True, capture_output=True, text=True)
        return len(found.stdout.splitlines())

    def start(self, name, *argv, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": self.folder}
        for key, value in variables.items():
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = str(value)
        return Process(["sh", "-c", ENTER, name, *map(str, argv)], environment, self.folder)

    def lockstep_run(self, lockstep, ranks, argv, rendezvous=f"h0:{PORT}", options=(), names=None, nodes=None, **variables):
        """`lockstep run` on each host, as its users start it."""
        names = names or self.names
        return [
            self.start(name, lockstep, "run", "-n", ranks, "--nnodes", nodes or len(names), "--node-rank", node, "--rendezvous", rendezvous,
                       "--token-file", self.token_file, *options, *argv, **variables) for node, name in enumerate(names) if name
        ]

    def mpirun(self, ranks, argv, names=None, options=(), **variables):
        """mpirun on the first host, which starts its daemons on the others. All hosts share this machine's cores, which it cannot know."""
        names = names or self.names
        places = ",".join(f"{name}:{ranks}" for name in names)
        return self.start(names[0], MPIRUN, "--allow-run-as-root", "--bind-to", "none", "--host", places, "--mca",
                          "plm_rsh_agent", self.agent, "--mca", "mpi_yield_when_idle", 1, *options, *argv, **variables)


class HostsTest(unittest.TestCase):
    """Tests on hosts that all of a class share. What they leave behind is a failure."""
    HOSTS = 2
    SECOND = False  # a second network, eth1
    BIN = pathlib.Path(".")

    @classmethod
    def setUpClass(cls):
        cls.hosts = Hosts(cls.HOSTS, second=cls.SECOND)
        cls.lockstep = cls.BIN / "lockstep"

    @classmethod
    def tearDownClass(cls):
        def found():
            paths = [*pathlib.Path("/dev/shm").iterdir(), *pathlib.Path(cls.hosts.folder).glob("ompi.*/*")]
            return [*processes().values(), *map(str, paths)]

        deadline = time.monotonic() + 20  # mpirun's daemons end after it
        while (left := found()) and time.monotonic() < deadline:
            time.sleep(0.02)
        cls.hosts.remove()
        assert not left, f"left behind: {left}"

    def finish(self, *jobs, code=0, seconds=120):
        """All end in time, with this code; None: any that is not 0."""
        for job in jobs:
            job.wait(seconds)
        for job in jobs:
            if code is None:
                self.assertNotEqual(job.code, 0, job.describe())
            else:
                self.assertEqual(job.code, code, job.describe())
        return jobs

    def eventually(self, condition, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, what() if time.monotonic() > deadline else "")
            time.sleep(0.02)


def run_tests():
    """usage: SCRIPT FOLDER_OF_PROGRAMS [unittest's arguments]"""
    enter()
    HostsTest.BIN = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main(module="__main__", argv=sys.argv)


def processes():
    """Every process of these namespaces but this one, with its command line."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if int(path.name) != os.getpid() and state != "Z":
            found[int(path.name)] = words
    return found


def main():
    if sys.argv[1:] == ["--check"]:
        words, reason = unshare_words()
        sys.exit(0 if words else reason)
    parser = argparse.ArgumentParser(description="lockstep run over simulated hosts")
    parser.add_argument("-H", "--hosts", type=int, default=2)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rate")
    parser.add_argument("lockstep")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    enter()
    with Hosts(options.hosts, rate=options.rate) as hosts:
        jobs = hosts.lockstep_run(options.lockstep, options.ranks, options.program)
        for job in jobs:
            job.wait(3600)
            sys.stdout.write(job.out)
            sys.stderr.write(job.err)
    sys.exit(max(job.code for job in jobs))


if __name__ == "__main__":
    main()
