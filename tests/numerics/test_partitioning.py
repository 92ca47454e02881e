import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from fp4zoo.numerics.partitioning import (
    AXIS_NAMES,
    MESH_AXES,
    constrain,
    mesh_axis_sizes,
    partition_spec,
)

LOGICAL = ("batch", "residual_sequence", None)


def abstract_mesh(**sizes):
    shape = tuple(sizes.get(name, 1) for name in AXIS_NAMES)
    return AbstractMesh(shape, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(shape))


def constraints(function, *shape):
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return [
        equation.params["sharding"].spec
        for equation in jaxpr.eqns
        if equation.primitive.name == "sharding_constraint"
    ]


def test_without_a_mesh_nothing_is_constrained():
    x = np.ones((4, 6, 2), np.float32)
    assert mesh_axis_sizes() == {}
    assert constrain(x, *LOGICAL) is x


def test_a_mesh_constrains_to_the_table():
    with jax.sharding.use_abstract_mesh(abstract_mesh(fsdp=2, expert=2, tensor=3)):
        assert mesh_axis_sizes() == {"fsdp": 2, "expert": 2, "tensor": 3}
        specs = constraints(lambda x: constrain(x, *LOGICAL), 4, 6, 2)
    assert specs == [PartitionSpec(("fsdp", "expert"), "tensor", None)]


def test_a_mesh_of_somebody_else_s_is_left_alone():
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))):
        assert constraints(lambda x: constrain(x, *LOGICAL), 4, 6, 2) == []


@pytest.mark.parametrize(
    ("size", "expected"), [(8, ("data", "fsdp", "expert")), (4, ("data", "fsdp")), (6, ("data",))]
)
def test_axes_that_do_not_divide_are_left_out(size, expected):
    spec = partition_spec(("batch",), (size,), {"data": 2, "fsdp": 2, "expert": 2})
    assert spec == PartitionSpec(expected)


def test_an_unknown_name_is_refused():
    with jax.sharding.use_abstract_mesh(abstract_mesh(fsdp=2)), pytest.raises(KeyError, match="bt"):
        constraints(lambda x: constrain(x, "bt"), 4)


def test_no_mesh_axis_splits_two_dimensions_of_one_activation():
    for feature in ("heads", "kv_heads", "mlp", "vocabulary"):
        together = [*MESH_AXES["batch"], *MESH_AXES["sequence"], *MESH_AXES[feature]]
        assert len(set(together)) == len(together)
    assert set().union(*MESH_AXES.values()) == set(AXIS_NAMES)
