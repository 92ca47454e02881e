"""Logits of transformers for the checkpoints of checkpoints.py, in float32 on a CPU.

    python tests/interop/make_transformers_logits.py tests/interop/transformers_logits.npz

Needs torch and transformers; the committed file was made with torch 2.13.0 and transformers 5.24.0.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """What transformers computes for a folder, float32 [B, T, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    warnings.filterwarnings("ignore")
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import checkpoints

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, values in checkpoints.CONFIGS.items():
            arrays = checkpoints.tensors(values)
            path = checkpoints.write(Path(folder, name), values, arrays)
            found[name] = logits(path, checkpoints.TOKENS)
            print(name, found[name].std())
    np.savez_compressed(sys.argv[1], **found)
