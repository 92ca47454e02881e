import math
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from fp4zoo.errors import UserError
from fp4zoo.training import checkpoints as checkpoints_module
from fp4zoo.training.checkpoints import (
    FOLDER,
    Checkpoints,
    find_checkpoint,
    load_parameters,
    read_shapes,
)
from fp4zoo.training.errors import TrainingFailure
from fp4zoo.training.sharding import MeshConfig, make_mesh, shard_like_parameters
from fp4zoo.training.state import path_name


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def shapes(state, mesh):
    shardings = shard_like_parameters(state, state.parameters, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )


def save(directory, *states, keep=2, data=None):
    with Checkpoints(directory, keep=keep) as checkpoints:
        for state in states:
            checkpoints.save(state, data=data or {"rows_read": 3}, config={"seed": 1})
        checkpoints.wait()


def at_step(state, step):
    return state.replace(step=jnp.int32(step))


def test_everything_comes_back_bit_for_bit(
    trainer, make_batch, poisoned, assert_trees_equal, tmp_path, mesh
):
    made = trainer()
    state = made.state
    for batch in (make_batch(), poisoned(make_batch()), make_batch(seed=1)):
        state, _ = made.step(state, batch)
    save(tmp_path, state, data={"rows_read": 12, "digest": "x"})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 3
        restored, position = checkpoints.restore(shapes(made.state, mesh))
    assert position == {"rows_read": 12, "digest": "x"}
    assert_trees_equal(restored, state)
    assert int(restored.skipped_steps) == 1
    assert float(restored.loss_scale.scale) == 2.0**14
    # And the next step is the same.
    one, _ = made.step(state, make_batch(seed=2))
    two, _ = made.step(restored, make_batch(seed=2))
    assert_trees_equal(one, two)


def test_large_parameters_are_stored_layer_by_layer(
    trainer, assert_trees_equal, tmp_path, mesh, monkeypatch
):
    """So that an export need not hold a whole stack."""
    state = trainer().state
    limit = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.parameters)) // 20
    monkeypatch.setattr(checkpoints_module, "_CHUNK_BYTES", limit)
    save(tmp_path, state)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        restored, _ = checkpoints.restore(shapes(state, mesh))
    assert_trees_equal(restored, state)
    folder = find_checkpoint(tmp_path) / "parameters"
    chunks = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.parameters):
        store = {"driver": "ocdbt", "base": f"file://{folder}", "path": f"{path_name(path)}/"}
        opened = tensorstore.open({"driver": "zarr", "kvstore": store}).result()
        chunks[path_name(path), leaf.nbytes] = opened.chunk_layout.write_chunk.shape
    assert all(4 * math.prod(chunk) <= limit for chunk in chunks.values())
    large = {name for name, size in chunks if name.startswith("blocks.") and size > limit}
    assert large and all(chunk[0] == 1 for (name, _), chunk in chunks.items() if name in large)


def test_a_save_is_not_touched_by_the_steps_that_run_meanwhile(
    trainer, make_batch, assert_trees_equal, tmp_path, mesh
):
    made = trainer()
    donating = jax.jit(made.step, donate_argnums=0)
    state = jax.tree.map(jnp.copy, made.state)
    expected = jax.device_get(state)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, data={}, config={})
        for seed in range(5):
            state, _ = donating(state, make_batch(seed=seed))
        checkpoints.wait()
        restored, _ = checkpoints.restore(shapes(made.state, mesh))
    assert_trees_equal(jax.device_get(restored), expected)


def test_only_the_newest_are_kept(trainer, tmp_path):
    save(tmp_path, *(at_step(trainer().state, step) for step in (1, 2, 3)))
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["2", "3"]


def test_a_state_that_is_not_finite_is_never_saved(trainer, tmp_path):
    state = at_step(trainer().state, 1)
    save(tmp_path, state)
    broken = jax.tree.map(lambda leaf: leaf, state.parameters)
    broken["final_norm"]["scale"] = broken["final_norm"]["scale"].at[0].set(jnp.nan)
    with pytest.raises(TrainingFailure, match="after step 2 .* not finite.* is of step 1"):
        save(tmp_path, at_step(state, 2).replace(parameters=broken))
    assert os.listdir(tmp_path / FOLDER) == ["1"]


def test_a_folder_that_is_gone_fails_the_run_with_the_reason(trainer, tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(trainer().state, 1), data={}, config={})
        checkpoints.wait()
        shutil.move(tmp_path / FOLDER, tmp_path / "moved")
        (tmp_path / FOLDER).touch()
        with pytest.raises(TrainingFailure, match="cannot write a checkpoint to .*Not a directory"):
            checkpoints.save(at_step(trainer().state, 2), data={}, config={})
    assert (tmp_path / "moved" / "1" / "parameters").is_dir()


def test_a_full_disk_fails_the_run_and_the_last_good_checkpoint_stays(tmp_path):
    """With keep=1: the failed save must not have pushed out the good one. A limit on the size of
    files stands for the full disk; the process must end, not hang on Orbax's threads."""
    code = f"""
        import resource, signal, sys, time
        from pathlib import Path
        import jax.numpy as jnp
        import numpy as np
        import optax
        from fp4zoo.training.checkpoints import Checkpoints
        from fp4zoo.training.errors import TrainingFailure
        from fp4zoo.training.loss_scale import LossScaleConfig
        from fp4zoo.training.state import TrainState

        values = jnp.asarray(np.random.default_rng(0).random(200_000))
        parameters = {{"embedding": {{"embedding": values.astype(jnp.float32)}}}}
        state = TrainState.create(parameters, optax.sgd(0.1), LossScaleConfig())
        with Checkpoints(Path({str(tmp_path)!r}), keep=1) as checkpoints:
            checkpoints.save(state.replace(step=jnp.int32(1)), data={{}}, config={{}})
            checkpoints.wait()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            try:
                checkpoints.save(state.replace(step=jnp.int32(2)), data={{}}, config={{}})
                for _ in range(100):  # noticed without waiting for the end of the run
                    checkpoints.check()
                    time.sleep(0.1)
            except TrainingFailure as failure:
                print(failure)
                sys.exit(1)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1, run.stderr
    assert "File too large" in run.stdout
    assert "the newest complete one is of step 1" in run.stdout
    # TensorStore's threads may complain of Orbax's closed event loop; no exception of ours is lost.
    assert "training/checkpoints.py" not in run.stderr
    assert find_checkpoint(tmp_path).name == "1"


def test_an_interrupted_save_is_not_a_checkpoint(trainer, tmp_path):
    save(tmp_path, at_step(trainer().state, 1))
    folder = tmp_path / FOLDER
    shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
    assert find_checkpoint(tmp_path).name == "1"
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(at_step(trainer().state, 3), data={}, config={})
    assert sorted(os.listdir(folder)) == ["1", "3"]  # and what it left is cleared away


def test_a_checkpoint_is_found_from_three_folders(trainer, tmp_path):
    save(tmp_path, *(at_step(trainer().state, step) for step in (9, 10)))
    for path in (tmp_path, tmp_path / FOLDER, tmp_path / FOLDER / "10"):
        assert find_checkpoint(path) == tmp_path / FOLDER / "10"
    assert find_checkpoint(tmp_path / FOLDER / "9").name == "9"


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "nowhere does not exist: looked for"), ("", "holds no complete checkpoint")],
)
def test_a_missing_checkpoint_says_where_it_was_looked_for(tmp_path, name, message):
    with pytest.raises(UserError, match=message) as caught:
        find_checkpoint(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name / FOLDER) in str(caught.value)


def test_another_model_s_checkpoint_is_refused_with_the_names(
    trainer, tiny, tiny_moe, tmp_path, mesh
):
    save(tmp_path, at_step(trainer().state, 1))
    other = trainer(model=tiny_moe)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(UserError, match="is of another model .*mlp.down.kernel.*absent here"):
            checkpoints.restore(shapes(other.state, mesh))
    with pytest.raises(UserError, match="is of another model"):
        load_parameters(find_checkpoint(tmp_path), other.parameters, mesh)


@pytest.mark.parametrize("damage", ["largest file truncated", "metadata gone", "training gone"])
def test_a_damaged_checkpoint_is_one_line(trainer, tmp_path, mesh, damage):
    save(tmp_path, at_step(trainer().state, 1))
    step = find_checkpoint(tmp_path)
    if damage == "training gone":
        shutil.rmtree(step / "training")
    elif damage == "metadata gone":
        (step / "parameters" / "_METADATA").unlink()
    else:
        files = [file for file in (step / "parameters").rglob("*") if file.is_file()]
        max(files, key=lambda file: file.stat().st_size).write_bytes(b"damaged")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(UserError, match=rf"{step} is damaged \(.*\): move that folder away"):
            checkpoints.restore(shapes(trainer().state, mesh))


def test_parameters_load_alone(trainer, assert_trees_equal, tmp_path, mesh):
    made = trainer()
    save(tmp_path, at_step(made.state, 1))
    step = find_checkpoint(tmp_path)
    assert_trees_equal(load_parameters(step, made.parameters, mesh), made.parameters)
    assert read_shapes(step)["final_norm.scale"] == (32,)


def test_parameters_of_another_precision_plan_are_stacked_anew(trainer, tmp_path, mesh):
    made = trainer()
    save(tmp_path, at_step(made.state, 1))
    middle = made.parameters["blocks"]["middle"]
    like = jax.eval_shape(
        lambda: {
            **made.parameters,
            "blocks": {
                "middle": jax.tree.map(lambda leaf: leaf[:1], middle),
                "suffix": jax.tree.map(lambda leaf: leaf[1:], middle),
            },
        }
    )
    loaded = load_parameters(find_checkpoint(tmp_path), like, mesh)
    kernel = loaded["blocks"]["suffix"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(kernel[0], middle["mlp"]["down"]["kernel"][1])


def test_saved_on_eight_devices_restored_on_four_and_on_one(tmp_path):
    code = f"""
        import pathlib
        import jax, numpy as np
        from flax import nnx
        from fp4zoo import models
        from fp4zoo.models import ModelConfig
        from fp4zoo.training.checkpoints import Checkpoints
        from fp4zoo.training.loss_scale import LossScaleConfig
        from fp4zoo.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
        from fp4zoo.training.sharding import MeshConfig, make_mesh, shard_like_parameters
        from fp4zoo.training.state import TrainState, split_model

        config = ModelConfig("llama", 64, 2, 32, 4, 2, 64, 64)
        _, parameters = split_model(models.create(config, recipe="fp32", rngs=nnx.Rngs(0)))
        optimizer = make_optimizer(OptimizerConfig(), make_schedule(OptimizerConfig(), 10))
        state = TrainState.create(parameters, optimizer, LossScaleConfig())
        state = state.replace(step=state.step + 5)

        def shardings(**sizes):
            count = int(np.prod(list(sizes.values())))
            mesh = make_mesh(MeshConfig(**{{"fsdp": 1, **sizes}}), jax.devices()[:count])
            return shard_like_parameters(state, parameters, mesh)

        with Checkpoints(pathlib.Path({str(tmp_path)!r}), keep=1) as checkpoints:
            placed = jax.device_put(state, shardings(data=2, fsdp=2, tensor=2))
            checkpoints.save(placed, data={{}}, config={{}})
            checkpoints.wait()
            for sizes in ({{"fsdp": 4}}, {{"data": 2, "tensor": 2}}, {{"fsdp": 1}}):
                layout = shardings(**sizes)
                shapes = jax.tree.map(
                    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, layout
                )
                restored, _ = checkpoints.restore(shapes)
                for a, b, s in zip(*map(jax.tree.leaves, (restored, state, layout)), strict=True):
                    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
                    assert a.sharding == s
        print("restored")
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert run.stdout == "restored\n", run.stderr
