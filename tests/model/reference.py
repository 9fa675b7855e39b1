# SPDX-License-Identifier: Apache-2.0
"""A plain statement of GPT-2, Llama, Mistral, Qwen2 and Qwen3 in PyTorch, written from their definitions, for comparison.

    reference.py FOLDER

makes random weights of each family, writes them as a Hugging Face folder FOLDER/NAME (config.json, model.safetensors), and
puts tokens and the logits that this statement computes beside them (expected.safetensors).
"""
import json
import math
import os
import struct
import sys

import torch

CONFIGS = {
    "gpt2": dict(model_type="gpt2", vocab_size=61, n_positions=40, n_embd=32, n_layer=3, n_head=4, n_inner=None,
                 activation_function="gelu_new", layer_norm_epsilon=1e-5),
    "llama": dict(model_type="llama", vocab_size=53, hidden_size=48, intermediate_size=72, num_hidden_layers=3,
                  num_attention_heads=6, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64,
                  rms_norm_eps=1e-6, rope_theta=500.0, tie_word_embeddings=False),
    "llama3": dict(model_type="llama", vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=4, hidden_act="silu", max_position_embeddings=64,
                   rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True,
                   rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                     original_max_position_embeddings=32)),
    "mistral": dict(model_type="mistral", vocab_size=53, hidden_size=48, intermediate_size=72, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64,
                    rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, sliding_window=7),
    "qwen2": dict(model_type="qwen2", vocab_size=53, hidden_size=48, intermediate_size=72, num_hidden_layers=3,
                  num_attention_heads=6, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64,
                  rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True, use_sliding_window=False,
                  sliding_window=8, max_window_layers=3),
    "qwen3": dict(model_type="qwen3", vocab_size=53, hidden_size=44, intermediate_size=72, num_hidden_layers=3,
                  num_attention_heads=6, num_key_value_heads=2, head_dim=16, hidden_act="silu", max_position_embeddings=64,
                  rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False, attention_bias=False),
}


def write_safetensors(path, tensors):
    types = {torch.float32: "F32", torch.int64: "I64"}
    header, data = {}, b""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].dtype != torch.int64, item[0])):
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = dict(dtype=types[tensor.dtype], shape=list(tensor.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def attend(q, k, v, window=None):
    """(B, T, H, D) each; position t sees 0 to t, or the last `window` of these."""
    length, width = q.shape[1], q.shape[3]
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width)
    t, s = torch.arange(length)[:, None], torch.arange(length)[None, :]
    hidden = (s > t) | (t - s >= (window or length))
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def layer_norm(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred ** 2).mean(-1, keepdim=True) + epsilon) * weight + bias


def gpt2(config, tokens, weights):
    width, heads, epsilon = config["n_embd"], config["n_head"], config["layer_norm_epsilon"]
    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: tokens.shape[1]]
    for i in range(config["n_layer"]):
        w = {name[len(f"h.{i}."):]: value for name, value in weights.items() if name.startswith(f"h.{i}.")}
        y = layer_norm(x, w["ln_1.weight"], w["ln_1.bias"], epsilon)
        qkv = y @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
        q, k, v = (part.reshape(*x.shape[:2], heads, width // heads) for part in qkv.split(width, -1))
        x = x + attend(q, k, v).reshape(x.shape) @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        y = layer_norm(x, w["ln_2.weight"], w["ln_2.bias"], epsilon)
        y = y @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3)))
        x = x + y @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    return layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"], epsilon) @ weights["wte.weight"].T


def gpt2_shapes(config):
    width, inner = config["n_embd"], 4 * config["n_embd"]
    shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width),
              "ln_f.weight": (width,), "ln_f.bias": (width,)}
    for i in range(config["n_layer"]):
        shapes.update({f"h.{i}.ln_1.weight": (width,), f"h.{i}.ln_1.bias": (width,),
                       f"h.{i}.ln_2.weight": (width,), f"h.{i}.ln_2.bias": (width,),
                       f"h.{i}.attn.c_attn.weight": (width, 3 * width), f"h.{i}.attn.c_attn.bias": (3 * width,),
                       f"h.{i}.attn.c_proj.weight": (width, width), f"h.{i}.attn.c_proj.bias": (width,),
                       f"h.{i}.mlp.c_fc.weight": (width, inner), f"h.{i}.mlp.c_fc.bias": (inner,),
                       f"h.{i}.mlp.c_proj.weight": (inner, width), f"h.{i}.mlp.c_proj.bias": (width,)})
    return shapes


def rms_norm(x, weight, epsilon):
    return x / torch.sqrt((x ** 2).mean(-1, keepdim=True) + epsilon) * weight


def frequencies(config, width):
    result = []
    for i in range(0, width, 2):
        frequency = config["rope_theta"] ** (-i / width)
        scaling = config.get("rope_scaling")
        if scaling:
            wave, original = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wave > original / low:
                frequency /= scaling["factor"]
            elif wave > original / high:
                smooth = (original / wave - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        result.append(frequency)
    return torch.tensor(result, dtype=torch.float64)


def rotate(x, config):
    """Halves of the last dimension of (B, T, H, D) turn as pairs."""
    half = x.shape[3] // 2
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies(config, x.shape[3]))
    cos, sin = angles.cos().float()[:, None, :], angles.sin().float()[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def llama(config, tokens, weights):
    heads, kv_heads, epsilon = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    window = config["sliding_window"] if config["model_type"] == "mistral" else None
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        w = {name[len(prefix):]: value for name, value in weights.items() if name.startswith(prefix)}
        y = rms_norm(x, w["input_layernorm.weight"], epsilon)

        def project(name, count):
            out = y @ w[f"self_attn.{name}_proj.weight"].T
            if config["model_type"] == "qwen2":
                out = out + w[f"self_attn.{name}_proj.bias"]
            out = out.reshape(*x.shape[:2], count, -1)
            if config["model_type"] == "qwen3" and name != "v":
                out = rms_norm(out, w[f"self_attn.{name}_norm.weight"], epsilon)
            return out

        q, k, v = rotate(project("q", heads), config), rotate(project("k", kv_heads), config), project("v", kv_heads)
        k, v = (part.repeat_interleave(heads // kv_heads, 2) for part in (k, v))
        x = x + attend(q, k, v, window).flatten(2) @ w["self_attn.o_proj.weight"].T
        y = rms_norm(x, w["post_attention_layernorm.weight"], epsilon)
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms_norm(x, weights["model.norm.weight"], epsilon) @ head.T


def llama_shapes(config):
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_proj": (q, width),
                 "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, q),
                 "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
        if config["model_type"] == "qwen3":
            layer.update({"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)})
        shapes.update({f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()})
        if config["model_type"] == "qwen2":
            shapes.update({f"model.layers.{i}.self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", q), ("k", kv), ("v", kv))})
    return shapes


def write_folder(config, folder):
    torch.manual_seed(0)
    model, shapes = (gpt2, gpt2_shapes) if config["model_type"] == "gpt2" else (llama, llama_shapes)
    # Large enough that every part of the model shows in the logits.
    weights = {name: torch.randn(shape) * 0.3 for name, shape in shapes(config).items()}
    tokens = torch.randint(config["vocab_size"], (2, 37))
    logits = model(config, tokens, weights)
    os.makedirs(folder)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    write_safetensors(f"{folder}/model.safetensors", weights)
    write_safetensors(f"{folder}/expected.safetensors", {"tokens": tokens, "logits": logits})


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        write_folder(config, f"{sys.argv[1]}/{name}")
