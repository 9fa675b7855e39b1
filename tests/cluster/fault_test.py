#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""While hosts train, a cable is pulled or a daemon of mpirun is killed: all of them end, and those that remain say who is lost. A cable
that is loose or slow ends nothing. usage: fault_test.py FOLDER_OF_PROGRAMS"""
import json
import os
import pathlib
import re
import shutil
import signal
import time

import hosts

# The connection to the rendezvous of a host that vanishes is given up after 10 to 11 s (TCP_USER_TIMEOUT and keep-alive), which is
# sooner than the deadline here.
DEADLINE = 60
# A rank of the host that was cut off, by its number.
NAMED = r"rank [23] is lost|for ranks? [23]|; rank [23] reported last"


class Fault(hosts.HostsTest):
    HOSTS = 4

    def tearDown(self):
        for name in self.hosts.names:
            self.hosts.plug(name)

    def train(self, name, steps=10_000_000):
        data = pathlib.Path(self.hosts.folder, "text.txt")
        data.write_text("some text to train on\n" * 1000)
        return [
            self.lockstep, "train", "--data.path", data, "--model.layers", 1, "--model.hidden", 32, "--model.heads", 2,
            "--train.seq_len", 16, "--train.micro_batch", 1, "--train.steps", steps, "--comm.timeout", DEADLINE,
            "--checkpoint.dir", "", "--run.dir", "", "--metrics.file", self.metrics(name)
        ]

    def metrics(self, name):
        return pathlib.Path(self.hosts.folder, f"{name}.jsonl")

    def wait_for_steps(self, name, jobs):
        self.eventually(lambda: self.metrics(name).exists() and '"step":3' in self.metrics(name).read_text(),
                        lambda: "\n".join(job.describe() for job in jobs))

    def test_a_cable_that_is_pulled(self):
        """Two jobs at a time, because most of it is waiting."""
        # On a busy machine ranks need longer than the usual grace to say which of them is lost.
        jobs = {"gloo": self.hosts.lockstep_run(self.lockstep, 2, self.train("gloo"), names=["h0", "h1"], options=["--grace", 5000])}
        if hosts.MPIRUN:
            # Open MPI's daemons give up a silent connection after five minutes unless told otherwise.
            patience = ["--mca", "oob_tcp_keepalive_time", 2, "--mca", "oob_tcp_keepalive_intvl", 1, "--mca", "oob_tcp_keepalive_probes", 3]
            jobs["mpi"] = [self.hosts.mpirun(2, self.train("mpi"), names=["h2", "h3"], options=patience)]
        for name, started in jobs.items():
            self.wait_for_steps(name, started)
        # A loaded machine has ranks that wait for others before the cut, too.
        said = {name: len(started[0].err) for name, started in jobs.items()}
        self.hosts.cut("h1")
        self.hosts.cut("h3")
        cut = time.monotonic()
        for started in jobs.values():
            self.assertIsNone(started[0].process.poll(), started[0].describe())
        named = dict.fromkeys(jobs)

        def all_named():
            for name, started in jobs.items():
                if named[name] is None and re.search(NAMED, started[0].err[said[name]:]):
                    named[name] = time.monotonic() - cut
            return all(named.values()) or all(job.process.poll() is not None for started in jobs.values() for job in started)
        self.eventually(all_named, lambda: "\n".join(started[0].describe() for started in jobs.values()))
        for name, started in jobs.items():
            self.finish(*started, code=None, seconds=120)
            self.assertIsNotNone(named[name], started[0].describe())
            print(f"{name}: named {named[name]:.1f} s after the cut", flush=True)
            print(f"{name}: ended {max(job.start + job.seconds for job in started) - cut:.1f} s after the cut", flush=True)
        # Also what launchers and mpirun's daemon had started beyond the cut.
        self.eventually(lambda: not hosts.processes(), hosts.processes)
        first, second = jobs["gloo"]
        self.assertRegex(first.err, "node 1 was lost|rank [01] on node 0")
        self.assertRegex(second.err, "node 0 was lost|rank [23] on node 1")

    def test_a_run_that_continues_without_a_host_and_with_it_again(self):
        """Its ranks cannot reach the others any more, and write no checkpoint. The others have copies of its shards in memory."""
        run = pathlib.Path(self.hosts.folder, "elastic")
        argv = [*self.train("elastic"), "--train.global_batch", 6, "--run.dir", run, "--checkpoint.dir", "auto", "--checkpoint.every", 5,
                "--checkpoint.resume", "auto", "--recovery", "memory", "--parallel.shard", "full"]

        def start(names):
            return self.hosts.lockstep_run(self.lockstep, 1, argv, names=names, nodes="2:3",
                                           options=["--max-restarts", 3, "--grow-after", 1, "--stop-grace", 60000])

        def describe():
            return "\n".join(job.describe() for job in jobs)

        def worlds():
            events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
            return [(event["from"], event["ranks"], event["lost"]) for event in events if event["event"] == "world"]
        jobs = first, second, third = start(["h0", "h1", "h2"])
        self.wait_for_steps("elastic", jobs)
        self.hosts.cut("h1")
        self.eventually(lambda: worlds() == [(3, 2, "node 1")], describe)
        self.finish(second, code=1)
        self.assertRegex(second.err, "node 0 was lost|rank")
        self.assertFalse(any("lockstep" in words for words in self.hosts.pids("h1").values()), second.describe())
        self.hosts.plug("h1")
        again, = start([None, "h1"])
        jobs += [again]
        self.eventually(lambda: len(worlds()) == 2, describe)
        self.assertEqual(worlds()[1], (2, 3, ""))
        self.eventually(lambda: first.out.count("memory at step") == 2, describe)
        steps = len(self.metrics("elastic").read_text().splitlines())
        self.eventually(lambda: len(self.metrics("elastic").read_text().splitlines()) > steps + 5, describe)
        launcher, = [pid for pid, words in self.hosts.pids("h0").items() if words.startswith(f"{self.lockstep} run ")]
        os.kill(launcher, signal.SIGTERM)
        self.finish(first, third, again, code=75)
        numbers = [json.loads(line)["step"] for line in self.metrics("elastic").read_text().splitlines() if '"loss"' in line]
        self.assertEqual(numbers, list(range(1, len(numbers) + 1)))

    def test_a_loose_cable(self):
        """Off for a moment, twice: TCP sends again, and nobody is lost."""
        jobs = self.hosts.lockstep_run(self.lockstep, 1, self.train("loose", 300), names=["h0", "h1"])
        self.wait_for_steps("loose", jobs)
        for seconds in (0.3, 0.8):
            self.hosts.cut("h1")
            time.sleep(seconds)  # what is tested: so long the cable is off
            self.assertIsNone(jobs[0].process.poll(), jobs[0].describe())
            self.hosts.plug("h1")
        self.finish(*jobs)
        self.assertIn('"step":300', self.metrics("loose").read_text())

    def test_a_slow_cable(self):
        """1 Mbit/s: steps take longer, and that is all."""
        slow = ["dev", "eth0", "root", "tbf", "rate", "1mbit", "burst", "32kb", "latency", "400ms"]
        hosts.call("tc", "-n", "h1", "qdisc", "add", *slow)
        try:
            jobs = self.hosts.lockstep_run(self.lockstep, 1, self.train("slow", 5), names=["h0", "h1"])
            self.finish(*jobs)
        finally:
            hosts.call("tc", "-n", "h1", "qdisc", "delete", "dev", "eth0", "root")
        self.assertIn('"step":5', self.metrics("slow").read_text())

    if hosts.MPIRUN:
        def remove_files_of_open_mpi(self):
            """Open MPI leaves files if it is killed: segments that are named after the host, and its session folders."""
            for path in pathlib.Path("/dev/shm").glob("vader_segment.*"):
                path.unlink()
            for path in pathlib.Path(self.hosts.folder).glob("ompi.*"):
                shutil.rmtree(path, ignore_errors=True)  # a daemon that ends removes them too

        def test_a_daemon_of_mpirun_that_is_killed(self):
            """The second host's, and mpirun itself: the ranks of both hosts end."""
            for number, victim in enumerate((os.path.basename(hosts.MPIRUN), "orted")):
                with self.subTest(victim):
                    job = self.hosts.mpirun(2, self.train(victim), names=["h0", "h1"])
                    self.wait_for_steps(victim, [job])
                    (pid, ) = [pid for pid, words in self.hosts.pids(f"h{number}").items()
                               if os.path.basename(words.split()[0]) == victim]
                    os.kill(pid, signal.SIGKILL)
                    killed = time.monotonic()
                    self.finish(job, code=None)
                    self.eventually(lambda: not any("lockstep" in words for words in hosts.processes().values()),
                                    lambda: f"left: {hosts.processes()}")
                    print(f"{victim}: ended {time.monotonic() - killed:.1f} s after the kill", flush=True)
                    self.remove_files_of_open_mpi()
                    if victim == "orted":  # what ranks say reaches the user through mpirun, if it lives
                        self.assertRegex(job.err, r"\bh1\b|ranks? [23]\b", job.describe())


if __name__ == "__main__":
    hosts.run_tests()
