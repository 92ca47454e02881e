"""A run's functions and shapes, made from its configuration without allocating anything."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .. import models
from ..errors import UserError
from ..numerics import Recipe, choose_backend, get_recipe
from ..numerics.platform import COMPILER_OPTIONS, DeviceKind, compiling_for
from . import memory
from .auto_mesh import choose_mesh
from .chunked_loss import choose_chunks
from .optimizer import make_optimizer, make_schedule
from .sharding import MeshConfig, batch_sharding, make_mesh, shard_like_parameters
from .state import Parameters, TrainState, abstract_model, split_model
from .step import StepConfig, make_train_step

if TYPE_CHECKING:
    from ..configs.schema import TrainConfig

Batch = dict[str, np.ndarray]

_LOWERING = {"gpu": "cuda", "cpu": "cpu"}  # a device's platform -> what `lower` calls it

_BATCH_DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "loss_mask": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
}


class Program:
    """What a configuration means on this machine's devices.

    Attributes:
      mesh: over all devices.
      device: what each of them is.
      mesh_reason: why this one, if it was chosen; else None.
      platform: of the devices, "cpu" or "gpu".
      plan: the model's precision plan.
      backends: where each FP4 linear of a block runs, and why.
      state: the training state as shapes with shardings.
      num_parameters: of the model.
      loss_chunks: parts that a device's tokens go through head and loss in.
      finish_step: first step of the high-precision-forward finish; never reached without one.

    Raises (on construction):
      UserError: if model, mesh, batch or schedule do not fit together.
    """

    def __init__(
        self,
        config: TrainConfig,
        devices: Sequence[Any] | None = None,
        *,
        available: int | None = None,
    ):
        """devices: those to run on, by default all of JAX's. Devices of a topology
        (`jax.experimental.topologies`) can be compiled for, not run on. available: bytes of memory
        per device, by which mesh=auto chooses; by default what is free."""
        self.config = config
        self.recipe = get_recipe(config.precision.recipe)
        devices = jax.devices() if devices is None else list(devices)
        self.device = DeviceKind.of(devices[0])
        self.platform = self.device.platform
        model: Any
        model, self._graphdef, parameters = abstract_model(lambda: self._create(self.recipe))
        self.plan, self.backends = model.plan, model.backends
        mesh_config, self.mesh_reason = self._choose_mesh(parameters, devices, available)
        self.mesh = make_mesh(mesh_config, devices)
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(parameters))
        finish = config.precision.forward_finish
        if finish:  # built when it is reached, refused now
            high = self.recipe.with_high_precision_forward()
            choose_backend(config.backend, high, self.device)
        self.finish_step = round(config.max_steps * (1 - finish)) if finish else sys.maxsize

        self._schedule = make_schedule(config.optimizer, config.max_steps)
        self._optimizer = make_optimizer(config.optimizer, self._schedule)
        shapes = jax.eval_shape(self._initial, parameters)
        self._shardings = shard_like_parameters(shapes, parameters, self.mesh)
        self.state: TrainState = jax.tree.map(_sharded, shapes, self._shardings)

        self._accumulation = config.gradient_accumulation
        self._rows = config.batch_size // self._accumulation
        self._train_batch = self._batch_shapes((self._accumulation, self._rows))
        self._evaluation_batch = self._batch_shapes((self._rows,))
        tokens = self._train_batch["tokens"]
        self._tokens_here = math.prod(tokens.sharding.shard_shape(tokens.shape)[1:])
        self.loss_chunks = self._loss_chunks()

    # Memory

    def estimate_memory(self) -> memory.MemoryEstimate:
        """Bytes per device, from shapes alone."""
        config, parameters = self.config, self.state.parameters
        parameter_bytes = memory.sharded_bytes(parameters, self._shardings.parameters)
        copies = 2 if self._accumulation > 1 else 1  # the sum and the microbatch's own
        return memory.MemoryEstimate(
            parameters=parameter_bytes,
            optimizer=memory.sharded_bytes(self.state.optimizer, self._shardings.optimizer),
            gradients=copies * parameter_bytes,
            activations=memory.activation_bytes(
                config.model,
                self.recipe,
                tokens=self._tokens_here,
                loss_chunks=self.loss_chunks,
                sequence_length=config.sequence_length,
                activation_size=jnp.dtype(config.precision.activation_dtype).itemsize,
                remat=config.remat,
                on_cpu=self.platform == "cpu",
                packed=models.packs_residuals(self.backends),
                tensor=self.mesh.shape["tensor"],
                expert=self.mesh.shape["expert"],
                fsdp=self.mesh.shape["fsdp"],
            ),
        )

    # Functions

    def is_finish(self, step: int) -> bool:
        """Whether the step after `step` finished ones has the high-precision forward pass."""
        return step >= self.finish_step

    def graphdef(self, *, finish: bool = False) -> nnx.GraphDef:
        """The model without its parameters. finish: the variant whose forward GEMMs are BF16."""
        return self._finish_graphdef if finish else self._graphdef

    @functools.cached_property
    def _finish_graphdef(self) -> nnx.GraphDef:
        recipe = self.recipe.with_high_precision_forward()
        return abstract_model(lambda: self._create(recipe))[1]

    def compile_train_step(self, *, finish: bool = False) -> Any:
        """The step, compiled for this run's shapes: (state, batch) -> (state, metrics), see
        `make_train_step`. The state is donated."""
        with jax.set_mesh(self.mesh):  # Transformer Engine asks for it when XLA partitions
            return self.lower_train_step(finish=finish).compile()

    def lower_train_step(self, *, finish: bool = False) -> Any:
        """The step's program before XLA optimises it."""
        step = make_train_step(
            self.graphdef(finish=finish),
            self._optimizer,
            self._schedule,
            StepConfig(
                seed=self.config.seed,
                clip_norm=self.config.optimizer.clip_norm,
                auxiliary_weights=self._auxiliary_weights(),
                loss_chunks=self.loss_chunks,
            ),
        )
        replicated = NamedSharding(self.mesh, PartitionSpec())
        jitted = jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(self._shardings, replicated),
            compiler_options=COMPILER_OPTIONS,
        )
        with jax.set_mesh(self.mesh), compiling_for(self.device):  # the layers ask for both
            traced = jitted.trace(self.state, self._train_batch)
            if self.platform == jax.default_backend():
                return traced.lower()
            return traced.lower(lowering_platforms=(_LOWERING[self.platform],))

    def initial_state(self) -> TrainState:
        """Allocates the state before the first step; the parameters depend on the seed alone."""

        def create() -> TrainState:
            return self._initial(split_model(self._create(self.recipe))[1])

        return jax.jit(create, out_shardings=self._shardings)()

    def state_from(self, parameters: Parameters) -> TrainState:
        """The state before the first step, with these parameters, which it takes over."""
        initial = jax.jit(self._initial, out_shardings=self._shardings, donate_argnums=0)
        return initial(parameters)

    @functools.cached_property
    def batch_rows(self) -> np.ndarray:
        """Numbers of the rows of a batch that this process's devices hold, ascending."""
        in_microbatch = self._rows_here(self._train_batch)
        first_rows = np.arange(self._accumulation) * self._rows
        return (first_rows[:, None] + in_microbatch).ravel()

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """A training batch on the devices, as [A, B / A, T]; from every process its `batch_rows`,
        arrays [rows, T]."""
        shape = (self._accumulation, -1, self.config.sequence_length)
        parts = {name: array.reshape(shape) for name, array in batch.items()}
        return self._put(parts, self._train_batch)

    def place_for_evaluation(self, batch: Batch) -> dict[str, jax.Array]:
        """A validation batch on the devices; from every process the whole, arrays [B / A, T]."""
        rows = self._rows_here(self._evaluation_batch)
        parts = {name: array[rows] for name, array in batch.items()}
        return self._put(parts, self._evaluation_batch)

    @property
    def evaluation_rows(self) -> int:
        """Rows of a validation batch: as many as of a microbatch, so that they fit likewise."""
        return self._rows

    # Details

    def _create(self, recipe: Recipe) -> nnx.Module:
        config = self.config
        with compiling_for(self.device):
            return models.create(
                config.model,
                recipe=recipe,
                rules=config.precision.rules,
                remat=config.remat,
                activation_dtype=config.precision.activation_dtype,
                backend=config.backend,
                rngs=nnx.Rngs(config.seed),
            )

    def _initial(self, parameters: Parameters) -> TrainState:
        return TrainState.create(parameters, self._optimizer, self.config.precision.loss_scale)

    def _choose_mesh(
        self, parameters: Parameters, devices: list[Any], available: int | None
    ) -> tuple[MeshConfig, str | None]:
        config = self.config
        if not config.mesh.is_open or len(devices) == 1:
            return config.mesh, None
        first_host = devices[0].process_index
        choice = choose_mesh(
            config,
            parameters,
            num_devices=len(devices),
            devices_per_host=sum(device.process_index == first_host for device in devices),
            available=memory.available_bytes(devices) if available is None else available,
            on_cpu=self.platform == "cpu",
            packed=models.packs_residuals(self.backends),
        )
        return choice.config, choice.reason

    def _loss_chunks(self) -> int:
        chunks, tokens = self.config.loss_chunks, self._tokens_here
        if chunks is None:
            vocab_size = self.config.model.vocab_size // self.mesh.shape["tensor"]
            return choose_chunks(tokens, vocab_size, self.config.model.embed_dim)
        if tokens % chunks:
            raise UserError(
                f"loss_chunks={chunks} does not divide the {tokens} tokens that a device has of a "
                "microbatch: choose a divisor, or null"
            )
        return chunks

    def _auxiliary_weights(self) -> tuple[tuple[str, float], ...]:
        moe = self.config.model.moe
        if moe is None:
            return ()
        return (
            ("load_balance_loss", moe.load_balance_loss_weight),
            ("router_z_loss", moe.router_z_loss_weight),
        )

    def _batch_shapes(self, rows: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (*rows, self.config.sequence_length)
        sharding = batch_sharding(self.mesh, shape)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for name, dtype in _BATCH_DTYPES.items()
        }

    def _rows_here(self, like: dict[str, jax.ShapeDtypeStruct]) -> np.ndarray:
        """Rows, the last axis but one, that this process's devices hold of such a batch."""
        shape = like["tokens"].shape
        places = like["tokens"].sharding.addressable_devices_indices_map(shape).values()
        rows = [np.arange(shape[-2])[place[-2]] for place in places if place is not None]
        return np.unique(np.concatenate(rows))

    def _put(self, batch: Batch, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Arrays [..., rows here, T] of each process, as parts of whole ones, on the devices."""
        if jax.process_count() == 1:
            return jax.device_put(batch, {name: like[name].sharding for name in batch})
        rows = self._rows_here(like)

        def part(array: np.ndarray, place: tuple[slice, ...] | None) -> np.ndarray:
            assert place is not None
            *before, of_rows, of_tokens = place
            begin, end, _ = of_rows.indices(like["tokens"].shape[-2])
            here = slice(*np.searchsorted(rows, (begin, end)))
            return array[*before, here, of_tokens]

        return {
            name: jax.make_array_from_callback(
                like[name].shape, like[name].sharding, functools.partial(part, array)
            )
            for name, array in batch.items()
        }


def _sharded(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
