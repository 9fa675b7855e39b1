# SPDX-License-Identifier: Apache-2.0
"""Seconds that each test took in the last run of ctest, compared with the budget in tests/budget.txt.

test_times.py BUILD_DIR BUDGET           prints what grew most, and the sum
test_times.py BUILD_DIR BUDGET --write   makes the last run the budget

The times of a run depend on the machine and on what else it does. Nothing fails here: a test that has
grown by half deserves a look before it is budgeted again.
"""
import pathlib
import sys


def last_run(build):
    log = build / "Testing/Temporary/LastTest.log"
    times, name = {}, None
    for line in log.read_text(errors="replace").splitlines():
        if "/" in line and " Test: " in line:
            name = line.split(" Test: ")[1].strip()
        elif line.startswith("Test time =") and name:
            times[name] = float(line.split("=")[1].split()[0])
    if not times:
        sys.exit(f"test_times: {log} has no times; run make test first")
    return times


def read_budget(path):
    rows = (line.split() for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def main(build, budget, write=False):
    times = last_run(pathlib.Path(build))
    budget = pathlib.Path(budget)
    if write:
        rows = sorted(times.items(), key=lambda row: -row[1])
        budget.write_text("# Seconds of each test in `make test` on 2 cores; `make test-times` compares.\n"
                          + "".join(f"{seconds:7.1f} {name}\n" for name, seconds in rows))
        return
    allowed = read_budget(budget)
    grown = sorted(times, key=lambda name: allowed.get(name, 0) - times[name])
    print(f"{'seconds':>8} {'budget':>8}  test")
    for name in grown[:20]:
        print(f"{times[name]:8.1f} {allowed.get(name, 0):8.1f}  {name}{'' if name in allowed else '  (new)'}")
    for name in sorted(set(allowed) - set(times)):
        print(f"{'-':>8} {allowed[name]:8.1f}  {name}  (did not run)")
    print(f"{sum(times.values()):8.1f} {sum(allowed.values()):8.1f}  all {len(times)} tests")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--write"]):
        sys.exit(__doc__)
    main(*sys.argv[1:3], write=len(sys.argv) == 4)
