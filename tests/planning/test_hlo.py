"""The reader, on a real module compiled for four B200 and on what the CPU's compiler writes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp4zoo.planning.hlo import Module, Shape, replica_group

B200 = (Path(__file__).parent / "scaled_matmul.hlo").read_text()


def test_instructions_shapes_and_operands():
    module = Module(B200)
    call = next(
        item
        for item in module.computations["scaled_matmul.0.1"].instructions.values()
        if item.opcode == "custom-call"
    )
    assert call.custom_call_target == "__cudnn$blockScaledDot"
    assert call.shapes == [Shape("bf16", (1, 512, 256)), Shape("u8", (0,))]
    assert call.operands == ["lhs.0", "rhs.0", "bitcast.22.0", "bitcast.23.0"]
    lhs = module.computations["scaled_matmul.0.1"].shape_of("lhs.0")
    assert (lhs.dtype, lhs.dimensions, lhs.num_bytes) == ("f4e2m1fn", (1, 512, 256), 512 * 128)
    assert module.computations["scaled_matmul.0.1"].root.opcode == "get-tuple-element"


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    module = Module(B200)
    times = [
        run.times
        for run in module.executions()
        if run.instruction.custom_call_target == "__cudnn$blockScaledDot"
    ]
    assert sorted(times) == [1, 5]
    assert module.unknown_loops == []


def test_instructions_of_a_kernel_are_told_from_kernels():
    kinds = {
        (run.instruction.opcode, run.in_fusion)
        for run in Module(B200).executions()
        if run.instruction.opcode in ("all-reduce", "all-gather", "fusion")
    }
    assert kinds == {("all-reduce", True), ("all-gather", False), ("fusion", False)}


def test_loops_in_loops_multiply():
    def program(x, w):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=7)[0]

    x = jnp.zeros((32, 64))
    text = jax.jit(program).lower(x, jnp.zeros((64, 64))).compile().as_text()
    module = Module(text)
    tanh = sum(run.times for run in module.executions() if run.instruction.opcode == "tanh")
    assert tanh == 21
    assert module.unknown_loops == []


def test_a_loop_of_unknown_length_is_reported():
    def program(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)

    text = jax.jit(program).lower(jnp.zeros(8), 3).compile().as_text()
    module = Module(text)
    assert sum(run.times for run in module.executions() if run.instruction.opcode == "sine") == 1
    assert len(module.unknown_loops) == 1


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{0,2},{1,3}}, dimensions={0}", [0, 2]),
        ("replica_groups=[2,4]<=[8], x", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [0, 4]),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, x", [0, 1, 2, 3]),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}, x", [0, 4]),
        ("source_target_pairs={{0,1},{1,0}}, x", [0, 1]),
        ("replica_groups={}, x", []),
    ],
)
def test_groups_of_a_collective(attributes, group):
    assert replica_group(attributes) == group


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        Module("nothing")
