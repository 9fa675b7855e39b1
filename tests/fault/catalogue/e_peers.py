# SPDX-License-Identifier: Apache-2.0
"""Hostile or confused peers: who may connect, read and be believed."""
import json
import os
import pathlib
import socket
import subprocess

from support import case, listening, processes, variables_of

GREETINGS = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), b"\xff" * 64, b"\0" * 8, b""]


@case
def e1(trial):
    """No token, a wrong token, a replayed proof, the token of another job.

    Refused, and the job is unaffected."""
    trial.gtest("launch_tests", "Rendezvous.AWrongToken*:Rendezvous.AProofIs*:Rendezvous.TheTokenIsNeverSent:Rendezvous.AServerThatDoesNotKnow*:"
                "Nodes.AWrongSecretIsRefused:Token.*:Rendezvous.StrangersAreClosed*")
    trial.gtest("init_tests", "Init.ASecretInAFileClosesTheJob")


@case
def e2(trial):
    """A thousand connections that say nothing.

    Closed; ranks are not delayed."""
    trial.gtest("launch_tests", "Rendezvous.SlowStrangers*:Rendezvous.AThousandStrangers*")


@case
def e3(trial):
    """Frames with lengths that lie, cut frames, garbage.

    The connection is closed before memory is taken."""
    trial.gtest("launch_tests", "Rendezvous.FramesThatLie*:Rendezvous.LargestValuesPass*:Rendezvous.StrangersAreClosed*")


@case
def e4(trial):
    """A peer that knows the token sends a wrong rank, generation or incarnation.

    Fenced and named."""
    trial.gtest("launch_tests", "Rendezvous.EarlierGenerations*:Rendezvous.ARefusedRank*:Rendezvous.EveryIncarnation*:"
                "Rendezvous.AServerOfOneIncarnation*:Rendezvous.ARankConnectsOnce*:Rendezvous.AnotherService*:Nodes.AnotherServiceAtTheAddress*")
    trial.gtest("fabric_tests", "Board.IsOpenedByItsOwnIncarnationOnly")


@case
def e5(trial):
    """HTTP, TLS and garbage to every port that the job listens on.

    Ignored; the job ends with 0."""
    calls = 0
    for backend in ("shm", "gloo"):
        job = trial.train(3, backend, steps=1500, comm__backend=backend)
        trial.steps(job, 3, backend)
        opened = []
        while job.process.poll() is None and calls < trial.count(2000, 100_000):
            for place in listening():
                host, port = place.rsplit(":", 1)
                try:
                    peer = socket.create_connection((host.strip("[]").replace("*", "127.0.0.1"), int(port)), timeout=1)
                    peer.sendall(GREETINGS[calls % len(GREETINGS)])
                except OSError:
                    continue
                calls += 1
                opened = [*opened[-50:], peer]
        for peer in opened:
            peer.close()
        trial.finish(job, 0, 120)
        trial.require(trial.last_step(backend) == 1500, f"{backend}: step {trial.last_step(backend)}")
    trial.notes.append(f"{calls} connections")
    trial.require(calls > 0, "the job listens on no port")
    trial.gtest("init_tests", "InitAgain.GlooWhileStrangersConnectToItsPorts")


@case
def e6(trial):
    """A job of one node.

    It listens on loopback only."""
    for backend in ("shm", "gloo"):
        job = trial.train(3, backend, comm__backend=backend)
        trial.steps(job, 3, backend)
        places = listening()
        trial.stop(job)
        wrong = [place for place in places if not place.startswith(("127.", "[::1]"))]
        trial.require(not wrong, f"{backend} listens on {wrong}")
        trial.notes.append(f"{backend}: {len(places)} ports")


@case
def e7(trial):
    """The token is looked for.

    It is in no command line, environment, log, metrics or checkpoint."""
    trial.gtest("launch_tests", "Launcher.TheTokenIsNotToBeSeen:Rendezvous.TheTokenIsNeverSent")
    job = trial.train(2)
    trial.steps(job, 25)
    pid = trial.ranks(2)[0]
    token = pathlib.Path(f"/proc/{pid}/fd/{variables_of(pid)['LOCKSTEP_TOKEN_FD']}").read_bytes().strip()
    trial.require(len(token) >= 16, f"a token of {len(token)} bytes")
    forms = {token, token.hex().encode()}
    places = [pathlib.Path(f"/proc/{number}/{name}") for number in processes() for name in ("cmdline", "environ")]
    trial.stop(job)
    found = []
    for path in [*places, *job.files, *(path for path in trial.folder.rglob("*") if path.is_file())]:
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if any(form in data for form in forms):
            found.append(str(path))
    trial.require(not found, f"the token is in {found}")


@case
def e8(trial):
    """Another user of the machine opens memory, descriptors, sockets and files of the job.

    Permission denied."""
    job = trial.train(2, comm__backend="shm")
    trial.steps(job, 25)
    pid = trial.ranks(2)[0]
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    allowed = []
    for words in (["ls", f"/proc/{pid}/fd"], ["cat", f"/proc/{pid}/environ"], ["head", "-c", "1", f"/proc/{pid}/mem"],
                  ["sh", "-c", f"exec 3< /proc/{pid}/fd/{variables_of(pid)['LOCKSTEP_TOKEN_FD']}"],
                  ["touch", str(trial.folder / "run" / "stranger")], ["touch", str(trial.folder / "run" / "checkpoints" / "stranger")]):
        if subprocess.run([*other, *words], capture_output=True, check=False).returncode == 0:
            allowed.append(" ".join(words))
    modes = [str(path) for path in (trial.folder / "run").rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    trial.stop(job)
    trial.require(not allowed, f"another user may: {allowed}")
    trial.require(not modes, f"another user may write {modes[:3]}")


@case
def e9(trial):
    """A checkpoint that is not the one that was pinned by its hash.

    Refused; the right one is accepted."""
    trial.finish(trial.train(1, steps=2), 0)
    folder = sorted((trial.folder / "run" / "checkpoints").glob("step-*"))[-1]
    lines = subprocess.run("sha256sum * | sha256sum", shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout
    for expected in (lines.split()[0], "0" * 64):
        job = trial.start(trial.lockstep, "checkpoint", "verify", folder, "--expect-sha256", expected)
        trial.finish(job)
        if expected != "0" * 64:
            trial.require(job.code == 0, f"code {job.code}: {job.err.strip()[-200:]}")
    trial.require(job.code not in (0, 2) and "0000" in job.err, f"code {job.code}: {job.err.strip()[-200:]}")


@case
def e10(trial):
    """Shell syntax in arguments, environment, host names and paths.

    Taken literally; nothing is executed."""
    mark = trial.folder / "executed"
    words = [f"$(touch {mark})", f"`touch {mark}`", f"; touch {mark} ;", f"| touch {mark}", f"&& touch {mark}", "\n touch " + str(mark), "'", '"',
             "$HOME", "*", "--", "-n", "", "\u00e9", "\\"]
    words += ["".join(trial.random.choice("$`'\"\\;&|<>(){}* \t\nab") for _ in range(trial.random.randrange(1, 30)))
              for _ in range(trial.count(200, 10_000))]
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['WORD']]))"
    for start in range(0, len(words), 500):
        part = words[start:start + 500]
        job = trial.call(trial.lockstep, "run", "-n", 1, "python3", "-c", show, *part, WORD=part[0])
        argv, value = json.loads(job.out.split("]: ", 1)[1])
        trial.require((argv, value) == (part, part[0]), "arguments or environment differ")
    for place in words[:6]:
        for options in (["--rendezvous", f"{place}:29400"], ["--rendezvous", "127.0.0.1:29400", "--interface", place],
                        ["--rendezvous", "127.0.0.1:29400", "--token-file", place]):
            job = trial.start(trial.lockstep, "run", "-n", 1, "--nnodes", 2, "--node-rank", 1, "--rendezvous-timeout", 1, *options, "true",
                              LOCKSTEP_TOKEN="a secret")
            trial.finish(job, seconds=20)
            trial.require(job.code != 0, f"{options}: exit code 0")
    folder = "run$(touch executed)"
    trial.finish(trial.train(2, folder.replace("/", ""), steps=2, run__dir=trial.folder / folder.replace("/", "")), 0)
    trial.require(not mark.exists() and not os.path.exists(trial.folder / "tmp" / "executed"), "a command was executed")
    trial.notes.append(f"{len(words)} words")
