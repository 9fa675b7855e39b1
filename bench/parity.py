# SPDX-License-Identifier: Apache-2.0
"""Does training with 8-bit products end where bfloat16 ends? Trains the 162M Llama on real text on one GPU in both precisions from the same seeds.

    python3 bench/parity.py BIN_DIR OUT_DIR [STEPS] [LR]      1,000 steps and a learning rate of 3e-4 if not given; python3 has `tokenizers`

The text is what the machine has: C and C++ headers, Python sources and documentation. A tokenizer of 50,000 tokens is trained on it first. Prints the
mean loss of the last 100 steps of each run and its relative difference from bfloat16, and puts the curves into OUT_DIR, which
bench/plot_layouts.py draws. Training on a GPU is not deterministic: bfloat16 runs a second time, which shows how far apart equal runs end.
"""
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from llama_sizes import SIZES

FOLDERS = ["/usr/include", "/usr/local/include", "/usr/share/doc", "/usr/lib/python3", *{path for path in sys.path if path.endswith("-packages")}]
ENDINGS = {".h", ".hpp", ".cuh", ".inc", ".py", ".md", ".rst", ".txt"}
BYTES = 160 << 20
ROWS, SEEDS = 16, (1, 2, 3)
PRECISIONS = ("bfloat16", "fp8")


def is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def gather_text(path):
    """Whole files in a fixed order that mixes the folders, each once."""
    files = sorted({file for folder in FOLDERS for file in pathlib.Path(folder).rglob("*") if file.suffix in ENDINGS and file.is_file()})
    random.Random(1).shuffle(files)
    taken, seen = 0, set()
    with open(path, "wb") as out:
        for file in files:
            text = file.read_bytes()
            if taken + len(text) > BYTES:
                break
            if hash(text) in seen or b"\0" in text or not is_utf8(text):
                continue
            seen.add(hash(text))
            taken += out.write(text)
    return taken


def train_tokenizer(text, path):
    from tokenizers import ByteLevelBPETokenizer
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=50000, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(path))


def train(lockstep, tokens, precision, seed, steps, lr, metrics):
    size = SIZES["162M"]
    words = [lockstep, "train", "-n", 1, "--train.device", "cuda", "--train.precision", precision, "--train.seed", seed, "--train.steps", steps,
             "--model.kind", "llama", "--train.seq_len", size["length"], "--train.micro_batch", ROWS, "--data.path", tokens, "--data.validation", 0,
             "--optim.lr", lr, "--optim.warmup", min(200, steps - 1), "--run.dir", "", "--metrics.file", metrics]
    for key in ("layers", "hidden", "heads", "ffn", "vocab"):
        words += [f"--model.{key}", size[key]]
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps_of = [line for line in lines if "loss" in line]
    return statistics.mean(line["loss"] for line in steps_of[-100:]), sum("skipped" in line for line in steps_of)


def main():
    lockstep, out = pathlib.Path(sys.argv[1]).resolve() / "lockstep", pathlib.Path(sys.argv[2])
    steps, lr = [*sys.argv[3:5], *["1000", "3e-4"][len(sys.argv) - 3:]]
    steps = int(steps)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer, tokens = (pathlib.Path(folder) / name for name in ("text.txt", "tokenizer.json", "tokens.bin"))
        begun = time.time()
        size = gather_text(text)
        train_tokenizer(text, tokenizer)
        subprocess.run([lockstep, "data", "pack", "--input", text, "--output", tokens, "--tokenizer", tokenizer], check=True)
        print(f"{size / 1e6:.0f} MB of text, {tokens.stat().st_size / 2e6:.1f} million tokens, after {time.time() - begun:.0f} s", flush=True)
        base = {}
        for name, seed in [*((name, seed) for seed in SEEDS for name in PRECISIONS), *(("bfloat16 again", seed) for seed in SEEDS)]:
            metrics = out / f"{name.replace(' ', '-')}-{seed}.jsonl"
            mean, skipped = train(lockstep, tokens, name.split()[0], seed, steps, lr, metrics)
            apart = 100 * (mean / base.setdefault(seed, mean) - 1)
            print(f"seed {seed} {name:14} mean loss of the last 100 steps {mean:.5f}  {apart:+.3f} %  skipped steps {skipped}", flush=True)


if __name__ == "__main__":
    main()
