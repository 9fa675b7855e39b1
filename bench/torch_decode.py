# SPDX-License-Identifier: Apache-2.0
"""The peer of bench_decode: greedy text from transformers' Llama with random weights on one GPU, bfloat16.

    torch_decode.py MODEL TEXTS PROMPT TOKENS [static]      MODEL: one of llama_sizes.py; static: a static cache, and a compiled forward

Prints one JSON line: the time to the first tokens, and tokens per second after them.
"""
import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama_sizes import LARGE, SIZES


def main():
    name, texts, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:5])
    static = "static" in sys.argv[5:]
    size = {**SIZES, **LARGE}[name]
    config = LlamaConfig(vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=size["ffn"], num_hidden_layers=size["layers"],
                         num_attention_heads=size["heads"], num_key_value_heads=size["heads"], max_position_embeddings=4096)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    inputs = torch.arange(texts * prompt, device="cuda").view(texts, prompt) * 7 % size["vocab"]
    extra = dict(cache_implementation="static") if static else {}
    if static:
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def generate(count):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **extra)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    for _ in range(2):
        generate(min(tokens, 8))
    first = min(generate(1) for _ in range(2))
    rest = generate(tokens) - first
    print(json.dumps(dict(peer="transformers" + (" static" if static else ""), model=name, texts=texts, prompt=prompt, first_ms=1e3 * first,
                          tokens_per_s=texts * (tokens - 1) / rest)))


main()
