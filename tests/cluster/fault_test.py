#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A cable is pulled while hosts train: all of them end, and those that remain say who is lost. usage: fault_test.py FOLDER_OF_PROGRAMS"""
import pathlib
import time

import hosts

# The connection to the rendezvous of a host that vanishes is given up after 10 to 11 s (TCP_USER_TIMEOUT and keep-alive), which is
# sooner than the deadline here.
DEADLINE = 60


class Fault(hosts.HostsTest):
    HOSTS = 4

    def train(self, name):
        data = pathlib.Path(self.hosts.folder, "text.txt")
        data.write_text("some text to train on\n" * 1000)
        return [
            self.lockstep, "train", "--data.path", data, "--model.layers", 1, "--model.hidden", 32, "--model.heads", 2,
            "--train.seq_len", 16, "--train.micro_batch", 1, "--train.steps", 10_000_000, "--comm.timeout", DEADLINE,
            "--checkpoint.dir", "", "--run.dir", "", "--metrics.file", self.metrics(name)
        ]

    def metrics(self, name):
        return pathlib.Path(self.hosts.folder, f"{name}.jsonl")

    def expect_named(self, job):
        """A rank of the host that was cut off, by its number."""
        self.assertRegex(job.err, r"rank [23] is lost|for ranks? [23]|; rank [23] reported last", job.describe())

    def test_a_cable_that_is_pulled(self):
        """Two jobs at a time, because most of it is waiting."""
        # On a busy machine ranks need longer than the usual grace to say which of them is lost.
        jobs = {"gloo": self.hosts.lockstep_run(self.lockstep, 2, self.train("gloo"), names=["h0", "h1"], options=["--grace", 5000])}
        if hosts.MPIRUN:
            # Open MPI's daemons give up a silent connection after five minutes unless told otherwise.
            patience = ["--mca", "oob_tcp_keepalive_time", 2, "--mca", "oob_tcp_keepalive_intvl", 1, "--mca", "oob_tcp_keepalive_probes", 3]
            jobs["mpi"] = [self.hosts.mpirun(2, self.train("mpi"), names=["h2", "h3"], options=patience)]
        for name, started in jobs.items():
            self.eventually(lambda: self.metrics(name).exists() and '"step":3' in self.metrics(name).read_text(),
                            lambda: "\n".join(job.describe() for job in started))
        self.hosts.cut("h1")
        self.hosts.cut("h3")
        cut = time.monotonic()
        for name, started in jobs.items():
            self.finish(*started, code=None, seconds=120)
            print(f"{name}: ended {max(job.start + job.seconds for job in started) - cut:.1f} s after the cut", flush=True)
            self.expect_named(started[0])
        # Also what launchers and mpirun's daemon had started beyond the cut.
        self.eventually(lambda: not hosts.processes(), hosts.processes)
        first, second = jobs["gloo"]
        self.assertRegex(first.err, "node 1 was lost|rank [01] on node 0")
        self.assertRegex(second.err, "node 0 was lost|rank [23] on node 1")


if __name__ == "__main__":
    hosts.run_tests()
