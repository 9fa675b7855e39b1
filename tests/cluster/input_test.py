#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hosts that do not fit together say so at once, on every host, and who it is. usage: input_test.py FOLDER_OF_PROGRAMS"""
import pathlib

import hosts
from hosts import PORT

# Far below the 30 s that a rank waits for others, far above what starting a program takes.
AT_ONCE = 25


class Input(hosts.HostsTest):
    HOSTS = 3

    def setUp(self):
        self.program = self.BIN / "init_rank"
        self.other_token = pathlib.Path(self.hosts.folder, "other-token")
        self.other_token.write_text("another secret\n")
        self.other_token.chmod(0o600)

    def rank(self, host, rank, size=3, program=None, **variables):
        return self.hosts.start(host, program or self.program, RANK=rank, WORLD_SIZE=size, MASTER_ADDR="h0", MASTER_PORT=PORT,
                                **{"LOCKSTEP_TOKEN": "a secret", **variables})

    def node(self, host, node, nodes=3, ranks=1, token=None, options=(), program=("true",), **variables):
        return self.hosts.start(host, self.lockstep, "run", "-n", ranks, "--nnodes", nodes, "--node-rank", node, "--rendezvous",
                                f"h0:{PORT}", "--token-file", token or self.hosts.token_file, *options, *program, **variables)

    def wait_for(self, count, jobs):
        """Until so many have come to the rendezvous: what follows does not depend on who is quicker."""
        self.eventually(lambda: self.hosts.connections("h0") >= count, lambda: "\n".join(job.describe() for job in jobs))
        return jobs

    def two_ranks(self, **variables):
        """Ranks 0 and 1, who wait for the others. Each has a connection for that."""
        return self.wait_for(4, [self.rank("h0", 0, **variables), self.rank("h1", 1, **variables)])

    def two_nodes(self, *options):
        return self.wait_for(2, [self.node("h0", 0, options=options), self.node("h1", 1, options=options)])

    def expect(self, jobs, *words, code=2, seconds=AT_ONCE):
        self.finish(*jobs, code=code, seconds=seconds)
        for job in jobs:
            line = job.err.strip().splitlines()[-1]
            for word in words:
                self.assertIn(word, line, job.describe())
        # From the moment that the last of them was started.
        seconds = max(job.start + job.seconds for job in jobs) - max(job.start for job in jobs)
        print(f"{self.id().rsplit('.')[-1]}: {seconds:.1f} s: {line}", flush=True)

    # ---- ranks ----

    def test_a_rank_with_another_token(self):
        jobs = self.two_ranks(LOCKSTEP_TIMEOUT=5)
        self.expect([self.rank("h2", 2, LOCKSTEP_TOKEN="another")], "wrong token")
        # A stranger cannot end the job; but who is missing is known in the end.
        self.expect(jobs, "[init] 2 of 3 ranks joined; missing: 2", code=1)

    def test_a_rank_that_counts_others(self):
        self.expect([*self.two_ranks(), self.rank("h2", 2, size=4)], "rank 2 counts 4 ranks in all, rank 0 counts 3")

    def test_a_rank_that_comes_twice(self):
        self.expect([*self.two_ranks(), self.rank("h2", 1)], "rank 1 is already connected")

    def test_a_rank_that_does_not_come(self):
        self.expect(self.two_ranks(LOCKSTEP_TIMEOUT=5), "[init] 2 of 3 ranks joined; missing: 2", code=1)

    def test_a_rank_of_another_version(self):
        jobs = self.two_ranks()
        self.expect([*jobs, self.rank("h2", 2, program=self.BIN / "init_rank_of_another_version")],
                    "[init] the ranks differ: Lockstep 0.0.0 on rank 2 (h2); Lockstep ", " on ranks 0, 1 (h0, h1)")

    def test_another_model(self):
        data = pathlib.Path(self.hosts.folder, "text.txt")
        data.write_text("some text to train on\n" * 100)
        words = [self.lockstep, "train", "--data.path", data, "--model.layers", 1, "--model.heads", 2, "--train.seq_len", 16,
                 "--train.micro_batch", 1, "--train.steps", 1, "--run.dir", "", "--model.hidden"]
        jobs = [self.node(f"h{node}", node, program=[*words, 32 if node < 2 else 64]) for node in range(3)]
        self.finish(*jobs, code=2)
        for job in jobs:
            self.assertIn("[init] the ranks differ: model.hidden = 32 on ranks 0, 1 (h0, h1); model.hidden = 64 on rank 2 (h2)",
                          job.err, job.describe())

    def test_an_interface_that_is_not_there(self):
        self.expect([self.rank("h0", 0, LOCKSTEP_INTERFACE="eth7")], "has no 'eth7'; there are lo (127.0.0.1, ::1)",
                    "eth0 (10.77.0.1, fd77::1)")
        self.expect([self.node("h1", 1, options=["--interface", "eth7"])], "has no 'eth7'", "eth0 (10.77.0.2, fd77::2)")
        self.expect([self.rank("h0", 0, LOCKSTEP_INTERFACE="lo")], "rendezvous address is h0:", "which is 10.77.0.1 on eth0, not on lo")

    # ---- nodes ----

    def test_a_node_with_another_token(self):
        jobs = self.two_nodes("--rendezvous-timeout", 4)
        self.expect([self.node("h2", 2, token=self.other_token)], "wrong token")
        self.expect(jobs, "node 0 has waited 4 s for node 2", code=1)
        self.assertIn("refused 10.77.0.3", jobs[0].err)

    def test_a_node_that_counts_others(self):
        self.expect([*self.two_nodes(), self.node("h2", 2, nodes=4)], "node 2 counts 4 nodes in all, node 0 counts 3")

    def test_a_node_that_comes_twice(self):
        self.expect([*self.two_nodes(), self.node("h2", 1)], "node 1 is already connected")

    def test_nodes_that_do_not_come(self):
        self.expect([self.node("h0", 0, options=["--rendezvous-timeout", "2"])], "node 0 has waited 2 s for nodes 1, 2", code=1)

    def test_a_node_that_starts_more(self):
        self.expect([*self.two_nodes(), self.node("h2", 2, ranks=2)], "node 2 starts 2 ranks of Lockstep", "nodes 0, 1 start 1 ranks of Lockstep")


if __name__ == "__main__":
    hosts.run_tests()
