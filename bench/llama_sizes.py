# SPDX-License-Identifier: Apache-2.0
"""The models of trainer.py, offload.py and torch_llama.py, and the batch of a step."""
SIZES = {
    "162M": dict(layers=12, hidden=768, heads=12, ffn=2048, vocab=50304, rows=32, length=1024),
    "1.2B": dict(layers=16, hidden=2048, heads=32, ffn=8192, vocab=32000, rows=8, length=2048),
}
# Blocks are computed again in backward; 32k tokens a step.
LARGE = {
    "3.1B": dict(layers=26, hidden=3072, heads=24, ffn=8192, vocab=32000, rows=16, length=2048),
    "6.7B": dict(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, rows=16, length=2048),
    "13B": dict(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000, rows=16, length=2048),
    "22B": dict(layers=48, hidden=6144, heads=48, ffn=16384, vocab=32000, rows=16, length=2048),
    "30B": dict(layers=60, hidden=6656, heads=52, ffn=17920, vocab=32000, rows=8, length=2048),
    "35B": dict(layers=60, hidden=6912, heads=54, ffn=18432, vocab=32000, rows=8, length=2048),
}
