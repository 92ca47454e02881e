"""The configuration of generate.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that decides what `python generate.py` writes.

    Attributes:
      checkpoint: a run's folder, a converted checkpoint, one step's folder, or a Hugging Face
        folder.
      prompt: the text to go on from; an empty one starts a document.
      max_tokens: tokens that are generated at most.
      temperature: 0 takes the likeliest token each time, 1 samples from the model's distribution.
      top_p: samples from the smallest set of tokens whose probability is at least this.
      seed: seed of the sampling.
      recipe: arithmetic of the linear layers; null means what the model was trained in, and bf16
        for a converted one.
      activation_dtype: dtype between layers; null means what the model was trained in, and bfloat16
        for a converted one.
    """

    checkpoint: str
    prompt: str = ""
    max_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0
    recipe: (
        Literal["nvfp4", "nvfp4-no-rht", "nvfp4-no-sr", "nvfp4-1d-weights", "bf16", "fp16", "fp32"]
        | None
    ) = None
    activation_dtype: Literal["bfloat16", "float16", "float32"] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is too small: at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature:g} must be 0 or more, and finite")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError("prompt is not valid UTF-8: write it as text") from error
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p:g} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be at least 0 and below {2**32}")
