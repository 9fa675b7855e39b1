#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE and SentencePiece's BPE as their definitions have them, in plain Python, against the C++ tokenizer.

usage: bpe_reference.py TOKENIZE_LINES

Trains small tokenizers, writes each as a tokenizer.json, and compares the ids of random strings.
"""
import collections
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unicodedata

from random_text import CONTRACTIONS, META, SPACED, random_text

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
    def __init__(self, pattern, merges, vocab, special, ignore_merges, prefix_space, nfc=False):
        self.pattern, self.nfc = compiled(pattern) if pattern else None, nfc
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.vocab, self.special = vocab, special
        self.ignore_merges, self.prefix_space = ignore_merges, prefix_space
        self.known = {}

    def word(self, word):
        if self.ignore_merges and word in self.vocab:
            return [self.vocab[word]]
        return self.merged(list(word))

    def merged(self, symbols):
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
                if self.nfc:
                    piece = unicodedata.normalize("NFC", piece)
                if self.prefix_space and piece[0] != " ":
                    piece = " " + piece
                for word in self.pattern.findall(piece) if self.pattern else [piece]:
                    word = "".join(ALPHABET[byte] for byte in word.encode())
                    if word not in self.known:
                        self.known[word] = self.word(word)
                    ids += self.known[word]
        return ids


class MetaReference(Reference):
    """SentencePiece's: characters or their bytes, with U+2581 for spaces. `scheme`: what it is put before; or, with a normalizer
    that does so, None."""

    def __init__(self, merges, vocab, special, ignore_merges, scheme, split):
        super().__init__(None, merges, vocab, special, ignore_merges, False)
        self.scheme, self.split = scheme, split

    def characters(self, word):
        for character in word:
            if character in self.vocab:
                yield character
            else:
                yield from (f"<0x{byte:02X}>" for byte in character.encode())

    def word(self, word):
        if self.ignore_merges and word in self.vocab:
            return [self.vocab[word]]
        return self.merged(list(self.characters(word)))

    def encode(self, text):
        ids, begin = [], True
        longest_first = sorted(self.special, key=len, reverse=True)
        for piece in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if self.special else [text]:
            if piece in self.special:
                ids.append(self.special[piece])
            elif piece:
                piece = piece.replace(" ", META)
                if self.scheme is None or (not piece.startswith(META) and (self.scheme == "always" or self.scheme == "first" and begin)):
                    piece = META + piece
                for word in re.findall(f"{META}?[^{META}]+|{META}", piece) if self.split else [piece]:
                    if word not in self.known:
                        self.known[word] = self.word(word)
                    ids += self.known[word]
            begin &= not piece
        return ids

    def decode(self, ids):
        text = b""
        names = {id: token for token, id in (self.vocab | self.special).items()}
        for id in ids:
            name = names[id]
            is_byte = re.fullmatch("<0x[0-9A-F]{2}>", name) and name not in self.special
            text += bytes([int(name[3:5], 16)]) if is_byte else (name if name in self.special else name.replace(META, " ")).encode()
        return text.decode()


def tokenizer_json(pattern, merges, vocab, special, ignore_merges, prefix_space, old_merges, nfc=False):
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": pattern == GPT2}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for content, id in special.items()],
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": byte_level if pattern in (GPT2, None) else {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": vocab,
                  "merges": [" ".join(pair) if old_merges else list(pair) for pair in merges]},
    }


def meta_json(merges, vocab, special, ignore_merges, scheme, split):
    """As Llama 2's and Mistral's files are, with a normalizer (scheme None) or a pre-tokenizer for the spaces."""
    made = tokenizer_json(None, merges, vocab, special, ignore_merges, False, scheme is None)
    made["normalizer"] = made["pre_tokenizer"] = None
    if scheme is None:
        made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": META}, {
            "type": "Replace", "pattern": {"String": " "}, "content": META}]}
    else:
        made["pre_tokenizer"] = {"type": "Metaspace", "replacement": META, "prepend_scheme": scheme, "split": split}
    made["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": META}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    made["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    return made


def run_program(program, path, strings, *options):
    run = subprocess.run([program, str(path), *options], input="\n".join(map(json.dumps, strings)) + "\n", capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"bpe_reference: {path.stem}: {run.stderr}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def report(name, strings, merges, expected, found):
    different = [i for i in range(len(strings)) if found[i] != expected[i]]
    for i in different[:5]:
        print(f"{name}: {json.dumps(strings[i])}\n  expected {expected[i]}\n  found    {found[i]}")
    print(f"bpe_reference: {name}: {len(strings)} strings, {len(merges)} merges, {len(different)} different")
    return not different


def compare_meta(program, folder, rng, name, scheme, split=False, special=("<s>", "</s>"), ignore_merges=False, joined=False, shuffled=False):
    """`joined`: some tokens go on over a space."""
    strings = [random_text(rng, [*special, META], SPACED) for _ in range(NUM_STRINGS // 3)]
    strings += ["", " ", "  ", META, "\n", "a" * 300, " a" * 200, "<0x41>", "\U0001f600\u4e2d"]
    texts = [META + text.replace(" ", META) for text in strings[:NUM_STRINGS // 10]]
    words = [word for text in texts for word in (re.findall(".{1,12}" if joined else f"{META}*[^{META}]+", text))]
    merges = train(words)
    if shuffled:
        rng.shuffle(merges)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    frequent = [c for c, count in collections.Counter("".join(words)).most_common(150) if count > 1]
    for symbol in frequent + [part for pair in merges for part in ("".join(pair), *"".join(pair))]:
        vocab.setdefault(symbol, len(vocab))
    if ignore_merges:
        for word in words[::5]:
            vocab.setdefault(word, len(vocab))
    special = {content: vocab.setdefault(content, len(vocab)) for content in special}
    reference = MetaReference(merges, vocab, special, ignore_merges, scheme, split)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(meta_json(merges, vocab, special, ignore_merges, scheme, split)))
    expected = [reference.encode(text) for text in strings]
    return report(name, strings, merges, [[ids, reference.decode(ids)] for ids in expected], run_program(program, path, strings, "--decode"))


def compare(program, folder, rng, name, pattern, special=(), ignore_merges=False, prefix_space=False, old_merges=False, shuffled=False,
            nfc=False):
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
    if nfc:
        strings += composing(rng)
    reference = Reference(pattern, merges, vocab, special, ignore_merges, prefix_space, nfc)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tokenizer_json(pattern, merges, vocab, special, ignore_merges, prefix_space, old_merges, nfc)))
    found = run_program(program, path, strings, *["--decode"] * (prefix_space or nfc))
    if nfc:  # also for characters that the vocabulary has no other way to tell apart
        same = [text == unicodedata.normalize("NFC", strings[i]) for i, (_, text) in enumerate(found)]
        if not all(same):
            sys.exit(f"bpe_reference: {name}: {json.dumps(strings[same.index(False)])} becomes {json.dumps(found[same.index(False)][1])}")
    if prefix_space or nfc:
        found = [ids for ids, _ in found]
    return report(name, strings, merges, [reference.encode(text) for text in strings], found)


def composing(rng):
    """Every character that a normalization could change, alone and among marks and letters that it could compose with."""
    # Those of Unicode 3.2: the table ends at 9.0, Python's at another version.
    characters = [chr(code) for code in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs")]
    marks = [c for c in characters if unicodedata.combining(c)]
    changing = [c for c in characters if unicodedata.decomposition(c) and not unicodedata.decomposition(c).startswith("<")] + marks
    changing += [chr(code) for code in [*range(0x1100, 0x1120), *range(0x1160, 0x1180), *range(0x11a0, 0x11d0), 0xac00, 0xac01, 0xac1c]]
    strings = ["".join(changing[i:i + 20]) for i in range(0, len(changing), 20)]
    strings += [f"a{unicodedata.normalize('NFD', c)}{rng.choice(marks)} {rng.choice(marks)}{c}" for c in changing]
    letters = list("aeioun\u0915\u09c7\u0308\u0301 ")
    for _ in range(4000):
        strings.append("".join(rng.choice(rng.choice([marks, changing, letters])) for _ in range(rng.randint(1, 9))))
    return strings


def main():
    program, rng = sys.argv[1], random.Random(1)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|end", "<|", "\u00e9<x>"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        cases = [
            lambda: compare(program, folder, rng, "gpt2", GPT2, ["<|endoftext|>"], old_merges=True),
            lambda: compare(program, folder, rng, "gpt2_prefix_space", GPT2, ["<|endoftext|>"], prefix_space=True),
            lambda: compare(program, folder, rng, "llama3", LLAMA3, special, ignore_merges=True),
            lambda: compare(program, folder, rng, "llama3_merges", LLAMA3, special),
            lambda: compare(program, folder, rng, "shuffled", GPT2, shuffled=True),
            lambda: compare(program, folder, rng, "qwen2", QWEN2, special, nfc=True),
            lambda: compare(program, folder, rng, "whole", None),
            lambda: compare_meta(program, folder, rng, "llama2", None),
            lambda: compare_meta(program, folder, rng, "llama2_shuffled", None, shuffled=True),
            lambda: compare_meta(program, folder, rng, "meta_first", "first"),
            lambda: compare_meta(program, folder, rng, "meta_always_split", "always", split=True, special=["<s>", "</s>", "\u00e9<x>", "<0x41>"]),
            lambda: compare_meta(program, folder, rng, "meta_never", "never", special=()),
            lambda: compare_meta(program, folder, rng, "meta_joined", "first", joined=True),
            lambda: compare_meta(program, folder, rng, "meta_ignore_merges", "always", split=True, ignore_merges=True),
            lambda: compare_meta(program, folder, rng, "meta_ignore_merges_whole", "first", ignore_merges=True),
        ]
        # `make test` takes every other one.
        same = [case() for case in (cases if "LOCKSTEP_TEST_ALL" in os.environ else cases[::2])]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
