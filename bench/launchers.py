# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` of two ranks under every launcher that is there, in turn: median step time, and its ratio to `lockstep train -n 2`.

    python3 bench/launchers.py BIN_DIR [ROUNDS]
    sudo tests/cluster/slurm.sh BIN_DIR python3 bench/launchers.py BIN_DIR      with srun, in a Slurm of one node

Launchers bind ranks to cores or leave them free. Times are medians over the steps of all rounds without the first ten of each.
"""
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

TRAIN = ["--model.layers", "2", "--model.hidden", "128", "--train.seq_len", "128", "--train.micro_batch", "8", "--train.global_batch", "16",
         "--train.steps", "60", "--train.log_every", "1000", "--train.device", "cpu", "--run.dir", ""]


def launchers():
    found = {}
    if shutil.which("mpirun"):
        mpirun = ["mpirun", "--oversubscribe", "-n", "2", "--bind-to"]
        if os.geteuid() == 0:
            mpirun.insert(1, "--allow-run-as-root")
        found |= {f"mpirun --bind-to {bind}": [*mpirun, bind] for bind in ("core", "none")}
    if shutil.which("srun") and "SLURM_CONF" in os.environ:
        found |= {f"srun --cpu-bind={bind}": ["srun", "-n", "2", f"--cpu-bind={bind}"] for bind in ("cores", "none")}
    return found


def step_times(words, folder):
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    result = subprocess.run([*words, "--metrics.file", str(metrics)], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        sys.exit(f"{words} failed:\n{result.stdout}{result.stderr}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["step_ms"] for record in records if "step_ms" in record][10:]


def main(bin_dir, rounds="5"):
    lockstep = str(pathlib.Path(bin_dir).resolve() / "lockstep")
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "text.txt"
        sources = sorted(pathlib.Path(__file__).resolve().parent.parent.glob("lockstep/*/*.cpp"))
        text.write_text("".join(source.read_text() for source in sources))
        train = [lockstep, "train", *TRAIN, "--data.path", str(text)]
        programs = {"lockstep train -n 2": [*train, "-n", "2"]} | {name: words + train for name, words in launchers().items()}
        times = {name: [] for name in programs}
        for _ in range(int(rounds)):
            for name, words in programs.items():
                times[name] += step_times(words, folder)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:24} {median:8.1f} ms {median / medians['lockstep train -n 2']:6.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
