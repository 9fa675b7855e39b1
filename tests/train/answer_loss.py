# SPDX-License-Identifier: Apache-2.0
"""The loss on answers, stated plainly: cross entropy, summed over the tokens of the completions and their end of text,
divided by how many these are.

    answer_loss.py MODEL SEQ_LEN END_OF_TEXT RECORDS.jsonl ...

MODEL is a Hugging Face folder of a GPT-2 whose tokens are bytes. Prints the loss on each file.
"""
import json
import os
import struct
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "model"))
import reference


def read_safetensors(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name.removeprefix("transformer.")] = torch.frombuffer(data[begin:end], dtype=torch.float32).reshape(
            entry["shape"])
    return tensors


def main(model, seq_len, end_of_text, *files):
    with open(f"{model}/config.json") as file:
        config = json.load(file)
    weights = {name: value.double() for name, value in read_safetensors(f"{model}/model.safetensors").items()}
    for path in files:
        total, count = 0.0, 0
        for line in open(path):
            record = json.loads(line)
            prompt, completion = list(record["prompt"].encode()), list(record["completion"].encode()) + [end_of_text]
            tokens = torch.tensor(prompt + completion)[: seq_len + 1]
            logits = reference.gpt2(config, tokens[None, :-1], weights)[0]
            answers = slice(len(prompt) - 1, None)
            total += torch.nn.functional.cross_entropy(logits[answers], tokens[1:][answers], reduction="sum").item()
            count += len(tokens) - len(prompt)
        print(repr(total / count))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
