# SPDX-License-Identifier: Apache-2.0
"""Wrong programs: ranks that disagree, and numbers that are wrong."""
import json
import time

from support import case


def disagree(trial, tests=()):
    """lockstep selftest lets ranks disagree in every way, on each backend; all ranks must get an error that shows both sides."""
    for backend in ("shm", "gloo"):
        trial.selftest(backend)
    for program, pattern in tests:
        trial.gtest(program, pattern)


@case
def b1(trial):
    """Ranks pass tensors of different shapes.

    An error on all ranks that shows each shape."""
    disagree(trial, [("fabric_tests", "*DifferentOperationsFail*"), ("fabric_tests", "*MessagesOfDifferentSizes*")])


@case
def b2(trial):
    """Ranks pass different dtypes of equal size.

    An error on all ranks."""
    disagree(trial, [("fabric_tests", "*TagRootDtype*")])


@case
def b3(trial):
    """Ranks call different operations.

    An error on all ranks that shows both."""
    disagree(trial, [("fabric_tests", "*DifferentOperationsFail*")])


@case
def b4(trial):
    """Two ranks swap tensors of the same shape.

    The tags differ: an error on all ranks."""
    disagree(trial, [("fabric_tests", "*TagRootDtype*")])


@case
def b5(trial):
    """Ranks use different reductions or roots.

    An error on all ranks."""
    disagree(trial, [("fabric_tests", "*TagRootDtype*")])


@case
def b6(trial):
    """A rank leaves out a collective, or has ended.

    The rank is named with its last operation."""
    disagree(trial, [("fabric_tests", "*ARankThatLeavesIsNamed*"), ("fault_tests", "*ARankThatLeaves*:*ALateRankIsReported*")])


@case
def b7(trial):
    """A mesh or layout that does not fit the ranks; ranks that disagree on a group.

    Refused when it is created, with both values."""
    trial.gtest("comm_tests", "Mesh.WrongShapesAreRefused:Strategy.RanksThatDisagreeAreNamed:RequireSame.*")
    trial.gtest("config_tests", "TrainConfig.RanksMustMatch")


@case
def b8(trial):
    """Comparison of calls on, then off (gloo, all_reduce of 64 KB).

    It costs at most 10 us or 3 % of a call."""
    best = {}
    for _ in range(trial.count(6, 20)):
        for check in ("0", "1"):
            job = trial.call(trial.lockstep, "bench", "collectives", "-n", 2, "--backends", "gloo", "--bytes", 65536, "--seconds", 0.3,
                             "--json", LOCKSTEP_CHECK=check)
            (row, ) = json.loads(job.out)
            best[check] = min(best.get(check, row["p50_us"]), row["p50_us"])
    cost = best["1"] - best["0"]
    trial.notes.append(f"{best['0']:.1f} us without, {best['1']:.1f} us with")
    trial.require(cost <= max(10, 0.03 * best["0"]), f"it costs {cost:.1f} us of {best['0']:.1f} us")


@case
def b9(trial):
    """A duplicate rank, another world size, a missing rank.

    Named; a missing one at the deadline."""
    trial.gtest("launch_tests", "Rendezvous.ARankConnectsOnce*:Nodes.ANumberThatIsTaken*:Nodes.WhoDoesNotCome*:Nodes.ThatDisagree*")
    trial.gtest("init_tests", "Init.AMissingRankIsNamed*:Init.RanksThatWantDifferentThings*")


@case
def b10(trial):
    """Ranks of another version, configuration or data.

    Refused, with both."""
    trial.gtest("launch_tests", "Nodes.OfAnotherVersionAreRefused")
    trial.gtest("train_tests", "Train.RanksThatReadDifferentDataAreRefused")
    trial.script("tests/cluster/input_test.py")


def faulty(trial, action, steps=40, code=0, ranks=3, step=20, name="run", **more):
    """A run of which rank 1 has this fault at this step."""
    job = trial.train(ranks, name, steps=steps, variables={"LOCKSTEP_FAULT": f"rank=1,step={step},action={action}"}, **more)
    trial.finish(job, code, 90)
    return job


def parameter(trial):
    """A parameter of the small model."""
    trial.finish(trial.train(1, "names", steps=1), 0)
    job = trial.call(trial.lockstep, "checkpoint", "inspect", trial.folder / "names", "--json")

    def names(value):
        if isinstance(value, dict):
            yield from (word for key, inner in value.items() for word in ([key] if key.endswith(".weight") else names(inner)))
            yield from ([value["name"]] if str(value.get("name", "")).endswith(".weight") else [])
        elif isinstance(value, list):
            yield from (word for inner in value for word in names(inner))
    found = sorted(name for name in names(json.loads(job.out)) if "optim" not in name and "exp_avg" not in name)
    trial.require(found, f"no parameter in {job.out[:300]}")
    return found[0]


@case
def b11(trial):
    """The loss, then a gradient, of one rank is not a number.

    The step is computed again on all ranks; rank, step and parameter are named."""
    job = faulty(trial, "nan")
    trial.says(job, "not finite", rank=1)
    name = parameter(trial)
    job = faulty(trial, f"nan_grad:{name}", name="gradient")
    trial.says(job, "not finite", rank=1)
    trial.require(name in job.err + job.out, f"{name} is not named")
    trial.gtest("train_tests", "Train.LossesThatAreNotFiniteEndTheRun")


@case
def b12(trial):
    """The loss of a step is 100 times as large.

    A warning names the step; skip and rollback act."""
    for policy in ("warn", "skip", "rollback"):
        job = faulty(trial, "scale:100", name=policy, train__on_spike=policy, checkpoint__every=10)
        trial.says(job, "spike", step=20)
        trial.verify(policy)


@case
def b13(trial):
    """A bit of a parameter flips on one rank of three.

    The rank is named within train.verify_every steps, and the job ends."""
    name = parameter(trial)
    job = trial.train(3, steps=200, train__verify_every=10, variables={"LOCKSTEP_FAULT": f"rank=1,step=20,action=flip:{name}:0:30"})
    trial.finish(job, seconds=90)
    trial.require(job.code not in (0, 2), f"exit code {job.code}: {job.err[-300:]}")
    trial.says(job, "corrupt", rank=1)
    trial.require(trial.last_step() <= 31, f"found at step {trial.last_step()}")
    if trial.all:
        trial.script("tests/fault/flips.py", 1000, 1, seconds=1800)


@case
def b14(trial):
    """One rank throws in a step.

    It is named with what it threw; the others end within 0.5 s."""
    job = trial.train(3, steps=40, variables={"LOCKSTEP_FAULT": "rank=1,step=20,action=throw"})
    trial.steps(job, 19)
    moment = time.monotonic()
    trial.says(job, "thrown", rank=1)
    trial.seen(detect=time.monotonic() - moment)
    trial.finish(job, since=moment)
    trial.require(job.code not in (0, 134, 139), f"exit code {job.code}")
    trial.within(trial.detect, 0.5, "named")
    trial.gtest("comm_tests", "Errors.AThreadRankThatThrowsEndsTheOthers:RankError.*")
