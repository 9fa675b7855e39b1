#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our checkpoints read by the safetensors package and by PyTorch's Distributed Checkpoint, and a file of the package read
by us. Needs both; run by hand.

usage: safetensors_oracle.py WRITE_CHECKPOINT      (a program of the build: bin/write_checkpoint)
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def expected(tensor):
    numel = 1
    for size in tensor["shape"]:
        numel *= size
    return (torch.arange(numel) * 3 + 1).to(DTYPES[tensor["dtype"]]).reshape(tensor["shape"])


def read_with_safetensors(folder, manifest):
    slices = 0
    for name, tensor in manifest["tensors"].items():
        whole = expected(tensor)
        for slice_ in tensor["slices"]:
            with safe_open(str(folder / slice_["file"]), framework="pt") as file:
                part = file.get_tensor(name)
            box = tuple(slice(o, o + n) for o, n in zip(slice_["offsets"], slice_["shape"]))
            assert part.dtype == whole.dtype and torch.equal(part, whole[box]), (name, slice_)
            slices += 1
    print(f"safetensors: {slices} slices are right")


def read_with_dcp(folder, manifest):
    reader = dcp.HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in manifest["tensors"].items():
        assert list(known[name].size) == tensor["shape"] and len(known[name].chunks) == len(tensor["slices"]), name
    state = {name: torch.zeros_like(expected(tensor)) for name, tensor in manifest["tensors"].items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    for name, tensor in manifest["tensors"].items():
        assert torch.equal(state[name], expected(tensor)), name
    print(f"torch {torch.__version__} HuggingFaceStorageReader: {len(state)} tensors are right")


def write_with_safetensors(program, work):
    """Read back by C++, and written by C++ byte for byte as the package does."""
    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor([[1, 2, 3]], dtype=torch.bfloat16),
               "flags": torch.tensor([True, False]), "n": torch.tensor(5), "none": torch.zeros(0, 3),
               "half": torch.arange(5, dtype=torch.float16), "small": torch.arange(3, dtype=torch.int8)}
    path = pathlib.Path(work) / "python.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    printed = subprocess.run([program, "print", path], check=True, capture_output=True, text=True).stdout
    lines = {line.split(" ")[0]: line for line in printed.splitlines()}
    assert lines.keys() == tensors.keys(), printed
    for name, tensor in tensors.items():
        data = bytes(tensor.flatten().view(torch.uint8).tolist())
        assert lines[name].endswith(f"{crc32c(data):08x}"), lines[name]
    print(f"C++ reads the package's file: {len(tensors)} tensors are right, in this order: {' '.join(lines)}")

    golden = pathlib.Path(work) / "golden.safetensors"
    save_file({"b": tensors["b"], "a": tensors["a"]}, str(golden), metadata={"format": "pt"})
    header = (b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
              b'"a":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}  ')
    data = bytes.fromhex("0000803f00000040803f00404040")
    assert golden.read_bytes() == len(header).to_bytes(8, "little") + header + data
    print("the package writes the bytes of tests/formats/safetensors_test.cpp")


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as work:
        run = subprocess.run([program, "save", work + "/checkpoints"], check=True, capture_output=True, text=True)
        folder = pathlib.Path(run.stdout.strip())
        manifest = json.loads((folder / "manifest.json").read_text())
        read_with_safetensors(folder, manifest)
        read_with_dcp(folder, manifest)
        write_with_safetensors(program, work)


if __name__ == "__main__":
    main()
