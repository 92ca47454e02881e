"""Writes docs/models.md: `python -m fp4zoo.configs.model_table docs/models.md`."""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

from ..models import ModelConfig, count_parameters
from ..training.memory import GIB, activation_bytes
from .compose import load

_SEQUENCE = 4096
_STATE_BYTES = 16  # a parameter, its gradient and AdamW's two moments, float32 each
_PRECISIONS = {"nvfp4": 2, "bf16": 2, "fp32": 4}  # recipe -> bytes of an activation

_HEADER = f"""\
# Models

Made from `configs/model/*.yaml` by `python -m fp4zoo.configs.model_table docs/models.md`.

**Parameters** counts tied embeddings once, and is compared with the published number in
`tests/models/test_config.py`; **active** is what one token uses of a mixture of experts.

**Memory** is GiB to train on one device, the sum over all of them when the state is split: float32
parameters, gradients and AdamW's moments ({_STATE_BYTES} bytes a parameter), and the activations of
one sequence of {_SEQUENCE:,} tokens (or the model's context) with `remat=save_quantized`. It is the
estimate that `train.py` refuses by, not a measurement. FP4 saves time, not this memory: the master
weights are float32 whatever the recipe.

**Tested how**, for every family: logits equal transformers' to 1e-4 on a random small checkpoint,
conversion there and back is byte-identical (`tests/interop/test_hugging_face.py`), and the layers
equal an independent float64 implementation (`tests/models/test_reference.py`). No full-size
checkpoint has been run here.

| `model=` | architecture | parameters | active | memory: nvfp4 | bf16 | fp32 | source |
|---|---|---|---|---|---|---|---|
"""


def table() -> str:
    """Returns docs/models.md."""
    assert __package__ is not None
    folder = resources.files(__package__) / "model"
    files = sorted(folder.iterdir(), key=lambda file: _order(file.name))
    rows = [_row(file.name.removesuffix(".yaml"), file.read_text("utf-8")) for file in files]
    return _HEADER + "\n".join(rows) + "\n"


def _row(name: str, text: str) -> str:
    config = load([f"model={name}"]).model
    count = count_parameters(config)
    memory = [
        f"{_memory(config, count, recipe, size):,.1f}" for recipe, size in _PRECISIONS.items()
    ]
    comments = [line[2:].strip() for line in text.splitlines() if line.startswith("# ")]
    source = re.sub(r"^Source: ", "", " ".join(comments))
    active = _millions(_active(config, count)) if config.moe else ""
    cells = [f"`{name}`", config.architecture, _millions(count), active, *memory, source]
    return f"| {' | '.join(cells)} |"


def _memory(config: ModelConfig, count: int, recipe: str, activation_size: int) -> float:
    tokens = min(_SEQUENCE, config.max_positions)
    activations = activation_bytes(
        config,
        recipe,
        tokens=tokens,
        sequence_length=tokens,
        activation_size=activation_size,
        remat="save_quantized",
        on_cpu=False,
    )
    return (_STATE_BYTES * count + activations) / GIB


def _active(config: ModelConfig, count: int) -> int:
    assert config.moe is not None
    idle = config.moe.num_experts - config.moe.experts_per_token
    return count - config.num_layers * idle * 3 * config.embed_dim * config.mlp_dim


def _millions(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _order(name: str) -> list[str | int]:
    """Numbers in a name by their value: 7b before 13b."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fp4zoo.configs.model_table docs/models.md")
    Path(sys.argv[1]).write_text(table(), encoding="utf-8")
