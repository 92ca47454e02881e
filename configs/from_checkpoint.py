"""What `checkpoint=PATH` brings along: the model and the tokenizer of that checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ..training.checkpoints import find_checkpoint, read_config


def with_checkpoint(composed: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    """The configuration with the checkpoint's model, and its tokenizer, unless they are overridden.

    An override of the group (`model=llama-tiny`) replaces the checkpoint's model, one of a key
    (`model.max_positions=4096`) changes it.

    Raises:
      UserError: there is no checkpoint, or it does not say which model it is of.
    """
    if "model" not in composed or composed.get("checkpoint") is None:
        return composed
    step = find_checkpoint(composed.checkpoint)
    given = {override.key_or_group: override.value() for override in overrides}
    result = OmegaConf.create(OmegaConf.to_container(composed))  # without types: they come later
    assert isinstance(result, DictConfig)
    if "model" not in given:
        result.model = read_config(step)["model"]
        for key, value in given.items():
            if key.startswith("model."):
                OmegaConf.update(result, key, value)
    tokenizer = step.parent.parent / "tokenizer"
    if "data.tokenizer" not in given and result.data.get("tokenizer") is None:
        if tokenizer.is_dir():
            result.data.tokenizer = str(tokenizer)
    return result
