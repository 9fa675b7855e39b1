#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face `tokenizers` library against the C++ tokenizer. Run by hand where the library is installed.

usage: tokenizers_oracle.py TOKENIZE_LINES [NUM_STRINGS]

Trains tokenizers with the library, saves each as a tokenizer.json, and compares the ids of random strings and of
strings around every character that there is. Ends with status 1 where an id differs.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "data/tokenizer"))
from random_text import random_text  # noqa: E402

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
BATCH = 10000
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|end", "<|"]
ADDED = [AddedToken("   ", normalized=True), AddedToken("\u00e9<x>", normalized=True), AddedToken("<x>!", normalized=False)]


def byte_level(prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(pre_tokenizer, special, added, texts, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def reloaded(tokenizer, path, ignore_merges=False, shuffle=None, old_merges=False):
    """With changes that the library can read but not make. Both sides read the file."""
    saved = json.loads(tokenizer.to_str())
    model = saved["model"]
    model["ignore_merges"] = ignore_merges
    if shuffle:
        shuffle.shuffle(model["merges"])
    if ignore_merges:  # without these, many tokens of the vocabulary can only be whole words
        del model["merges"][::3]
    if old_merges:
        model["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    path.write_text(json.dumps(saved))
    return Tokenizer.from_file(str(path))


def every_character():
    for code in range(0x110000):
        if 0xd800 <= code < 0xe000:
            continue
        c = chr(code)
        yield f"a{c}b {c}1 {c}{c}'{c}  {c}\n{c}\n x{c}  "


def compare(program, name, path, tokenizer, strings, prefix_space=False):
    run = subprocess.run([program, str(path)] + ["--adds-space"] * prefix_space,
                         input="\n".join(map(json.dumps, strings)) + "\n", capture_output=True, text=True)
    if run.returncode != 0:
        print(f"tokenizers_oracle: {name}: {run.stderr}")
        return False
    found = [json.loads(line) for line in run.stdout.splitlines()]
    expected = []
    for i in range(0, len(strings), BATCH):  # an encoding is large
        expected += [encoding.ids for encoding in tokenizer.encode_batch(strings[i:i + BATCH], add_special_tokens=False)]
    different = [i for i in range(len(strings)) if i >= len(found) or found[i] != expected[i]]
    for i in different[:5]:
        print(f"{name}: {json.dumps(strings[i])}\n  expected {expected[i]}\n  found    {found[i] if i < len(found) else None}")
    print(f"tokenizers_oracle: {name}: vocabulary {tokenizer.get_vocab_size()}, {len(strings)} strings, {sum(map(len, expected))} tokens, "
          f"{len(different)} different", flush=True)
    return not different


def main():
    program = sys.argv[1]
    num_strings = int(sys.argv[2]) if len(sys.argv) > 2 else 100000
    rng = random.Random(7)
    contents = SPECIAL + [token.content for token in ADDED] + ["<|endoftext|>"]
    strings = [random_text(rng, contents) for _ in range(num_strings)]
    characters = list(every_character())
    texts = [path.read_text(errors="replace") for path in sorted(pathlib.Path(__file__).resolve().parents[2].rglob("*.cpp"))]
    texts += strings[:5000]
    print(f"tokenizers_oracle: tokenizers {tokenizers.__version__}")

    gpt2 = trained(byte_level(), ["<|endoftext|>"], [], texts, 8000)
    gpt2_prefix = trained(byte_level(prefix_space=True), ["<|endoftext|>"], [], texts, 4000)
    llama3 = trained(split(LLAMA3), SPECIAL, ADDED, texts, 8000)
    removed = trained(split(LLAMA3, "removed", True), SPECIAL, ADDED, texts, 2000)
    qwen2 = trained(split(QWEN2), [], [], texts, 4000)
    same = True
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokenizer.json"
        for name, tokenizer, prefix_space, changes in (
            ("gpt2", gpt2, False, {"old_merges": True}),
            ("gpt2 shuffled", gpt2, False, {"shuffle": rng}),
            ("gpt2 prefix space", gpt2_prefix, True, {}),
            ("llama3", llama3, False, {}),
            ("llama3 ignore_merges", llama3, False, {"ignore_merges": True}),
            ("llama3 removed", removed, False, {}),
            ("qwen2", qwen2, False, {}),
        ):
            tokenizer = reloaded(tokenizer, path, **changes)
            same &= compare(program, name, path, tokenizer, strings, prefix_space)
            same &= compare(program, name + ", sources", path, tokenizer, texts, prefix_space)
            if name in ("gpt2", "llama3"):
                same &= compare(program, name + ", every character", path, tokenizer, characters)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
