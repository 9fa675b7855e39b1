# SPDX-License-Identifier: Apache-2.0
"""Compares the models with those of the transformers package, which must be installed.

    python3 tests/oracle/transformers_oracle.py build/bin/model_logits

Random weights, float32, on the CPU: transformers saves them as its users do, and its logits are put beside them.
"""
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import save_file

GPT2 = dict(vocab_size=311, n_positions=96, n_embd=64, n_layer=4, n_head=4)
LLAMA = dict(vocab_size=307, hidden_size=96, intermediate_size=208, num_hidden_layers=4, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6)
SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def models():
    torch.manual_seed(0)
    yield "gpt2", transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    yield "llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    yield "llama, tied", transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True))
    try:  # transformers 5
        scaled = transformers.LlamaConfig(**LLAMA, rope_parameters=dict(rope_theta=500000.0, **SCALING))
    except TypeError:
        scaled = transformers.LlamaConfig(**LLAMA, rope_theta=500000.0, rope_scaling=SCALING)
    yield "llama 3 rope", transformers.LlamaForCausalLM(scaled)


def main(program):
    failed = 0
    for name, model in models():
        model.eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            for parameter in model.parameters():  # larger than at the start, so that every part shows
                parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3) + (parameter.dim() == 1))
            tokens = torch.randint(300, (3, 77))
            logits = model(tokens).logits.float()
            # Several files, as large models have.
            model.save_pretrained(folder, max_shard_size="200KB")
            save_file(dict(tokens=tokens, logits=logits.contiguous()), f"{folder}/expected.safetensors")
            run = subprocess.run([program, folder, "1e-4"], capture_output=True, text=True)
            print(f"{name}: {'equal' if run.returncode == 0 else 'DIFFERENT'}: {run.stdout}{run.stderr}", end="")
            failed += run.returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1])
