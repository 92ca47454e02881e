from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.interop.nvfp4 import E2M1, Packed, global_scale, pack, unpack

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "nvfp4_checkpoints.npz")
FUSED = ("q_proj", "k_proj", "v_proj")


def bfloat16(name):
    return GOLDEN[name].view(ml_dtypes.bfloat16)


def amax(*names):
    return max(float(np.abs(bfloat16(name).astype(np.float32)).max()) for name in names)


def check(packed, scale, name, tool):
    assert scale == GOLDEN[f"{name}.{tool}.scale"].reshape(())
    np.testing.assert_array_equal(packed.scales.view(np.uint8), GOLDEN[f"{name}.{tool}.scales"])
    np.testing.assert_array_equal(packed.codes, GOLDEN[f"{name}.{tool}.codes"])


@pytest.mark.parametrize("name", [*FUSED, "down_proj"])
def test_llm_compressor_bit_for_bit(name):
    largest = amax(*FUSED) if name in FUSED else amax(name)
    scale = global_scale(largest, "compressed-tensors", in_bfloat16=True)
    packed = pack(bfloat16(name), scale, "compressed-tensors", in_bfloat16=True)
    check(packed, scale, name, "llmc")


def test_compressed_tensors_in_float32_bit_for_bit():
    weight = GOLDEN["float32"]
    scale = global_scale(float(np.abs(weight).max()), "compressed-tensors")
    check(pack(weight, scale, "compressed-tensors"), scale, "float32", "ct")


@pytest.mark.parametrize("name", [*FUSED, "down_proj"])
def test_modelopt_bit_for_bit(name):
    scale = global_scale(amax(*FUSED) if name in FUSED else amax(name), "modelopt")
    check(pack(bfloat16(name), scale, "modelopt"), scale, name, "modelopt")


@pytest.mark.parametrize("rule", ["compressed-tensors", "modelopt"])
def test_unpacking_is_codes_times_scales(rule):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    scale = global_scale(float(np.abs(weight).max()), rule)
    packed = pack(weight, scale, rule)
    nibbles = np.stack([packed.codes & 15, packed.codes >> 4], -1).reshape(24, 4, 16)
    steps = packed.scales.astype(np.float32)
    steps = steps / scale if rule == "compressed-tensors" else steps * scale
    expected = (E2M1[nibbles] * steps[..., None]).reshape(24, 64)
    np.testing.assert_array_equal(unpack(packed, scale, rule, np.dtype(np.float32)), expected)
    error = np.abs(expected - weight) / np.abs(weight).reshape(24, 4, 16).max(-1).repeat(16, -1)
    assert 0.05 < error.max() < 0.2  # half the widest step of E2M1 is 1/6 of the largest value


@pytest.mark.parametrize("rule", ["compressed-tensors", "modelopt"])
def test_zeros_stay_zero(rule):
    weight = np.zeros((16, 32), np.float32)
    scale = global_scale(0.0, rule)
    assert np.isfinite(scale)
    packed = pack(weight, scale, rule)
    assert not packed.codes.any() and np.isfinite(packed.scales.astype(np.float32)).all()
    assert not unpack(packed, scale, rule, np.dtype(np.float32)).any()


def test_values_of_the_format_come_back_exactly():
    weight = np.tile(E2M1, (16, 2)) * np.float32(0.25)
    scale = global_scale(1.5, "compressed-tensors")
    packed = pack(weight, scale, "compressed-tensors")
    assert (packed.codes[0, 0], packed.codes[0, 7]) == (0x10, 0xFE)  # the low nibble comes first
    assert packed.codes[0, 4] == 0x90  # -0.0 loses its sign, as in both tools
    back = unpack(packed, scale, "compressed-tensors", np.dtype(np.float32))
    np.testing.assert_allclose(back, weight, rtol=1e-6)


@pytest.mark.parametrize("rule", ["compressed-tensors", "modelopt"])
def test_only_numbers_that_round_to_zero_keep_their_sign(rule):
    weight = np.zeros((1, 16), np.float32)
    weight[0, :4] = 6, -0.0, -1e-3, -1e-40
    codes = pack(weight, global_scale(6.0, rule), rule).codes
    assert codes[0, :2].tolist() == [0x07, 0x88] and not codes[0, 2:].any()


def test_rows_that_blocks_do_not_divide_are_refused():
    with pytest.raises(UserError, match="a matrix with 40 inputs cannot be NVFP4"):
        pack(np.ones((16, 40), np.float32), np.float32(1), "modelopt")


def test_large_matrices_are_packed_in_parts(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    scale = global_scale(4.0, "modelopt")
    whole = pack(weight, scale, "modelopt")
    monkeypatch.setattr("fp4zoo.interop.nvfp4._CHUNK_ELEMENTS", 5 * 64)
    parts = pack(weight, scale, "modelopt")
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.scales, whole.scales)
    back = unpack(parts, scale, "modelopt", np.dtype(ml_dtypes.bfloat16))
    monkeypatch.undo()
    same = unpack(Packed(whole.codes, whole.scales), scale, "modelopt", back.dtype)
    np.testing.assert_array_equal(back, same)
