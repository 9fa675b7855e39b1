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
from families import random_models
from safetensors.torch import save_file


def main(program):
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    failed = 0
    for name, model, _ in random_models():
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            tokens = torch.randint(300, (3, 77))
            logits = model(tokens).logits.float()
            # Several files, as large models have.
            model.save_pretrained(folder, max_shard_size="200KB")
            save_file(dict(tokens=tokens, logits=logits.contiguous()), f"{folder}/expected.safetensors")
            run = subprocess.run([program, folder, "1e-4"], capture_output=True, text=True)
            print(f"{name}: {'equal' if run.returncode == 0 else 'DIFFERENT'}: {run.stdout}{run.stderr}", end="", flush=True)
            failed += run.returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1])
