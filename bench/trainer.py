# SPDX-License-Identifier: Apache-2.0
"""`lockstep train` on one GPU beside a bare loop and beside PyTorch, interleaved in one run.

    python3 bench/trainer.py BIN_DIR [MODEL...]      BIN_DIR holds lockstep and bench_bare_loop; python3 has torch 2.x

Every program trains the same Llama in bfloat16 with AdamW on random tokens; each is run ROUNDS times in turn, its best step of all counts.
The trainer also reads its data, clips, and writes metrics.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from llama_sizes import SIZES

ROUNDS, STEPS = 2, 20
HERE = pathlib.Path(__file__).resolve().parent


def last_json(words):
    run = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{words} failed:\n{run.stdout}{run.stderr}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def bare(bin_dir, size):
    numbers = [size[key] for key in ("layers", "hidden", "heads", "ffn", "vocab", "rows", "length")]
    result = last_json([bin_dir / "bench_bare_loop", *numbers, STEPS])
    return 1e3 * result["step_s"], 1e3 * result["median_s"]


def trainer(bin_dir, size):
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "random.bin"
        draw = random.Random(1)
        tokens = [draw.randrange(size["vocab"]) for _ in range(1 << 20)]
        data.write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))
        metrics = f"{folder}/metrics.jsonl"
        words = [bin_dir / "lockstep", "train", "--model.kind", "llama", "--train.dtype", "bfloat16", "--data.path", data,
                 "--data.validation", "0", "--run.dir", "", "--metrics.file", metrics, "--optim.warmup", "5",
                 "--train.steps", STEPS, "--train.seq_len", size["length"], "--train.micro_batch", size["rows"]]
        for key in ("layers", "hidden", "heads", "ffn", "vocab"):
            words += [f"--model.{key}", size[key]]
        run = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"lockstep train failed:\n{run.stdout}{run.stderr}")
        lines = [json.loads(line) for line in pathlib.Path(metrics).read_text().splitlines()]
    times = sorted(line["step_ms"] for line in lines[1:] if "loss" in line)
    return times[0], times[len(times) // 2]


def torch_mode(mode):
    def run(_, name):
        result = last_json([sys.executable, HERE / "torch_llama.py", name, mode, STEPS])
        return result["best_ms"], result["median_ms"]
    return run


def main():
    bin_dir = pathlib.Path(sys.argv[1]).resolve()
    for name in sys.argv[2:] or SIZES:
        size = SIZES[name]
        programs = {"bare loop": lambda d, n: bare(d, SIZES[n]), "lockstep train": lambda d, n: trainer(d, SIZES[n]),
                    **{f"PyTorch {mode}": torch_mode(mode) for mode in ("plain", "eager", "compile")}}
        found = {program: [] for program in programs}
        for _ in range(ROUNDS):
            for program, run in programs.items():
                found[program].append(run(bin_dir, name))
        tokens = size["rows"] * size["length"]
        reference = min(best for best, _ in found["lockstep train"])
        print(f"{name}, {size['rows']} x {size['length']} tokens, {ROUNDS} x {STEPS} steps")
        print(f"{'program':<16} {'best ms':>8} {'median ms':>10} {'tokens/s':>9} {'lockstep train is':>18}")
        for program, times in found.items():
            best, median = min(t[0] for t in times), sorted(t[1] for t in times)[len(times) // 2]
            print(f"{program:<16} {best:8.1f} {median:10.1f} {tokens / best * 1e3:9.0f} {best / reference:17.3f}x", flush=True)


if __name__ == "__main__":
    main()
