#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manual pages and completion scripts that `make install` installs know every command and every option.

usage: manual_test.py SOURCE_DIR LOCKSTEP_COMMAND CMAKE
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE, COMMAND, CMAKE = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
SCRIPTS = {"bash": "bash-completion/completions/lockstep", "zsh": "zsh/site-functions/_lockstep", "fish": "fish/vendor_completions.d/lockstep.fish"}

# What bash would offer for the last of these words.
ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_lockstep
printf '%s\\n' "${COMPREPLY[@]}"
"""


def output(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


class Manual(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        output(CMAKE, f"-DLOCKSTEP={COMMAND}", "-DVERSION=1.2.3", f"-DFOLDER={cls.folder}", "-P", SOURCE / "cmake/manual_pages.cmake")
        cls.verbs = re.findall(r"^  ([a-z]+) ", output(COMMAND, "--help"), re.MULTILINE)
        # From a list that neither help nor completion is made of.
        cls.flags, section = [], ""
        for line in output(COMMAND, "train", "--print-config").splitlines():
            if line.startswith("["):
                section = line[1:line.index("]")]
            elif re.match(r"[a-z_]+ = ", line):
                cls.flags.append(f"{section}.{line.split()[0]}")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def test_there_is_something_to_know(self):
        self.assertIn("train", self.verbs)
        self.assertLessEqual(len(self.verbs), 14)
        self.assertIn("train.steps", self.flags)
        self.assertGreater(len(self.flags), 60)

    def test_every_script_has_every_command_and_every_option_of_train(self):
        for shell, path in SCRIPTS.items():
            text = (self.folder / path).read_text()
            self.assertEqual(text, output(COMMAND, "--completion", shell))
            for verb in self.verbs:
                self.assertRegex(text, rf"\b{verb}\b", shell)
            for flag in self.flags:
                mark = f" -l {flag} " if shell == "fish" else f"--{flag}"
                self.assertIn(mark, text, shell)

    def test_shells_can_read_them(self):
        for shell, path in SCRIPTS.items():
            if shutil.which(shell):
                subprocess.run([shell, "-n", self.folder / path], check=True)

    def offered(self, *words):
        done = subprocess.run(["bash", "-c", ASK, "ask", self.folder / SCRIPTS["bash"], *words], capture_output=True, text=True, check=True)
        self.assertEqual(done.stderr, "")
        return set(done.stdout.split())

    def test_bash_offers_what_may_follow(self):
        self.assertLessEqual(set(self.verbs), self.offered("lockstep", ""))
        self.assertEqual(self.offered("lockstep", "tra"), {"train"})
        self.assertLessEqual({f"--{flag}" for flag in self.flags}, self.offered("lockstep", "train", "-n", "2", ""))
        self.assertLessEqual({f"--{flag}" for flag in self.flags}, self.offered("lockstep", "plan", "memory", ""))
        self.assertEqual(self.offered("lockstep", "plan", ""), {"memory", "inventory", "time", "layout", "compare", "cluster"})
        self.assertEqual(self.offered("lockstep", "plan", "inventory", "--lis"), {"--list"})
        self.assertEqual(self.offered("lockstep", "checkpoint", ""), {"inspect", "verify", "diff", "export", "import"})
        self.assertIn("--max-shard-size", self.offered("lockstep", "checkpoint", "export", "--"))
        self.assertEqual(self.offered("lockstep", "train", "--train.dtype", ""), {"float32", "bfloat16", "auto"})
        self.assertEqual(self.offered("lockstep", "train", "--dtype", "b"), {"bfloat16"})
        self.assertEqual(self.offered("lockstep", "selftest", "--backend", "m"), {"mpi"})
        self.assertEqual(self.offered("lockstep", "train", "--data.path", ""), set())  # bash offers files then
        self.assertIn("--optim.lr", self.offered("lockstep", "run", "-n", "2", "lockstep", "train", "--optim."))
        self.assertNotIn("--optim.lr", self.offered("lockstep", "run", "--"))

    def test_other_shells_are_refused(self):
        done = subprocess.run([COMMAND, "--completion", "csh"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("csh", done.stderr)

    def test_every_command_has_a_page_with_its_help(self):
        for verb in self.verbs:
            page = (self.folder / f"man/man1/lockstep-{verb}.1").read_text().replace("\\-", "-").replace("\\&", "")
            self.assertRegex(page, rf"^\.TH lockstep-{verb} 1 ")
            self.assertIn(output(COMMAND, verb, "--help").replace("\\", "\\e"), page)
        train = (self.folder / "man/man1/lockstep-train.1").read_text().replace("\\-", "-")
        for flag in self.flags:
            self.assertIn(f"--{flag} ", train)
        self.assertIn("--max-shard-size", (self.folder / "man/man1/lockstep-checkpoint.1").read_text().replace("\\-", "-"))
        self.assertIn("lockstep-train(1)", (self.folder / "man/man1/lockstep.1").read_text().replace("\\-", "-"))

    def test_man_has_nothing_to_say_against_them(self):
        if not (shutil.which("man") and shutil.which("groff")):
            return
        for page in sorted((self.folder / "man/man1").iterdir()):
            done = subprocess.run(["man", "--warnings=w", "-E", "UTF-8", "-l", "-Tutf8", "-Z", page], capture_output=True, text=True,
                                  env={**os.environ, "LC_ALL": "C.UTF-8", "MANROFFSEQ": "", "MANWIDTH": "200"})
            self.assertEqual((done.returncode, done.stderr), (0, ""), page)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
