import dataclasses

import jax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from fp4zoo import models
from fp4zoo.errors import UserError
from fp4zoo.training.sharding import (
    AXIS_NAMES,
    MeshConfig,
    batch_sharding,
    describe_mesh,
    logical_axes,
    make_mesh,
    make_spec,
)
from fp4zoo.training.state import abstract_model, path_name


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.get(name, 1) for name in AXIS_NAMES), AXIS_NAMES)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({}, 1, {"data": 1, "fsdp": 1}),
        ({}, 8, {"data": 1, "fsdp": 8}),
        ({"data": -1, "fsdp": 1}, 8, {"data": 8, "fsdp": 1}),
        ({"tensor": 2}, 8, {"fsdp": 4, "tensor": 2}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_sizes_fill_the_devices(options, devices, expected):
    sizes = MeshConfig(**options).sizes(devices)
    assert {name: sizes[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"tensor": 3}, 8, r"mesh \(tensor=3\) does not divide the 8 device"),
        ({"fsdp": 4}, 8, r"mesh \(fsdp=4\) needs 4 device\(s\) and there are 8"),
        ({"fsdp": 16}, 8, r"mesh \(fsdp=16\) needs 16 device\(s\) and there are 8"),
        ({"fsdp": 1}, 2, r"mesh \(every axis 1\) needs 1 device\(s\) and there are 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, devices, message):
    with pytest.raises(UserError, match=message):
        MeshConfig(**options).sizes(devices)


def test_impossible_meshes_are_named():
    with pytest.raises(UserError, match="mesh.data=-1 and mesh.fsdp=-1: only one axis"):
        MeshConfig(data=-1)
    with pytest.raises(UserError, match="mesh.tensor=-2 must be a positive size, 0 to be chosen"):
        MeshConfig(tensor=-2)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_the_table_knows_every_parameter(tiny, tiny_moe, architecture):
    config = dataclasses.replace(
        tiny if architecture == "llama" else tiny_moe,
        attention_bias=True,
        mlp_bias=architecture == "llama",
        qk_norm=True,
    )
    _, _, parameters = abstract_model(lambda: models.create(config, rngs=nnx.Rngs(0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        axes = logical_axes(path_name(path))
        assert len(axes) == leaf.ndim, path_name(path)
        if leaf.ndim - (axes[0] == "layers") >= 2 and "bias" not in path_name(path):
            assert {"embed"} <= set(axes), "every matrix is split by fsdp"


def test_an_unknown_parameter_is_named():
    with pytest.raises(ValueError, match="no sharding rule for the parameter 'lora.kernel_a'"):
        logical_axes("lora.kernel_a")


def test_stacked_parameters_have_a_layer_axis_that_is_never_split():
    name = "blocks.middle.attention.qkv.kernel"
    mesh = abstract_mesh(fsdp=2, tensor=2)
    spec = make_spec(logical_axes(name), (3, 32, 4, 3, 16), mesh, name)
    assert spec == PartitionSpec(None, "fsdp", "tensor", None, None)


def test_a_dimension_that_does_not_divide_is_named():
    name = "blocks.middle.attention.qkv.kernel"
    with pytest.raises(UserError, match="mesh.tensor=8 does not divide model.num_kv_heads=4"):
        make_spec(logical_axes(name), (3, 32, 4, 3, 16), abstract_mesh(tensor=8), name)


def test_a_batch_that_does_not_divide_is_named():
    mesh = abstract_mesh(data=2, fsdp=4)
    with pytest.raises(UserError, match="mesh.data=2 \\* mesh.fsdp=4 does not divide batch_size"):
        batch_sharding(mesh, (4, 128))  # pyright: ignore[reportArgumentType]
    assert batch_sharding(make_mesh(MeshConfig()), (3, 4, 128)).spec == PartitionSpec(
        None, ("data", "fsdp", "expert"), "context"
    )


def test_one_device_is_a_mesh_too():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.size == 1
    assert describe_mesh(mesh) == "one device"
