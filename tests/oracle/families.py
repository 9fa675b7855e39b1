# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers with random weights, at least one of each family that Lockstep reads."""
import torch
import transformers

GPT2 = dict(vocab_size=311, n_positions=96, n_embd=64, n_layer=4, n_head=4)
LLAMA = dict(vocab_size=307, hidden_size=96, intermediate_size=208, num_hidden_layers=4, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6)
SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
NO_WINDOW = dict(sliding_window=None)
SLIDING = dict(use_sliding_window=True, sliding_window=11, max_window_layers=0)


def rope(theta, **scaling):
    """As the keyword arguments of a config of transformers 4 or 5."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return dict(rope_parameters=dict(rope_type="default", rope_theta=theta) | scaling)
    return dict(rope_theta=theta, rope_scaling=scaling or None)


def configs():
    """(name, class, config, model_type that an export writes)"""
    t = transformers
    yield "gpt2", t.GPT2LMHeadModel, t.GPT2Config(**GPT2), "gpt2"
    yield "gpt2, not tied", t.GPT2LMHeadModel, t.GPT2Config(**GPT2, tie_word_embeddings=False), "gpt2"
    llama = [("llama", {}), ("llama, tied", dict(tie_word_embeddings=True)), ("llama 3 rope", rope(500000.0, **SCALING)),
             ("llama 3.2: rope, tied, heads of 24", rope(500000.0, **SCALING) | dict(tie_word_embeddings=True, head_dim=24))]
    for name, changes in llama:
        yield name, t.LlamaForCausalLM, t.LlamaConfig(**LLAMA | changes), "llama"
    mistral = [("mistral, window 11", dict(sliding_window=11), "mistral"), ("mistral, window 500", dict(sliding_window=500), "mistral"),
               ("mistral, no window", NO_WINDOW, "llama"), ("mistral, heads of 24", dict(sliding_window=11, head_dim=24), "mistral")]
    for name, changes, written in mistral:
        yield name, t.MistralForCausalLM, t.MistralConfig(**LLAMA | rope(1000000.0) | changes), written
    for name, changes in [("qwen2", {}), ("qwen2, tied", dict(tie_word_embeddings=True)), ("qwen2, window 11", SLIDING)]:
        yield name, t.Qwen2ForCausalLM, t.Qwen2Config(**LLAMA | rope(1000000.0) | changes), "qwen2"
    for name, changes in [("qwen3, heads of 24", dict(head_dim=24)), ("qwen3, tied", dict(head_dim=16, tie_word_embeddings=True)),
                          ("qwen3, window 11", dict(head_dim=32) | SLIDING)]:
        yield name, t.Qwen3ForCausalLM, t.Qwen3Config(**LLAMA | rope(1000000.0) | changes), "qwen3"


def random_models():
    """(name, model, model_type that an export writes). Weights are larger than at the start of a training, so that every part shows."""
    torch.manual_seed(0)
    for name, kind, config, written in configs():
        model = kind(config).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and key.endswith(".weight")
                parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3) + is_norm)
        yield name, model, written
