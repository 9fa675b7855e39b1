# SPDX-License-Identifier: Apache-2.0
"""What copies of the state in memory cost: `lockstep train` with --recovery checkpoint and --recovery memory, in turn.

    python3 bench/recovery.py BIN_DIR cpu|gpu [ROUNDS]     cpu: the GPT of `make train` on 2 ranks; gpu: 162M on 2 ranks that share the GPU

A run's figure is the wall time between the lines that the trainer prints after step 10 and after the last step.
"""
import os
import pathlib
import random
import statistics
import sys
import tempfile

import observability

RECOVERY = ["--run.dir", "", "--metrics.file", "", "--checkpoint.dir", "", "--run.max_restarts", 1, "--recovery"]


def main():
    lockstep, kind, rounds = pathlib.Path(sys.argv[1]).resolve() / "lockstep", sys.argv[2], int((sys.argv + [5])[3])
    found = {way: [] for way in ("checkpoint", "memory")}
    if kind == "gpu":
        os.environ["LOCKSTEP_SHARE_GPU"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder, "tokens.bin")
        draw = random.Random(1)
        data.write_bytes(b"".join(draw.randrange(32000).to_bytes(2, "little") for _ in range(1 << 18)))
        options = observability.options_of(kind, data) + ([] if kind == "cpu" else ["-n", 2, "--train.steps", 50])
        for number in range(rounds):
            for way in found if number % 2 == 0 else reversed(found):
                found[way].append(observability.milliseconds(lockstep, options, [*RECOVERY, way], folder))
    print(f"{'recovery':12}{'best ms':>10}{'median ms':>11}")
    for way, times in found.items():
        print(f"{way:12}{min(times):10.2f}{statistics.median(times):11.2f}")
    best = [min(found[way]) for way in ("memory", "checkpoint")]
    print(f"ratio of the best {best[0] / best[1]:.4f}, of medians {statistics.median(found['memory']) / statistics.median(found['checkpoint']):.4f}")


if __name__ == "__main__":
    main()
