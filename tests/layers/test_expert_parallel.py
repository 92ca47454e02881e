import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from fp4zoo.errors import UserError
from fp4zoo.layers.expert_parallel import Mixture
from fp4zoo.numerics.partitioning import AXIS_NAMES


@pytest.mark.parametrize(
    ("shape", "capacity_factor", "group_size", "uses_fp4", "tokens"),
    [
        ((8, 256), None, None, True, 1024),  # four short sequences share their padding
        ((6, 400), None, None, True, 800),
        ((5, 256), None, None, True, 256),  # no number of them up to 1,024 tokens divides five
        ((8, 4096), None, None, True, 4096),
        ((8, 256), None, 64, True, 64),
        ((8, 256), 1.25, None, True, 256),  # a capacity is of one sequence
        ((8, 1), None, None, True, None),  # decoding
        ((8, 256), None, None, False, None),  # nothing to keep apart
    ],
)
def test_tokens_a_group(shape, capacity_factor, group_size, uses_fp4, tokens):
    mixture = Mixture(8, 2, capacity_factor, group_size, uses_fp4, uses_fp4, "moe")
    assert mixture._group_tokens(shape) == tokens


def run(shape, mlp_dim=64, capacity_factor=None, group_size=None, uses_fp4=True, **sizes):
    """Traces a mixture of eight experts for tokens [B, T] on a mesh that nobody has."""
    mixture = Mixture(8, 2, capacity_factor, group_size, uses_fp4, False, "moe")
    mesh = AbstractMesh(
        tuple(sizes.get(name, 1) for name in AXIS_NAMES),
        AXIS_NAMES,
        axis_types=(AxisType.Auto,) * len(AXIS_NAMES),
    )

    def layer(x, logits, mask, gate_up, down):
        def experts(rows, gate_up, down, keys):
            return rows.x

        return mixture.run(x, logits, mask, gate_up, down, None, experts).y

    shapes = ((*shape, 32), (*shape, 8), shape, (8, 32, 2, mlp_dim), (8, mlp_dim, 32))
    arguments = [jax.ShapeDtypeStruct(s, bool if s == shape else jnp.float32) for s in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(layer, *arguments).shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert": 3}, "moe: mesh.expert=3 does not divide num_experts=8"),
        ({"data": 3}, "moe: mesh.data=3 does not divide batch=8"),
        ({"data": 2, "fsdp": 3}, r"mesh.data=2 \* mesh.fsdp=3 does not divide batch=8"),
        ({"context": 3}, "mesh.context=3 does not divide sequence=256"),
        ({"group_size": 96}, "group_size=96 does not divide a sequence of 256 tokens"),
        (
            {"context": 2},
            "mesh.context=2 cuts a sequence of 256 tokens inside a group of 1024; set "
            "model.moe.group_size to a divisor of 128",
        ),
        (
            {"data": 2, "expert": 2},
            r"mesh.data=2 \* mesh.expert=2 leaves a device 2 sequence\(s\) of 256 tokens, not "
            "whole groups of 1024; set model.moe.group_size=256",
        ),
        ({"tensor": 4, "mlp_dim": 32}, "mesh.tensor=4 cuts mlp_dim=32 inside a block of 16"),
    ],
)
def test_what_a_mesh_cannot_cut_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        run((8, 256), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"data": 2},  # a group of four sequences on each
        {"data": 2, "expert": 2, "group_size": 256},
        {"data": 2, "expert": 2, "capacity_factor": 1.0},
        {"context": 4, "group_size": 64},
        {"data": 8, "uses_fp4": False},
        {"expert": 2, "tensor": 2},
    ],
)
def test_whole_groups_are_taken(options):
    assert run((8, 256), **options) == (8, 256, 32)
