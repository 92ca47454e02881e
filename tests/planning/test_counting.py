from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp4zoo.planning.counting import count

B200 = (Path(__file__).parent / "scaled_matmul.hlo").read_text()


def test_scaled_products_of_a_b200_program():
    """Five in a loop and one after it, [512, 256] x [256, 256] on each device."""
    counts = count(B200)
    assert counts.gemms == {"fp4": 6}
    assert counts.work.gemm_flops == {"fp4": 6 * 2 * 512 * 256 * 256}
    assert counts.attentions == 0 and counts.unknown_loops == 0


def test_gathered_bytes_are_packed_codes_and_scales():
    """Each device receives what the other three hold: two codes a byte, and a byte of scale."""
    gather, reduce = count(B200).work.collectives
    assert (gather.kind, gather.group, gather.span, gather.runs) == ("all-gather", 4, 4, 6)
    assert gather.num_bytes == 6 * 3 * (128 * 128 + 128 * 16)
    assert (reduce.kind, reduce.runs, reduce.num_bytes) == ("all-reduce", 1, 2 * 4 * 3 / 4)


def test_transformer_engines_products_whatever_the_layouts():
    """x [4, 64, 256] times the transpose of codes [512, 256], beside a workspace."""
    counts = count(
        """
ENTRY %main (x: f4e2m1fn[4,64,256], w: f4e2m1fn[512,256], s: f8e4m3fn[4,64,16]) -> bf16[4,64,512] {
  %x = f4e2m1fn[4,64,256]{2,1,0} parameter(0)
  %w = f4e2m1fn[512,256]{1,0} parameter(1)
  %s = f8e4m3fn[4,64,16]{2,1,0} parameter(2)
  %g = (bf16[4,64,512]{2,1,0}, u8[9]) custom-call(%x, %s, %w), custom_call_target="te_gemm_v2_ffi"
  ROOT %y = bf16[4,64,512]{2,1,0} get-tuple-element(%g), index=0
}
"""
    )
    assert counts.gemms == {"fp4": 1}
    assert counts.work.gemm_flops == {"fp4": 2 * 4 * 64 * 512 * 256}
    assert counts.work.traffic_bytes == 0


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count(jax.jit(function).lower(*arguments).compile().as_text())


def test_products_inside_loops_and_fusions():
    def program(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + 1, None), x, w)[0]

    counts = compiled(program, (48, 64), (5, 64, 64))
    assert counts.gemms == {"fp32": 5}
    assert counts.work.gemm_flops == {"fp32": 5 * 2 * 48 * 64 * 64}


def test_short_contractions_are_not_products_of_layers():
    assert compiled(lambda x, h: x @ h, (256, 16), (16, 16)).gemms == {}


def test_traffic_of_slices_and_updates_is_their_own():
    """One row of a stack is read and written per iteration, not the stack."""

    def program(stack):
        def body(index, stack):
            row = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(stack, jnp.sin(row), index, 0)

        return jax.lax.fori_loop(0, 64, body, stack)

    traffic = compiled(program, (64, 4096)).work.traffic_bytes
    once = 2 * 64 * 4096 * 4  # every row read and written
    assert once <= traffic <= 2.5 * once  # and a copy of the argument, which is not donated


@pytest.mark.parametrize("backward", [False, True])
def test_attention_of_cudnn(backward):
    name = "fmhaScaleBiasSoftmaxBackward" if backward else "fmhaScaleBiasSoftmax"
    text = f"""
ENTRY %main (q: bf16[2,64,8,16], k: bf16[2,64,4,16]) -> bf16[2,8,64,16] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,64,4,16]{{3,2,1,0}} parameter(1)
  ROOT %a = (bf16[2,8,64,16]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn${name}", backend_config={{"mask_type": "CAUSAL"}}
}}
"""
    counts = count(text)
    assert counts.attentions == 1
    assert counts.work.attention_flops == (5 if backward else 2) * 2 * 2 * 8 * 64 * 64 * 16 / 2
