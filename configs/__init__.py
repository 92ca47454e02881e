"""Typed configuration: dataclasses (schema.py), YAML groups that choose values, and Hydra between.

from fp4zoo.configs import load
config = load(["model=llama-tiny", "precision=bf16"])
"""

from .compose import from_dict, load, to_yaml
from .schema import PrecisionConfig, TrainConfig

__all__ = ["PrecisionConfig", "TrainConfig", "from_dict", "load", "to_yaml"]
