#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`lockstep sample` and `lockstep eval` beside transformers: the most likely 200 tokens after a prompt, in every layout, and the perplexity of a
text. Small models are trained first, so that likely tokens are far apart. Needs torch and transformers; run by hand.

usage: generate_oracle.py BUILD_BIN_DIR [DEVICE...]      DEVICE: cpu, cuda; without: both
"""
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = ["--model.layers", "4", "--model.hidden", "128", "--model.heads", "4", "--train.seq_len", "256"]
MODELS = {"gpt": ["--model.kind", "gpt"], "llama": ["--model.kind", "llama", "--model.kv_heads", "2"]}
LAYOUTS = {
    "1 rank": [],
    "tp 2": ["-n", "2", "--parallel.tp", "2"],
    "pp 2": ["-n", "2", "--parallel.pp", "2"],
    "tp 2 x pp 2": ["-n", "4", "--parallel.tp", "2", "--parallel.pp", "2"],
    "shard full": ["-n", "2", "--parallel.shard", "full"],
    "offloaded": ["--offload.params", "true", "--offload.device_limit", "256MB"],
}
PROMPT = "The launcher "
TOKENS, STRIDE, LENGTH = 200, 64, 256


def lockstep(folder, *words):
    done = subprocess.run([folder / "lockstep", *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"lockstep {' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def perplexity(model, tokens):
    """As transformers' documentation defines it: each window scores the tokens that the one before has not."""
    total, count, scored = 0.0, 0, 1
    for begin in range(0, len(tokens), STRIDE):
        end = min(begin + LENGTH, len(tokens))
        window = torch.tensor([tokens[begin:end]], device=model.device)
        logs = model(window).logits[0].double().log_softmax(-1)
        for place in range(scored, end):
            total -= float(logs[place - begin - 1, tokens[place]])
        count, scored = count + end - scored, end
        if end == len(tokens):
            return math.exp(total / count)


def main():
    folder, devices, failed = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] or ["cpu", "cuda"], 0
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    for name, flags in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            place = pathlib.Path(place)
            (place / "text.txt").write_text(text)
            (place / "short.txt").write_text(text[:3000])
            lockstep(folder, "train", *flags, *SIZES, "--data.path", place / "text.txt", "--train.steps", 400, "--optim.lr", "2e-3", "--run.dir",
                     place / "run", "--train.device", devices[-1])
            lockstep(folder, "checkpoint", "export", place / "run", place / "exported")
            for device in devices:
                model = transformers.AutoModelForCausalLM.from_pretrained(place / "exported", dtype=torch.float32).to(device).eval()
                prompt = torch.tensor([list(PROMPT.encode())], device=device)
                with torch.no_grad():
                    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
                                              pad_token_id=0)[0, prompt.shape[1]:].tolist()
                    score = perplexity(model, list(text[:3000].encode()))
                for layout, words in LAYOUTS.items():
                    given = ["--checkpoint", place / "run", "--train.device", device, *words]
                    found = json.loads(lockstep(folder, "sample", *given, "--prompt", PROMPT, "--tokens", TOKENS, "--temperature", 0, "--ignore-eos",
                                                "--json").splitlines()[0])["token_ids"]
                    same = next((i for i in range(TOKENS) if found[i] != expected[i]), TOKENS)
                    ours = json.loads(lockstep(folder, "eval", *given, "--data.path", place / "short.txt", "--stride", STRIDE, "--json"))["perplexity"]
                    good = same == TOKENS and abs(ours / score - 1) < 1e-4
                    failed += not good
                    print(f"{'ok    ' if good else 'FAILED'} {name}, {device}, {layout}: {same} of {TOKENS} tokens, perplexity {ours:.6f}, "
                          f"transformers {score:.6f}", flush=True)
    sys.exit(f"{failed} differ" if failed else 0)


main()
