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
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "data/tokenizer"))
from bpe_reference import composing  # noqa: E402
from random_text import META, SPACED, random_text  # noqa: E402

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


def trained(pre_tokenizer, special, added, texts, vocab_size, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def sentencepiece(texts, vocab_size, joined=False):
    """As those of Llama 2 and Mistral: characters with U+2581 for spaces, rare ones as bytes. `joined`: tokens may go on over a space.
    Spaces are a matter of the normalizer or of the pre-tokenizer, which with_spaces() sets."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", META)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".{1,12}") if joined else Regex(f"{META}*[^{META}]+"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, limit_alphabet=300)
    tokenizer.train_from_iterator(texts, trainer)
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    saved["normalizer"] = saved["pre_tokenizer"] = None
    saved["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": META}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return Tokenizer.from_str(json.dumps(saved))


def with_spaces(tokenizer, scheme=None, split=False, added=()):
    """Without a scheme the normalizer puts U+2581 before every text; else Metaspace does, before those that the scheme names."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=META, prepend_scheme=scheme, split=split)
    tokenizer.add_tokens(list(added))
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


def compare(program, name, path, tokenizer, strings, changes_text=False):
    """`changes_text`: decoding does not give the text back; the library's decoding is compared instead."""
    run = subprocess.run([program, str(path)] + ["--decode"] * changes_text,
                         input="\n".join(map(json.dumps, strings)) + "\n", capture_output=True, text=True)
    if run.returncode != 0:
        print(f"tokenizers_oracle: {name}: {run.stderr}")
        return False
    found = [json.loads(line) for line in run.stdout.splitlines()]
    if changes_text:
        saved = json.loads(tokenizer.to_str())
        strips = "Strip" in json.dumps(saved["decoder"])  # the library takes away the space before the first word
        texts = [text[1:] if strips and text.startswith(" ") else text for _, text in found]
        found = [ids for ids, _ in found]
        if not any(token["normalized"] for token in saved["added_tokens"]):  # whose decoding differs between versions
            decoded = tokenizer.decode_batch(found, skip_special_tokens=False)
            wrong = [i for i in range(len(strings)) if decoded[i] != texts[i]]
            for i in wrong[:5]:
                print(f"{name}: {json.dumps(strings[i])}\n  expected {json.dumps(decoded[i])}\n  decoded  {json.dumps(texts[i])}")
            if wrong:
                print(f"tokenizers_oracle: {name}: {len(wrong)} texts are decoded differently")
                return False
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
    qwen_nfc = trained(split(QWEN2), ["<|endoftext|>", "<|im_start|>"], [], texts, 4000, normalizers.NFC())
    spaced = [random_text(rng, ["<s>", "</s>", "<unk>", META, "<0x41>"], SPACED) for _ in range(num_strings)]
    meta, joined = sentencepiece(texts, 4000), sentencepiece(spaced[:5000], 1500, joined=True)
    same = True
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokenizer.json"
        for name, tokenizer, changes_text, changes in (
            ("gpt2", gpt2, False, {"old_merges": True}),
            ("gpt2 shuffled", gpt2, False, {"shuffle": rng}),
            ("gpt2 prefix space", gpt2_prefix, True, {}),
            ("llama3", llama3, False, {}),
            ("llama3 ignore_merges", llama3, False, {"ignore_merges": True}),
            ("llama3 removed", removed, False, {}),
            ("qwen2", qwen2, False, {}),
            ("qwen2 and qwen3, NFC", qwen_nfc, True, {}),
            ("llama2 and mistral, normalizer", with_spaces(meta), True, {"old_merges": True}),
            ("llama2, added tokens", with_spaces(meta, added=ADDED), True, {}),
            ("llama2 shuffled", with_spaces(meta), True, {"shuffle": rng}),
            ("mistral, Metaspace first", with_spaces(meta, "first"), True, {}),
            ("Metaspace always, split", with_spaces(meta, "always", split=True), True, {}),
            ("Metaspace never", with_spaces(meta, "never"), True, {}),
            ("Metaspace, tokens of several words", with_spaces(joined, "first"), True, {}),
            ("Metaspace, ignore_merges", with_spaces(meta, "always", split=True), True, {"ignore_merges": True}),
        ):
            tokenizer = reloaded(tokenizer, path, **changes)
            is_meta = "Metaspace" in name or "llama2" in name
            same &= compare(program, name, path, tokenizer, spaced if is_meta else strings, changes_text)
            same &= compare(program, name + ", sources", path, tokenizer, texts, changes_text)
            if name in ("gpt2", "llama3", "qwen2 and qwen3, NFC", "llama2 and mistral, normalizer"):
                same &= compare(program, name + ", every character", path, tokenizer, characters, changes_text)
            if "NFC" in name:
                same &= compare(program, name + ", marks", path, tokenizer, composing(rng), changes_text)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
