"""The configuration of plan.py: train.py's, and the GPUs to plan for."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import check_choice
from ..planning.targets import NAMES
from .schema import TrainConfig


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Everything that decides what `python plan.py` compiles and prints.

    Attributes:
      target: the GPU: a100, h100, h200, b200, gb200, b300, gb300, vr-nvl72 or rtx-pro-6000.
      devices: how many of them.
      tokens: tokens of the whole training run, for its GPU-hours; null leaves them out.
      price: of one GPU-hour, in any currency, for the cost of `tokens`; null leaves it out.
      json: print one JSON object instead of tables.
      search: try mesh shapes, gradient accumulation and remat policies, keeping batch_size, and
        rank those that fit.
      search_compiles: how many of the search's best estimates are compiled.
    """

    target: str = "b200"
    devices: int = 8
    tokens: float | None = None
    price: float | None = None
    json: bool = False
    search: bool = False
    search_compiles: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("target", self.target, NAMES)
        for name in ("devices", "search_compiles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small: at least 1")
        for name in ("tokens", "price"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value:g} must be positive, or null")
        if self.price is not None and self.tokens is None:
            raise ValueError(f"price={self.price:g} needs tokens=, the tokens of the whole run")
