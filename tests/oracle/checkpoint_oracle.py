#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`lockstep checkpoint export` and `import`, and what the trainer saves, beside transformers and PyTorch's Distributed
Checkpoint. Needs torch with HuggingFaceStorageReader, transformers 4 or 5, safetensors and numpy; run by hand.

usage: checkpoint_oracle.py BUILD_BIN_DIR [tune] [import] [dcp] [export]

The folder has lockstep, lockstep-torch and model_logits. Without parts: all of them.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import torch
import torch.distributed.checkpoint as dcp
import transformers
from families import random_models
from safetensors import safe_open
from safetensors.torch import save_file

MODELS = {
    "gpt": ["--model.kind", "gpt"],
    "gpt, not tied": ["--model.kind", "gpt", "--model.tied", "false"],
    "llama": ["--model.kind", "llama", "--model.kv_heads", "2"],
    "llama, tied": ["--model.kind", "llama", "--model.kv_heads", "2", "--model.tied", "true"],
    "mistral": ["--model.kind", "llama", "--model.kv_heads", "2", "--model.window", "9"],
    "qwen2": ["--model.kind", "llama", "--model.kv_heads", "2", "--model.qkv_bias", "true"],
    "qwen3": ["--model.kind", "llama", "--model.kv_heads", "2", "--model.qk_norm", "true", "--model.head_dim", "24"],
}
LAYOUTS = {
    "1 rank": ["-n", "1"],
    "tp 2, shard full": ["-n", "4", "--parallel.tp", "2", "--parallel.shard", "full"],
    "pp 2": ["-n", "4", "--parallel.pp", "2"],
}
TRAINING = ["--model.layers", "4", "--model.hidden", "64", "--model.heads", "4", "--train.seq_len", "64", "--train.steps", "60",
            "--train.micro_batch", "2", "--train.global_batch", "8", "--optim.lr", "3e-3", "--optim.warmup", "2",
            "--train.device", "cpu", "--train.threads", "1"]
PROMPT = "the quick "
TOKENS = 24
BYTES = 256  # the vocabulary of the tokenizer "bytes"
TYPES = {"F32": numpy.float32, "F64": numpy.float64, "F16": numpy.float16, "I64": numpy.int64, "I32": numpy.int32,
         "U8": numpy.uint8, "I8": numpy.int8, "BOOL": numpy.bool_}


class Lockstep:
    """The commands of a build."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()

    def run(self, *words, program="lockstep", status=0):
        done = subprocess.run([self.folder / program, *map(str, words)], capture_output=True)
        if done.returncode != status:
            sys.exit(f"{program} {' '.join(map(str, words))}: status {done.returncode}, must be {status}\n"
                     f"{done.stdout.decode(errors='replace')}{done.stderr.decode(errors='replace')}")
        return done.stdout

    def train(self, folder, model, layout, text):
        self.run("train", *LAYOUTS[layout], *MODELS[model], *TRAINING, "--data.path", text, "--checkpoint.dir", folder, "--run.dir", "")

    def sample(self, folder):
        """The tokens that it finds most likely after the prompt."""
        out = self.run("sample", "--checkpoint", folder, "--prompt", PROMPT, "--tokens", TOKENS, "--temperature", 0)
        return list(out[len(PROMPT.encode()):-1])


def most_likely(model):
    """The same from a model of transformers, computed without a cache."""
    tokens = list(PROMPT.encode())
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1, :BYTES].argmax()))
    return tokens[-TOKENS:]


def load(folder):
    """As users load it; every tensor of the files must have been used, and none be missing."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (folder, kind, info[kind])
    return model.eval()


def tensors_in(folder):
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():
                assert name not in tensors, (path, name)
                tensors[name] = file.get_tensor(name)
    return tensors


def require_equal(found, expected, what):
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (what, name)


def export_of_a_training(lockstep, work, name, layout, text):
    """Logits of transformers beside ours from the exported folder, and its tokens beside those of the checkpoint."""
    run, out = work / "run", work / "hf"
    lockstep.train(run, name, layout, text)
    lockstep.run("checkpoint", "verify", run)
    lockstep.run("checkpoint", "export", run, out)
    model = load(out).float()
    assert most_likely(model) == lockstep.sample(run), "tokens differ"
    tokens = torch.randint(BYTES, (3, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens).logits.float()
    save_file(dict(tokens=tokens, logits=logits.contiguous()), str(out / "expected.safetensors"))
    said = lockstep.run(out, "1e-4", program="model_logits").decode().strip()
    (out / "expected.safetensors").unlink()
    lockstep.run("checkpoint", "import", out, work / "back")
    lockstep.run("checkpoint", "diff", "--model", run, work / "back")
    print(f"export of {name}, {layout}: {TOKENS} tokens are the same; {said}", flush=True)


def import_of_random_weights(lockstep, work, name, model, model_type):
    """save_pretrained in several files, to a checkpoint and back, in float32 and bfloat16: the same bits."""
    expected = most_likely(model)
    model.save_pretrained(work / "f32", max_shard_size="200KB")
    lockstep.run("checkpoint", "import", work / "f32", work / "run")
    assert lockstep.sample(work / "run") == expected, "tokens differ"
    lockstep.run("checkpoint", "export", work / "run", work / "f32_back", "--max-shard-size", "150KB")
    require_equal(tensors_in(work / "f32_back"), tensors_in(work / "f32"), name)
    back = load(work / "f32_back")
    assert back.config.model_type == model_type, (name, back.config.model_type)
    require_equal(back.state_dict(), model.state_dict(), name)
    tokens = torch.randint(300, (2, 77))
    with torch.no_grad():
        close = torch.allclose(back(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert close, f"{name}: the exported config.json is of another model"

    half = model.to(torch.bfloat16)
    half.save_pretrained(work / "bf16")
    lockstep.run("checkpoint", "import", work / "bf16", work / "wide")
    lockstep.run("checkpoint", "import", work / "bf16", work / "narrow", "--dtype", "bfloat16")
    lockstep.run("checkpoint", "diff", work / "wide", work / "narrow", status=1)
    lockstep.run("checkpoint", "diff", work / "wide", work / "narrow", "--tolerance", "0")
    lockstep.run("checkpoint", "export", work / "wide", work / "bf16_wide", "--dtype", "bfloat16")
    lockstep.run("checkpoint", "export", work / "narrow", work / "bf16_narrow")
    lockstep.run("checkpoint", "export", work / "run", work / "bf16_rounded", "--dtype", "bfloat16")
    saved = tensors_in(work / "bf16")
    for folder in ("bf16_wide", "bf16_narrow", "bf16_rounded"):  # the last: our rounding is torch's
        require_equal(tensors_in(work / folder), saved, f"{name} {folder}")
    require_equal({key: value.to(torch.bfloat16) for key, value in load(work / "bf16_narrow").state_dict().items()},
                  half.state_dict(), name)
    print(f"import of {name}: {len(saved)} tensors have the same bits, in float32 and bfloat16; tokens are the same", flush=True)


def fine_tuned(lockstep, work, name, model):
    """A model of transformers, trained further on prompts and completions, read by transformers again."""
    model.save_pretrained(work / "base")
    data = work / "tune.jsonl"
    data.write_text("".join(json.dumps(dict(prompt=f"{i} plus 1 is ", completion=f"{i + 1}.")) + "\n" for i in range(200)))
    lockstep.run("train", "--model.path", work / "base", "--data.path", data, "--data.tokenizer", "bytes", "--train.seq_len", "32",
                 "--train.steps", "40", "--train.micro_batch", "4", "--optim.lr", "1e-3", "--train.device", "cpu", "--run.dir", work / "tuned")
    lockstep.run("checkpoint", "export", work / "tuned", work / "hf")
    tuned = load(work / "hf").float()
    tokens = torch.randint(BYTES, (3, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = tuned(tokens).logits.float()
        moved = float((logits - model(tokens).logits).abs().max())
    assert moved > 0.1, "the fine-tuning has changed nothing"
    save_file(dict(tokens=tokens, logits=logits.contiguous()), str(work / "hf/expected.safetensors"))
    said = lockstep.run(work / "hf", "1e-4", program="model_logits").decode().strip()
    print(f"fine-tuned {name}: logits moved by {moved:.2f}; {said}", flush=True)


def whole_tensors(folder):
    """Every tensor of a checkpoint, put together from its slices as the manifest says."""
    manifest = json.loads((folder / "manifest.json").read_text())
    wholes, slices = {}, 0
    for name, tensor in manifest["tensors"].items():
        whole = numpy.empty(tensor["shape"], TYPES[tensor["dtype"]])
        filled = numpy.zeros(tensor["shape"], numpy.int64)
        for piece in tensor["slices"]:
            with safe_open(str(folder / piece["file"]), framework="np") as file:
                part = file.get_tensor(name)
            box = tuple(slice(begin, begin + size) for begin, size in zip(piece["offsets"], piece["shape"]))
            assert part.dtype == whole.dtype and list(part.shape) == piece["shape"], (name, piece)
            whole[box] = part
            filled[box] += 1
            slices += 1
        assert (filled == 1).all(), name
        wholes[name] = torch.from_numpy(whole)
    return wholes, slices


def sharded_save_read_by_dcp(lockstep, work, name, layout, text):
    lockstep.train(work / "run", name, layout, text)
    (folder,) = (work / "run").glob("step-*")
    expected, slices = whole_tensors(folder)
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    require_equal(state, expected, f"{name}, {layout}")
    optimizer = sum(key.startswith("optim.") for key in expected)
    print(f"torch {torch.__version__} loads {name}, {layout}: {len(expected)} tensors in {slices} slices, {optimizer} of them of "
          "the optimizer", flush=True)


def in_folder(step, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        step(arguments[0], pathlib.Path(folder), *arguments[1:])


def main():
    lockstep = Lockstep(sys.argv[1])
    wanted = sys.argv[2:] or ["tune", "import", "dcp", "export"]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "text.txt"
        text.write_text("".join(f"the quick brown fox {i} jumps over {i * i % 97} lazy dogs.\n" for i in range(3000)))
        for name, model, model_type in random_models():
            if "tune" in wanted and name.startswith("qwen3"):
                in_folder(fine_tuned, lockstep, name, model)
            if "import" in wanted:
                in_folder(import_of_random_weights, lockstep, name, model, model_type)
        for name in ("gpt", "llama"):
            for layout in ("tp 2, shard full", "pp 2"):
                if "dcp" in wanted:
                    in_folder(sharded_save_read_by_dcp, lockstep, name, layout, text)
        for name in MODELS:
            for layout in ("1 rank", "tp 2, shard full"):
                if "export" in wanted:
                    in_folder(export_of_a_training, lockstep, name, layout, text)


if __name__ == "__main__":
    main()
