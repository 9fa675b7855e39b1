# SPDX-License-Identifier: Apache-2.0
"""What the tests that failed in the last run of ctest printed, without what does not matter.

test_failures.py BUILD_DIR

Of each test: the assertions that failed, with the lines after them, and how its output ends. All of it
is in BUILD_DIR/Testing/Temporary/LastTest.log.
"""
import pathlib
import re
import sys

BEGIN = re.compile(r"Failure$|^terminate called|^lockstep error|AddressSanitizer|ThreadSanitizer|^Traceback|^C\+\+ exception")
LINES_OF_ONE, LINES_AT_THE_END, LINES_OF_ALL = 12, 25, 150


def outputs(log):
    """Yields the name and the lines of each test's output."""
    for part in re.split(r"^\d+/\d+ Testing: ", log, flags=re.M)[1:]:
        name = part.split("\n", 1)[0].strip()
        begin, end = part.find("\nOutput:\n"), part.rfind("<end of output>")
        yield name, part[begin:end].splitlines()[3:]


def excerpt(lines):
    """The numbers of the lines worth reading, in order."""
    wanted = set(range(max(0, len(lines) - LINES_AT_THE_END), len(lines)))
    for number, line in enumerate(lines):
        if len(wanted) >= LINES_OF_ALL:
            break
        if BEGIN.search(line):
            wanted.update(range(number, min(number + LINES_OF_ONE, len(lines))))
    return sorted(wanted)


def main(build):
    folder = pathlib.Path(build) / "Testing/Temporary"
    failed = folder / "LastTestsFailed.log"
    names = {line.split(":", 1)[1] for line in failed.read_text().splitlines()} if failed.exists() else set()
    for name, lines in outputs((folder / "LastTest.log").read_text(errors="replace")):
        if name not in names:
            continue
        print(f"\n---- {name} ----")
        last = -1
        for number in excerpt(lines):
            if number > last + 1:
                print("  ...")
            print(lines[number][:400])
            last = number
    print(f"\nThe whole output of these tests is in {folder / 'LastTest.log'}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
