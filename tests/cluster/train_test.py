#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Layouts that span hosts train as one process does. usage: train_test.py FOLDER_OF_PROGRAMS"""
import json
import os
import pathlib

import hosts

# Name, hosts, ranks on each, strategies, options.
BOTH = ("all-reduce", "hierarchical")
LAYOUTS = [
    ("ddp", 2, 2, BOTH, []),
    ("sharded", 2, 2, ("all-reduce",), ["--parallel.shard", "full"]),
    ("ddp", 3, 2, ("all-reduce",), []),
    ("sharded", 3, 2, BOTH, ["--parallel.shard", "full"]),
    ("2x2x2", 4, 2, BOTH, ["--parallel.dp", "2", "--parallel.tp", "2", "--parallel.pp", "2"]),
]
# What `make test` has of them for each backend; `make check-wide` has all.
SAMPLES = {
    "gloo": [("ddp", 2, "hierarchical"), ("sharded", 3, "hierarchical"), ("2x2x2", 4, "all-reduce")],
    "mpi": [("ddp", 2, "all-reduce"), ("sharded", 3, "all-reduce"), ("2x2x2", 4, "hierarchical")],
}


class Train(hosts.HostsTest):
    HOSTS = 4

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.data = pathlib.Path(cls.hosts.folder, "text.txt")
        cls.data.write_text("".join(f"int f{i * i % 97}(int x) {{ return x + {i % 13}; }}\n" for i in range(400)))
        job = cls.hosts.start("h0", *cls.command("one", [])).wait()
        assert job.code == 0, job.describe()
        cls.one = cls.losses("one")

    @classmethod
    def command(cls, name, options):
        return [
            cls.lockstep, "train", "--data.path", cls.data, "--model.layers", 2, "--model.hidden", 32, "--model.heads", 2,
            "--train.seq_len", 32, "--train.micro_batch", 1, "--train.global_batch", 12, "--train.steps", 5, "--optim.warmup", 2,
            "--optim.lr", 0.01, "--comm.timeout", 60, "--checkpoint.dir", "", "--run.dir", cls.run_folder(name),
            *options
        ]

    @classmethod
    def run_folder(cls, name):
        return pathlib.Path(cls.hosts.folder, name)

    @classmethod
    def losses(cls, name):
        lines = [json.loads(line) for line in (cls.run_folder(name) / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    def follow(self, backend):
        for layout, count, ranks, strategies, options in LAYOUTS:
            for strategy in strategies:
                if "LOCKSTEP_TEST_ALL" not in os.environ and (layout, count, strategy) not in SAMPLES[backend]:
                    continue
                with self.subTest(layout=layout, hosts=count, strategy=strategy):
                    name = f"{backend}-{strategy}-{layout}-{count}"
                    words = self.command(name, ["--comm.backend", backend, "--comm.strategy", strategy, *options])
                    names = self.hosts.names[:count]
                    if backend == "mpi":
                        jobs = [self.hosts.mpirun(ranks, words, names=names)]
                    else:
                        jobs = self.hosts.lockstep_run(self.lockstep, ranks, words, names=names)
                    self.finish(*jobs)
                    environment = json.loads((self.run_folder(name) / "environment.jsonl").read_text())
                    self.assertEqual({rank["host"] for rank in environment["ranks"]}, set(names))
                    self.assertEqual(len(environment["ranks"]), count * ranks)
                    found = self.losses(name)
                    self.assertEqual(len(found), len(self.one))
                    for step, (mine, expected) in enumerate(zip(found, self.one)):
                        self.assertLess(abs(mine - expected), 1e-5 * abs(expected), f"step {step}")
                    print(f"{name}: {max(job.seconds for job in jobs):.1f} s", flush=True)

    def test_gloo_under_lockstep_run(self):
        self.follow("gloo")

    if hosts.MPIRUN:
        def test_mpi_under_mpirun(self):
            self.follow("mpi")


if __name__ == "__main__":
    hosts.run_tests()
