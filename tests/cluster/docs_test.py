#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The scripts in docs/launcher.md and examples/slurm.sbatch start jobs. What they call and is not here (ssh, Slurm, Kubernetes) is played by a few lines that enter
a simulated host. usage: docs_test.py FOLDER_OF_PROGRAMS"""
import os
import pathlib
import re
import shlex
import subprocess

import yaml

import hosts

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PAGE = SOURCE / "docs" / "launcher.md"
CONFIG = """
[data]
path = "text.txt"
[model]
layers = 1
hidden = 32
heads = 2
[train]
seq_len = 16
micro_batch = 1
steps = 2
[run]
dir = ""
"""


def block(language):
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{PAGE}: {len(found)} blocks of {language}"
    # Two ranks of a host are enough here.
    assert "lockstep run -n 8 " in found[0]
    return found[0].replace("lockstep run -n 8 ", "lockstep run -n 2 ")


class Docs(hosts.HostsTest):
    def setUp(self):
        self.work = pathlib.Path(self.hosts.folder, "work")
        self.tools = pathlib.Path(self.hosts.folder, "tools")
        self.work.mkdir(exist_ok=True)
        self.tools.mkdir(exist_ok=True)
        (self.work / "text.txt").write_text("some text to train on\n" * 100)
        (self.work / "examples").mkdir(exist_ok=True)
        (self.work / "examples" / "train.toml").write_text(CONFIG)
        (self.work / ".lockstep-token").write_text("a secret\n")
        (self.work / ".lockstep-token").chmod(0o600)

    def tool(self, name, script):
        path = self.tools / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    def variables(self, **more):
        return {"PATH": f"{self.tools}:{self.BIN}:{os.environ['PATH']}", "HOME": str(self.work), **more}

    def expect_four_ranks(self, *jobs):
        self.finish(*jobs)
        self.assertIn("4 ranks", "".join(job.out for job in jobs), jobs[0].describe())

    def script(self, shell, text, arguments="", **variables):
        path = self.work / "script"
        path.write_text(text)
        subprocess.run([shell, "-n", path], check=True)
        words = ["sh", "-c", f"cd {shlex.quote(str(self.work))} && exec {shell} script {arguments}"]
        return self.hosts.start("h0", *words, **self.variables(**variables))

    def test_ssh(self):
        self.tool("ssh", f'while [ "${{1#-}}" != "$1" ]; do shift; done\nhost=h${{1#node}}; shift\nexec {self.hosts.agent} $host "$*"\n')
        self.hosts.add_names({"node0": "10.77.0.1", "node1": "10.77.0.2"})
        self.expect_four_ranks(self.script("sh", block("sh")))

    def test_slurm(self):
        self.tool("scontrol", '[ "$*" = "show hostnames h[0-1]" ] && printf "h0\\nh1\\n"\n')
        self.tool("srun", 'while [ "${1#-}" != "$1" ]; do shift; done\npids=\n'
                  "for node in 0 1; do\n"
                  f"  SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_STEP_ID=0 sh -c {shlex.quote(hosts.ENTER)} h$node \"$@\" &\n"
                  '  pids="$pids $!"\n'
                  "done\n"
                  'for pid in $pids; do wait $pid || exit $?; done\n')
        text = (SOURCE / "examples" / "slurm.sbatch").read_text()
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
        self.assertEqual((options["nodes"], options["ntasks-per-node"]), ("2", "1"))
        self.assertLess(int(re.search(r"--stop-grace (\d+)", text)[1]), 1000 * int(options["signal"].split("@")[1]))

        def start(**variables):
            return self.script("bash", text, "examples/train.toml", RANKS=2, SLURM_JOB_ID=77, SLURM_JOB_NODELIST="h[0-1]", SLURM_NNODES=2,
                               SLURM_NTASKS=2, SLURM_STEP_NUM_TASKS=2, **variables)

        # A first start leaves the folder of an older job of the same number alone; a restart continues its own.
        old = self.work / "runs" / "slurm-77"
        old.mkdir(parents=True)
        self.expect_four_ranks(start())
        new = self.work / "runs" / "slurm-77-2"
        self.assertTrue((new / "checkpoints" / "step-00000002").is_dir())
        self.assertEqual(list(old.iterdir()), [])
        again = start(SLURM_RESTART_COUNT=1)
        self.finish(again)
        self.assertIn("runs/slurm-77-2", again.out)
        self.assertFalse((self.work / "runs" / "slurm-77-3").exists())

    def test_kubernetes(self):
        service, job = yaml.safe_load_all(block("yaml"))
        self.assertEqual((service["kind"], job["kind"], job["spec"]["completionMode"]), ("Service", "Job", "Indexed"))
        name, pods, template = job["metadata"]["name"], job["spec"]["completions"], job["spec"]["template"]["spec"]
        self.assertEqual(pods, job["spec"]["parallelism"])
        # A pod's name is JOB-INDEX.SUBDOMAIN where a headless service of that name selects it.
        self.assertEqual(service["metadata"]["name"], template["subdomain"])
        self.assertEqual(service["spec"]["clusterIP"], "None")
        self.assertEqual(service["spec"]["selector"], {"job-name": name})
        self.hosts.add_names({f"{name}-{pod}.{template['subdomain']}": f"10.77.0.{pod + 1}" for pod in range(pods)})
        container = template["containers"][0]
        self.assertEqual([variable["name"] for variable in container["env"]], ["LOCKSTEP_TOKEN"])
        (mount, ), (volume, ) = container["volumeMounts"], template["volumes"]
        self.assertEqual((mount["name"], mount["mountPath"]), (volume["name"], container["workingDir"] + "/runs"))
        words = [*container["command"], *container["args"]]
        jobs = [
            self.hosts.start(f"h{pod}", "sh", "-c", f"cd {shlex.quote(str(self.work))} && exec {shlex.join(words)}",
                             **self.variables(JOB_COMPLETION_INDEX=pod, LOCKSTEP_TOKEN="a secret")) for pod in range(pods)
        ]
        self.expect_four_ranks(*jobs)


if __name__ == "__main__":
    hosts.run_tests()
