#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads what the C++ side wrote with nothing but struct and json, as docs/checkpoints.md describes it.

usage: read_checkpoint_test.py WRITE_CHECKPOINT
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

BLOCK = 1 << 20
FORMATS = {"F32": "f", "I64": "q", "U8": "B", "BF16": "H"}


def crc32c(data):
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def unique(pairs):
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), keys
    return dict(pairs)


def read_safetensors(data):
    """Metadata, and for each tensor its dtype, shape and values."""
    (size,) = struct.unpack_from("<Q", data)
    assert (8 + size) % 8 == 0
    header = json.loads(data[8 : 8 + size], object_pairs_hook=unique)
    body = data[8 + size :]
    metadata = header.pop("__metadata__")
    end = 0
    tensors = {}
    for name, entry in header.items():
        begin, next_end = entry["data_offsets"]
        assert begin == end, name
        end = next_end
        code = FORMATS[entry["dtype"]]
        assert begin % struct.calcsize(code) == 0, name
        values = [item[0] for item in struct.iter_unpack("<" + code, body[begin:end])]
        if entry["dtype"] == "BF16":
            values = [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in values]
        tensors[name] = entry["dtype"], entry["shape"], values
    assert end == len(body)
    return metadata, tensors


def indices(whole, offsets, shape):
    """Row-major places in the whole tensor of a slice's elements."""
    places = [0]
    for size, offset, count in zip(whole, offsets, shape):
        places = [place * size + offset + i for place in places for i in range(count)]
    return places


def check(folder):
    text = (folder / "manifest.json").read_bytes()
    body, _, seal = text.rpartition(b',\n"crc32c": ')
    assert int(json.loads(seal[:10]), 16) == crc32c(body)
    manifest = json.loads(text, object_pairs_hook=unique)
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("lockstep.checkpoint", 2, 7)
    assert manifest["state"] == {"samples": 1000} and manifest["config"] == {"layers": 2}
    assert sorted(manifest["files"]) == [f"shard-0000{i}-model-0000{part}-of-00002.safetensors"
                                         for i in (1, 2, 3) for part in (1, 2)]

    files = {}
    for name, record in manifest["files"].items():
        data = (folder / name).read_bytes()
        blocks = [f"{crc32c(data[i : i + BLOCK]):08x}" for i in range(0, len(data), BLOCK)]
        assert record == {"bytes": len(data), "crc32c": blocks}, name
        metadata, files[name] = read_safetensors(data)
        assert metadata["format"] == "pt" and metadata["DCP_VERSION"] == "1.0"
        sharding = json.loads(metadata["DCP_SHARDING_INFO"])
        assert sharding.keys() == files[name].keys()
        for key, info in sharding.items():
            slices = manifest["tensors"][key]["slices"]
            offsets = [slice_["offsets"] for slice_ in slices if slice_["file"] == name]
            assert offsets == [info["saved_offsets"]] and info.keys() == {"saved_offsets"}, key

    assert len(manifest["tensors"]) == 7
    for name, tensor in manifest["tensors"].items():
        found = {}
        for slice_ in tensor["slices"]:
            dtype, shape, values = files[slice_["file"]][name]
            assert dtype == tensor["dtype"] and shape == slice_["shape"], name
            places = indices(tensor["shape"], slice_["offsets"], shape)
            assert len(places) == len(values) and not found.keys() & set(places), name
            found.update(zip(places, values))
        assert found == {i: i * 3 + 1 for i in indices(tensor["shape"], [0] * 9, tensor["shape"])}, name


def main():
    with tempfile.TemporaryDirectory() as work:
        run = subprocess.run([sys.argv[1], "save", work + "/checkpoints"], check=True, capture_output=True, text=True)
        folder = pathlib.Path(run.stdout.strip())
        assert folder == pathlib.Path(work) / "checkpoints" / "step-00000007"
        check(folder)
        shard = folder / "shard-00001-model-00001-of-00002.safetensors"
        printed = subprocess.run([sys.argv[1], "print", shard], check=True, capture_output=True, text=True).stdout
        value = struct.pack("<q", 1)
        assert f"scalar I64 () {crc32c(value):08x}\n" in printed, printed
    print("read_checkpoint_test: ok")


if __name__ == "__main__":
    main()
