#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE as its definition has it, in plain Python, against the C++ tokenizer.

usage: bpe_reference.py TOKENIZE_LINES

Trains small tokenizers, writes each as a tokenizer.json, and compares the ids of random strings.
"""
import collections
import itertools
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unicodedata

from random_text import CONTRACTIONS, random_text

NUM_STRINGS = 3000
NUM_MERGES = 250


def character_class(wanted):
    """The characters for which it holds, as the inside of a [] of re."""
    text, first = "", None
    for code in range(0x110001):
        inside = code < 0x110000 and wanted(chr(code))
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            text += f"\\U{first:08x}-\\U{code - 1:08x}"
            first = None
    return text


L = character_class(lambda c: unicodedata.category(c)[0] == "L")
N = character_class(lambda c: unicodedata.category(c)[0] == "N")
# White_Space: str.isspace() has four control characters more.
S = character_class(lambda c: c.isspace() and c not in "\x1c\x1d\x1e\x1f")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")


def compiled(pattern):
    """re has no \\p, and its \\s is another: both are written out."""
    def expand(match):
        text = match[0]
        for name, inside in ((r"\p{L}", L), (r"\p{N}", N), (r"\s", S)):
            text = text.replace(name, inside if match[0][0] == "[" else f"[{inside}]")
        return text.replace(r"\S", f"[^{S}]")
    return re.compile(re.sub(r"\[[^\]]*\]|\\p\{.\}|\\[sS]", expand, pattern))


def alphabet():
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


ALPHABET = alphabet()


def with_merge(symbols, i):
    return symbols[:i] + [symbols[i] + symbols[i + 1]] + symbols[i + 2:]


def train(words):
    """The most frequent pair becomes a token, again and again."""
    counts = collections.Counter(words)
    splits = {word: list(word) for word in counts}
    merges = []
    while len(merges) < NUM_MERGES:
        pairs = collections.Counter()
        for word, count in counts.items():
            for pair in zip(splits[word], splits[word][1:]):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, symbols in splits.items():
            i = 0
            while i + 1 < len(symbols):
                if (symbols[i], symbols[i + 1]) == best:
                    symbols = splits[word] = with_merge(symbols, i)
                i += 1
    return merges


class Reference:
    def __init__(self, pattern, merges, vocab, special, ignore_merges, prefix_space):
        self.pattern = compiled(pattern) if pattern else None
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.vocab, self.special = vocab, special
        self.ignore_merges, self.prefix_space = ignore_merges, prefix_space
        self.known = {}

    def word(self, word):
        if self.ignore_merges and word in self.vocab:
            return [self.vocab[word]]
        symbols = list(word)
        while True:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in zip(symbols, symbols[1:])]
            if min(ranks, default=len(self.ranks)) == len(self.ranks):
                return [self.vocab[symbol] for symbol in symbols]
            symbols = with_merge(symbols, ranks.index(min(ranks)))

    def encode(self, text):
        ids = []
        longest_first = sorted(self.special, key=len, reverse=True)
        for piece in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if self.special else [text]:
            if piece in self.special:
                ids.append(self.special[piece])
            elif piece:
                if self.prefix_space and piece[0] != " ":
                    piece = " " + piece
                for word in self.pattern.findall(piece) if self.pattern else [piece]:
                    word = "".join(ALPHABET[byte] for byte in word.encode())
                    if word not in self.known:
                        self.known[word] = self.word(word)
                    ids += self.known[word]
        return ids


def tokenizer_json(pattern, merges, vocab, special, ignore_merges, prefix_space, old_merges):
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": pattern == GPT2}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for content, id in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level if pattern in (GPT2, None) else {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": vocab,
                  "merges": [" ".join(pair) if old_merges else list(pair) for pair in merges]},
    }


def compare(program, folder, rng, name, pattern, special=(), ignore_merges=False, prefix_space=False, old_merges=False, shuffled=False):
    strings = [random_text(rng, special) for _ in range(NUM_STRINGS)] + CONTRACTIONS + ["", " ", "\n", "\r\n ", "a" * 300]
    find = compiled(pattern).findall if pattern else lambda text: [text]
    words = ["".join(ALPHABET[byte] for byte in word.encode()) for text in strings[:NUM_STRINGS // 10] for word in find(text)]
    merges = train(words)
    if shuffled:  # tokens come into being in another order than their parts
        rng.shuffle(merges)
    vocab = {symbol: id for id, symbol in enumerate(sorted(ALPHABET.values()))}
    for left, right in sorted(merges):
        vocab.setdefault(left + right, len(vocab))
    if ignore_merges:  # words that no merges lead to
        for word in words[::7]:
            vocab.setdefault(word, len(vocab))
    listed, special = special, {}
    new_ids = itertools.count(len(vocab))
    for content in listed:
        special[content] = vocab[content] if content in vocab else next(new_ids)
    reference = Reference(pattern, merges, vocab, special, ignore_merges, prefix_space)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tokenizer_json(pattern, merges, vocab, special, ignore_merges, prefix_space, old_merges)))
    run = subprocess.run([program, str(path)] + ["--adds-space"] * prefix_space, input="\n".join(map(json.dumps, strings)) + "\n",
                         capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"bpe_reference: {name}: {run.stderr}")
    found = [json.loads(line) for line in run.stdout.splitlines()]
    expected = [reference.encode(text) for text in strings]
    different = [i for i in range(len(strings)) if found[i] != expected[i]]
    for i in different[:5]:
        print(f"{name}: {json.dumps(strings[i])}\n  expected {expected[i]}\n  found    {found[i]}")
    print(f"bpe_reference: {name}: {len(strings)} strings, {len(merges)} merges, {len(different)} different")
    return not different


def main():
    program, rng = sys.argv[1], random.Random(1)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|end", "<|", "\u00e9<x>"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        same = [
            compare(program, folder, rng, "gpt2", GPT2, ["<|endoftext|>"], old_merges=True),
            compare(program, folder, rng, "gpt2_prefix_space", GPT2, ["<|endoftext|>"], prefix_space=True),
            compare(program, folder, rng, "llama3", LLAMA3, special, ignore_merges=True),
            compare(program, folder, rng, "llama3_merges", LLAMA3, special),
            compare(program, folder, rng, "shuffled", GPT2, shuffled=True),
            compare(program, folder, rng, "qwen2", QWEN2),
            compare(program, folder, rng, "whole", None),
        ]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
