"""Checkpoints: Orbax, asynchronous, complete or not there at all.

A checkpoint is a folder `checkpoints/STEP` with four items:

    parameters   the model's parameters, all that a reader of weights needs
    training     step counters, optimizer, loss scale
    data         position of the data iterator, JSON
    config       the configuration that made it, JSON

Orbax writes into `STEP.orbax-checkpoint-tmp` and renames at the end, so that an interrupted save is
never taken for a checkpoint, and deletes old ones only after the new one is complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ..errors import UserError
from .errors import TrainingFailure
from .sharding import parameter_shardings
from .stacking import restack
from .state import Parameters, TrainState, is_stacked, path_name

PARAMETERS, TRAINING, DATA, CONFIG = "parameters", "training", "data", "config"
FOLDER = "checkpoints"
# Arrays are stored in pieces of at most this, so that who reads one layer need not read the stack.
_CHUNK_BYTES = 128 * 2**20


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving waits for the last save."""

    def __init__(self, run_directory: Path, *, keep: int):
        """run_directory: holds `checkpoints/`, which is created. keep: newest checkpoints kept."""
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # failures are raised, and told once
        self.directory = run_directory.absolute() / FOLDER
        self._is_saving = False
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
                # In the background, a folder that cannot be made leaves threads that wait for it
                # for minutes, and the failed run hangs.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *details: object) -> None:
        if exception_type is not None and jax.process_count() > 1:
            if not issubclass(exception_type, (UserError, TrainingFailure)):
                return  # this process alone failed: the others would not come to the end of a save
        try:
            self._manager.close()
        except Exception as error:
            if exception_type is None:  # else it is failing already
                raise self._failure(error) from error

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, *, data: dict[str, Any], config: dict[str, Any]) -> None:
        """Starts writing a checkpoint; returns once the arrays may be overwritten.

        Raises:
          TrainingFailure: if the state is not finite, or this or an earlier save failed. The
            checkpoints before it remain.
        """
        step = int(state.step)
        if not _all_finite((state.parameters, state.optimizer)):
            raise TrainingFailure(
                f"after step {step} parameters or optimizer state are not finite, so no checkpoint "
                f"is written; {self._newest()}"
            )
        items = ocp.args.Composite(
            **{
                PARAMETERS: _save_arrays(state.parameters),
                TRAINING: _save_arrays(_training_items(state)),
                DATA: ocp.args.JsonSave(data),  # pyright: ignore
                CONFIG: ocp.args.JsonSave(config),  # pyright: ignore
            }
        )
        self._is_saving = True
        try:
            self._manager.save(step, args=items)
        except Exception as error:  # Orbax raises whatever the file system or tensorstore did
            raise self._failure(error) from error

    def check(self) -> None:
        """Raises TrainingFailure if a save in the background has failed; does not wait for one."""
        if self._is_saving and not self._manager.is_saving_in_progress():
            self.wait()  # ended, well or not: Orbax tells only who waits

    def wait(self) -> None:
        """Waits until the newest checkpoint is complete; raises TrainingFailure if it cannot be."""
        self._is_saving = False
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error

    def check_model(self, state: TrainState) -> None:
        """Raises UserError if the newest checkpoint is of another model; reads no arrays."""
        directory = self.directory / str(self.latest_step())
        check_same_parameters(read_shapes(directory), state.parameters, directory)

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """(state, data position) of the newest checkpoint.

        state: shapes with shardings, as this run wants them; the run that saved may have had
          another mesh.

        Raises:
          UserError: if the checkpoint is of another model.
        """
        step = self.latest_step()
        assert step is not None, "restore without a checkpoint"
        self.check_model(state)
        with _reading(self.directory / str(step)):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    **{
                        PARAMETERS: ocp.args.StandardRestore(state.parameters),  # pyright: ignore
                        TRAINING: ocp.args.StandardRestore(  # pyright: ignore
                            _training_items(state)
                        ),
                        DATA: ocp.args.JsonRestore(),  # pyright: ignore
                    }
                ),
            )
        items = restored[TRAINING]
        loss_scale = jax.tree.unflatten(jax.tree.structure(state.loss_scale), items["loss_scale"])
        state = state.replace(
            parameters=restored[PARAMETERS],
            optimizer=items["optimizer"],
            loss_scale=loss_scale,
            **items["counters"],
        )
        return state, restored[DATA]

    def _failure(self, error: Exception) -> TrainingFailure:
        reason = " ".join(str(error).split())
        return TrainingFailure(
            f"cannot write a checkpoint to {self.directory} ({reason}); {self._newest()}"
        )

    def _newest(self) -> str:
        steps = [int(step.name) for step in _complete(self.directory)]  # Orbax counts failed saves
        return f"the newest complete one is of step {max(steps)}" if steps else "there is none"


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def _save_arrays(tree: Any) -> ocp.args.StandardSave:
    def pieces(path: Any, leaf: jax.Array) -> ocp.SaveArgs:
        by_layer = leaf.nbytes > _CHUNK_BYTES and is_stacked(path_name(path))
        return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if by_layer else ())

    return ocp.args.StandardSave(  # pyright: ignore[reportCallIssue]
        tree, save_args=jax.tree_util.tree_map_with_path(pieces, tree)
    )


def _training_items(state: TrainState) -> dict[str, Any]:
    """What is saved besides the parameters, in plain containers: it reads without our classes."""
    return {
        "counters": {
            "step": state.step,
            "skipped_steps": state.skipped_steps,
            "consecutive_skips": state.consecutive_skips,
        },
        "loss_scale": jax.tree.leaves(state.loss_scale),
        "optimizer": state.optimizer,
    }


def find_checkpoint(path: str | Path) -> Path:
    """The step folder that `path` means: a run folder, its checkpoints folder, or a step folder.

    Raises:
      UserError: if there is no complete checkpoint.
    """
    path = Path(path).expanduser().absolute()
    if ".." in path.parts:  # TensorStore refuses them
        path = path.resolve()
    if (path / PARAMETERS).is_dir() and path.name.isdigit():
        return path
    folders = (path / FOLDER, path)
    steps = [step for folder in folders for step in _complete(folder)]
    if not steps:
        what = "holds no complete checkpoint" if path.exists() else "does not exist"
        raise UserError(
            f"checkpoint={path} {what}: looked for STEP/{PARAMETERS} in {folders[0]} and in "
            f"{path}; give a run's folder, its checkpoints folder or one step's folder"
        )
    return max(steps, key=lambda step: int(step.name))


def _complete(folder: Path) -> list[Path]:
    """The step folders in a folder of checkpoints; an incomplete one has another name."""
    if not folder.is_dir():
        return []
    named = [step for step in folder.iterdir() if step.name.isdigit()]
    return [step for step in named if (step / PARAMETERS).is_dir()]


@contextlib.contextmanager
def _reading(step_directory: Path) -> Iterator[None]:
    """Turns whatever Orbax and TensorStore raise about a damaged checkpoint into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"the checkpoint {step_directory} is damaged ({reason}): move that folder away to go "
            "on from the one before it"
        ) from error


def read_shapes(step_directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's parameters by dotted name, without reading them."""
    with _reading(step_directory), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(step_directory / PARAMETERS).item_metadata
        if metadata is None:
            raise ValueError("its metadata is missing")
    leaves = jax.tree_util.tree_leaves_with_path(metadata.tree)
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves}


def read_config(step_directory: Path) -> dict[str, Any]:
    """The configuration that a checkpoint was saved with; at least its "model" is there.

    Raises:
      UserError: if it is missing or damaged.
    """
    path = step_directory / CONFIG / "metadata"  # Orbax's name for the file of a JSON item
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if "architecture" not in config["model"]:
            raise ValueError("it names no architecture")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{step_directory} does not say which model it is of ({path}: {error}): give a "
            "checkpoint of train.py or convert.py"
        ) from error
    return config


def check_same_parameters(
    saved: dict[str, tuple[int, ...]], parameters: Parameters, directory: Path
) -> None:
    """Raises UserError, naming the parameters that differ, unless names and shapes are equal."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    wanted = {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
    differences = [
        f"{name}: {saved.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"the checkpoint {directory} is of another model ({'; '.join(differences[:3])}{more}): "
            "choose the model= and precision= that it was made with, or another output_dir"
        )


def load_parameters(step_directory: Path, parameters: Parameters, mesh: Mesh) -> Parameters:
    """Reads only the parameters of a checkpoint, laid out over `mesh`.

    parameters: the shapes wanted. Blocks that were stacked differently there (another precision
    plan cuts the layers into other segments) are stacked anew.

    Raises:
      UserError: if the checkpoint is of another model.
    """
    with _reading(step_directory), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(step_directory / PARAMETERS).item_metadata
        if metadata is None:
            raise ValueError("its metadata is missing")
        saved = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), metadata.tree
        )
        check_same_parameters(
            _shapes(jax.eval_shape(lambda tree: restack(tree, parameters), saved)),
            parameters,
            step_directory,
        )
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            saved,
            parameter_shardings(saved, mesh),
        )
        restored = checkpointer.restore(step_directory / PARAMETERS, target)

    def fit(tree: Parameters) -> Parameters:  # a converted checkpoint keeps its source's dtype
        restacked = restack(tree, parameters)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), restacked, parameters)

    return jax.jit(fit, out_shardings=parameter_shardings(parameters, mesh))(restored)


def _shapes(tree: Parameters) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
