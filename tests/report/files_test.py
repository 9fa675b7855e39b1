#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files that a run leaves for other programs: TensorBoard's, read back by Google's protobuf with the public field numbers, and one trace for
Perfetto, in which each flow has both ends; and what a run that was killed by SIGKILL has left.

usage: files_test.py LOCKSTEP
"""
import glob
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def event_class():
    """tensorboard.Event with the fields that scalars need (tensorflow/core/util/event.proto, framework/summary.proto)."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    messages = {
        "Value": [("tag", 1, kinds.TYPE_STRING, ""), ("simple_value", 2, kinds.TYPE_FLOAT, "")],
        "Summary": [("value", 1, kinds.TYPE_MESSAGE, ".t.Value")],
        "Event": [("wall_time", 1, kinds.TYPE_DOUBLE, ""), ("step", 2, kinds.TYPE_INT64, ""), ("file_version", 3, kinds.TYPE_STRING, ""), ("summary", 5, kinds.TYPE_MESSAGE, ".t.Summary")],
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, type_name in fields:
            repeated = name == "Summary"
            added = message.field.add(name=field, number=number, type=kind, label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL)
            if type_name:
                added.type_name = type_name
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("t.Event")
    return message_factory.GetMessageClass(descriptor) if hasattr(message_factory, "GetMessageClass") else message_factory.MessageFactory(pool).GetPrototype(descriptor)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    data = pathlib.Path(path).read_bytes()
    at = 0
    while at < len(data):
        length, check = struct.unpack("<QI", data[at:at + 12])
        assert check == masked(data[at:at + 8]), f"{path}: checksum of the length at {at}"
        body = data[at + 12:at + 12 + length]
        assert struct.unpack("<I", data[at + 12 + length:at + 16 + length])[0] == masked(body), f"{path}: checksum of the record at {at}"
        yield body
        at += 16 + length


def check_tensorboard(run, steps):
    event = event_class()
    files = glob.glob(f"{run}/tensorboard/events.out.tfevents.*")
    assert len(files) == 1, files
    events = [event.FromString(body) for body in records(files[0])]
    assert events[0].file_version == "brain.Event:2", events[0]
    found = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    for step in steps:
        for tag, key in {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr", "speed/step_ms": "step_ms"}.items():
            value = found[step["step"], tag]
            assert abs(value - step[key]) <= 1e-3 + 1e-4 * abs(step[key]), (step["step"], tag, value, step[key])
    assert any(tag == "validation/loss" for _, tag in found), found.keys()
    return len(events)


def check_trace(path):
    events = json.loads(pathlib.Path(path).read_text())
    slices, flows = {}, {}
    for event in events:
        assert event["ph"] in "XMsf", event
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["name"], str) and isinstance(event["args"], dict), event
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            flows.setdefault(event["id"], {})[event["ph"]] = event
    kinds = {}
    for number, ends in flows.items():
        assert set(ends) == {"s", "f"}, (number, ends)
        assert ends["s"]["name"] == ends["f"]["name"]
        for end in ends.values():
            row = slices[end["pid"], end["tid"]]
            assert any(a <= end["ts"] <= b for a, b in row), end
        kinds[ends["s"]["name"]] = kinds.get(ends["s"]["name"], 0) + 1
    return kinds


def main():
    lockstep = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "text.txt"
        text.write_text("".join(f"int f{i * i % 97}(int x) {{ return x + {i % 13}; }}\n" for i in range(400)))
        small = ["--data.path", str(text), "--model.layers", "2", "--model.hidden", "32", "--model.heads", "2", "--train.seq_len", "32", "--train.micro_batch", "2",
                 "--train.global_batch", "8", "--optim.warmup", "2", "--train.threads", "1"]
        run = f"{folder}/run"
        subprocess.run([lockstep, "train", "-n", "2", "--parallel.pp", "2", "--run.dir", run, *small, "--train.steps", "6", "--data.validation", "0.1", "--metrics.tensorboard", "auto",
                        "--metrics.trace", "auto"], check=True, stdout=subprocess.DEVNULL)
        steps = [line for line in map(json.loads, open(f"{run}/metrics.jsonl")) if "loss" in line]
        print("tensorboard:", check_tensorboard(run, steps), "events")
        subprocess.run([lockstep, "report", run, "--trace", f"{folder}/trace.json"], check=True)
        kinds = check_trace(f"{folder}/trace.json")
        # Each micro-batch of each step has a header and a tensor, forward and backward.
        assert kinds["message"] >= 6 * 4 * 4 and kinds["completion"] > 0, kinds
        print("trace:", kinds)
        killed = f"{folder}/killed"
        job = subprocess.Popen([lockstep, "train", "--run.dir", killed, *small, "--train.steps", "1000000"], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for line in job.stdout:  # a line every 10 steps
            if line.startswith("step") and int(line.split("/")[0].split()[1]) >= 30:
                break
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        last = int(line.split("/")[0].split()[1])
        lines = open(f"{killed}/metrics.jsonl").read().split("\n")
        assert lines[-1] == "" and json.loads(lines[-2])["step"] >= last, (last, lines[-2:])
        result = subprocess.run([lockstep, "report", killed, "--text"], check=True, capture_output=True, text=True)
        assert "died" in result.stdout, result.stdout
        print(f"killed after step {last}: the file ends with step {json.loads(lines[-2])['step']}")


if __name__ == "__main__":
    main()
