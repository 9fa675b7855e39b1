#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts come together whoever starts them, over the network that is meant. usage: launchers_test.py
FOLDER_OF_PROGRAMS"""
import json
import subprocess

import hosts
from hosts import PORT

MEGABYTE = 1_000_000


class Launchers(hosts.HostsTest):
    SECOND = True

    def setUp(self):
        self.program = self.BIN / "init_rank"

    def expect(self, jobs, backend, ranks=2):
        """Two hosts of so many ranks, whose local ranks are those of their hosts."""
        self.finish(*jobs)
        out = "".join(job.out for job in jobs)
        size = 2 * ranks
        for rank in range(size):
            self.assertIn(f"rank {rank} of {size}, local {rank % ranks} of {ranks}, backend {backend}, "
                          f"sum {size * (size + 1) // 2}", out)

    def test_lockstep_run_by_every_kind_of_address(self):
        # One that means "every address" cannot be called by others.
        for place, others, ranks in (("h0", "h0", 2), ("[fd77::1]", "h0-v6", 1), ("0.0.0.0", "10.77.0.1", 1)):
            with self.subTest(place):
                jobs = [
                    self.hosts.start(name, self.lockstep, "run", "-n", ranks, "--nnodes", 2, "--node-rank", node, "--rendezvous",
                                     f"{where}:{PORT}", "--token-file", self.hosts.token_file, self.program)
                    for node, (name, where) in enumerate([("h0", place), ("h1", others)])
                ]
                self.expect(jobs, "gloo", ranks)

    def test_a_slurm_step(self):
        """As srun sets them; Slurm itself needs a cluster."""
        step = dict(SLURM_JOB_ID=77, SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=4, SLURM_NTASKS=4, SLURM_STEP_NODELIST="h[0-1]",
                    SLURM_JOB_NODELIST="h[0-1]")
        jobs = [
            self.hosts.start(f"h{rank // 2}", self.program, SLURM_PROCID=rank, SLURM_LOCALID=rank % 2, SLURM_NODEID=rank // 2, **step)
            for rank in range(4)
        ]
        self.expect(jobs, "gloo")

    def test_variables_set_by_hand(self):
        jobs = [
            self.hosts.start(f"h{rank}", self.program, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="fd77::1", MASTER_PORT=PORT)
            for rank in range(2)
        ]
        self.expect(jobs, "gloo", 1)

    def test_a_name_that_the_first_host_gets_late(self):
        def by_launcher(name):
            return self.hosts.lockstep_run(self.lockstep, 1, [self.program], rendezvous=f"{name}:{PORT}")

        def by_hand(name):
            return [self.hosts.start(f"h{rank}", self.program, RANK=rank, WORLD_SIZE=2, MASTER_ADDR=name, MASTER_PORT=PORT)
                    for rank in range(2)]
        for start in by_launcher, by_hand:
            with self.subTest(start.__name__):
                name = start.__name__.replace("_", "-")
                jobs = start(name)
                self.eventually(lambda jobs=jobs: "0 waits until" in jobs[0].err, jobs[0].describe)
                self.hosts.add_names({name: "10.77.0.1"})
                self.expect(jobs, "gloo", 1)

    if hosts.TORCHRUN_PYTHON:
        def test_torchrun(self):
            # Debian's torch 1.13 cannot read its own default of --redirects and --tee under Python 3.11.
            jobs = [
                self.hosts.start(name, hosts.TORCHRUN_PYTHON, "-m", "torch.distributed.run", "--nnodes", 2, "--node_rank", node,
                                 "--nproc_per_node", 2, "--master_addr", "h0", "--master_port", PORT, "--redirects", 1, "--tee", 1,
                                 "--no_python", self.program, "auto")
                for node, name in enumerate(self.hosts.names)
            ]
            self.expect(jobs, "gloo")

    if hosts.MPIRUN:
        def test_mpirun(self):
            self.expect([self.hosts.mpirun(2, [self.program, "auto"])], "mpi")

        def test_a_name_that_nobody_knows_hides_no_address(self):
            self.expect([self.hosts.mpirun(1, [self.program, "gloo"], MASTER_ADDR="no.such.name.invalid")], "gloo", 1)

    # ---- which network ----

    def traffic(self):
        """What h0 has sent over each network so far."""
        text = subprocess.run(["ip", "-n", "h0", "-s", "-j", "link"], check=True, capture_output=True, text=True).stdout
        return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in json.loads(text)}

    def expect_over(self, interface, start, backend):
        before = self.traffic()
        self.expect(start(), backend, 1)
        sent = {name: after - before[name] for name, after in self.traffic().items()}
        other = "eth1" if interface == "eth0" else "eth0"
        self.assertGreater(sent[interface], 4 * MEGABYTE, sent)
        self.assertLess(sent[other], MEGABYTE, sent)

    def test_gloo_uses_the_interface_that_reaches_the_rendezvous(self):
        for place in ("10.78.0.1", "[fd78::1]"):
            with self.subTest(place):
                self.expect_over("eth1", lambda: self.hosts.lockstep_run(
                    self.lockstep, 1, [self.program, "gloo", MEGABYTE], rendezvous=f"{place}:{PORT}"), "gloo")

    def test_gloo_uses_the_interface_that_is_named(self):
        # The name h0 is not resolved where h0 listens: it means an address of eth0.
        def start():
            words = [self.lockstep, "run", "-n", 1, "--nnodes", 2, "--token-file", self.hosts.token_file]
            program = [self.program, "gloo", MEGABYTE]
            return [
                self.hosts.start("h0", *words, "--node-rank", 0, "--rendezvous", f"0.0.0.0:{PORT}", "--interface", "eth1", *program),
                self.hosts.start("h1", *words, "--node-rank", 1, "--rendezvous", f"10.78.0.1:{PORT}", *program,
                                 LOCKSTEP_INTERFACE="eth1")
            ]
        self.expect_over("eth1", start, "gloo")

    if hosts.MPIRUN:
        def test_gloo_under_mpirun_uses_the_address_that_is_named(self):
            self.expect_over("eth1", lambda: [self.hosts.mpirun(
                1, [self.program, "gloo", MEGABYTE], MASTER_ADDR="10.78.0.1")], "gloo")

        def test_engines_under_mpirun_use_the_interface_that_is_named(self):
            for backend, interface in (("mpi", "eth0"), ("mpi", "eth1"), ("gloo", "eth1")):
                with self.subTest(backend=backend, interface=interface):
                    self.expect_over(interface, lambda: [self.hosts.mpirun(
                        1, [self.program, backend, MEGABYTE], LOCKSTEP_INTERFACE=interface)], backend)


if __name__ == "__main__":
    hosts.run_tests()
