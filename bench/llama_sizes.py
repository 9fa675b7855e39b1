"""The models of trainer.py and torch_llama.py, and the batch of a step."""
SIZES = {
    "162M": dict(layers=12, hidden=768, heads=12, ffn=2048, vocab=50304, rows=32, length=1024),
    "1.2B": dict(layers=16, hidden=2048, heads=32, ffn=8192, vocab=32000, rows=8, length=2048),
}
