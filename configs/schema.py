"""The configuration of a training run, composed of the dataclasses that the other packages define.

A key exists here or in the class that uses it, and nowhere else: types, defaults and meanings (the
`Attributes:` sections, from which docs/configuration.md is made) are these classes'. The YAML files
beside this file only choose values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..data.config import DataConfig
from ..models.config import ModelConfig
from ..models.precision_plan import PrecisionRules
from ..training.cluster import ClusterConfig
from ..training.loss_scale import LossScaleConfig
from ..training.optimizer import OptimizerConfig
from ..training.sharding import MeshConfig


@dataclass(frozen=True)
class PrecisionConfig:
    """Which arithmetic the model trains in.

    Attributes:
      recipe: the numeric recipe of the linear layers.
      activation_dtype: dtype of activations between layers; parameters and optimizer state are
        always float32.
      rules: which linears of which blocks an FP4 recipe applies to; the others are bf16.
      loss_scale: dynamic loss scaling and the guard against non-finite steps.
      forward_finish: last part of the run, as a share of max_steps, whose forward pass leaves FP4
        (0.05: the last 5 %); null never does.
    """

    recipe: Literal[
        "nvfp4", "nvfp4-no-rht", "nvfp4-no-sr", "nvfp4-1d-weights", "bf16", "fp16", "fp32"
    ] = "nvfp4"
    activation_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    rules: PrecisionRules = field(default_factory=PrecisionRules)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    forward_finish: float | None = None

    def __post_init__(self) -> None:
        if self.forward_finish is not None and not 0 < self.forward_finish < 1:
            raise ValueError(
                f"precision.forward_finish={self.forward_finish:g} is not a share of the run: "
                "give a number between 0 and 1, such as 0.05, or null"
            )


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what `python train.py` does.

    Attributes:
      model: the architecture and its sizes.
      precision: the arithmetic that it trains in.
      data: the text, its tokenizer, and how it is packed into sequences.
      optimizer: AdamW and its learning-rate schedule.
      mesh: how devices are arranged and what is split over them.
      cluster: the processes of a run on several hosts.
      output_dir: folder of this run: config.yaml, metrics.jsonl, TensorBoard files, checkpoints/;
        null makes a new one under runs/.
      seed: seed of the initial parameters, the data order and stochastic rounding.
      max_steps: optimizer steps of the whole run, including those before a resume.
      batch_size: sequences per optimizer step, over all devices.
      sequence_length: tokens per sequence.
      gradient_accumulation: parts that each step's batch is computed in, one after the other, to
        save memory.
      evaluate_every: steps between evaluations on the validation split; 0 evaluates only at the
        end.
      evaluation_batches: batches per evaluation.
      save_every: steps between checkpoints; 0 saves only at the end.
      keep_checkpoints: newest checkpoints kept.
      log_every: steps between rows of metrics.jsonl.
      resume: continue from the newest checkpoint in output_dir when there is one.
      checkpoint: checkpoint to start from instead, a folder; null starts fresh.
      remat: what the backward pass computes again instead of storing: nothing, all but the
        quantised residuals, or everything.
      backend: where FP4 products run: by what the devices can do (auto, which says what it chose
        and why), on the tensor cores of Blackwell (transformer_engine, xla), or emulated anywhere.
      loss_chunks: parts that a device's tokens go through output head and loss in, so that the
        logits of all of them are never in memory at once; null takes the fewest whose logits stay
        below 512 MiB, where that saves memory.
      sample_tokens: tokens of the text sample that is generated at the end; 0 generates none.
    """

    model: ModelConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    output_dir: str | None = None
    seed: int = 0
    max_steps: int = 240
    batch_size: int = 8
    sequence_length: int = 256
    gradient_accumulation: int = 1
    evaluate_every: int = 100
    evaluation_batches: int = 8
    save_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 1
    resume: bool = True
    checkpoint: str | None = None
    remat: Literal["none", "save_quantized", "full"] = "none"
    backend: Literal["auto", "emulated", "xla", "transformer_engine"] = "auto"
    loss_chunks: int | None = None
    sample_tokens: int = 64

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small: at least {least}")
        paths = {"output_dir": self.output_dir, "checkpoint": self.checkpoint}
        for name, path in (paths | {"data.path": self.data.path}).items():
            if path == "":
                raise ValueError(f"{name}= is empty: give a path, or null")
        if self.loss_chunks is not None and self.loss_chunks < 1:
            raise ValueError(f"loss_chunks={self.loss_chunks} is too small: at least 1, or null")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} is too large: below {2**32}")
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"gradient_accumulation={self.gradient_accumulation} does not divide "
                f"batch_size={self.batch_size}: choose a divisor"
            )
        if self.sequence_length > self.model.max_positions:
            raise ValueError(
                f"sequence_length={self.sequence_length} is longer than model.max_positions="
                f"{self.model.max_positions}: shorten it, or raise model.max_positions"
            )


_LEAST = {
    "seed": 0,
    "max_steps": 1,
    "batch_size": 1,
    "sequence_length": 1,
    "gradient_accumulation": 1,
    "evaluate_every": 0,
    "evaluation_batches": 1,
    "save_every": 0,
    "keep_checkpoints": 1,
    "log_every": 1,
    "sample_tokens": 0,
}
