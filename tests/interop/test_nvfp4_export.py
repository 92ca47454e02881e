import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from fp4zoo.errors import UserError
from fp4zoo.interop import (
    ExportOptions,
    from_hugging_face,
    load_hugging_face,
    to_hugging_face,
    to_nvfp4,
)
from fp4zoo.interop.calibration import calibrate
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.nvfp4 import E2M1
from fp4zoo.interop.verification import compare_tensors, divergence
from fp4zoo.models import PrecisionRules

from .checkpoints import CONFIGS, TOKENS, read_folder, same, tensors, write, write_file
from .test_hugging_face import save_as_training_does

FORMATS = ("nvfp4", "modelopt-nvfp4")
SCALE = {"nvfp4": "weight_global_scale", "modelopt-nvfp4": "weight_scale_2"}
CODES = {"nvfp4": "weight_packed", "modelopt-nvfp4": "weight"}
# Widths that blocks of 16 divide.
VALUES = {name: CONFIGS[name] for name in ("llama3.1", "mixtral", "qwen2.5", "qwen3-moe")}


@pytest.fixture
def checkpoint(tmp_path):
    def make(name):
        arrays = tensors(CONFIGS[name], ml_dtypes.bfloat16)
        from_hugging_face(write(tmp_path / "hf", CONFIGS[name], arrays), tmp_path / "ours")
        return tmp_path / "ours", arrays

    return make


def dequantised(found, stem, format):
    """A weight from its parts, in float32, rounded once to bfloat16: written out independently."""
    codes = found[f"{stem}.{CODES[format]}"]
    steps = found[f"{stem}.weight_scale"].astype(np.float32)
    scale = found[f"{stem}.{SCALE[format]}"].reshape(())
    steps = steps / scale if format == "nvfp4" else steps * scale
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(*steps.shape, 16)]
    return (values * steps[..., None]).reshape(len(codes), -1).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", VALUES)
def test_export_and_reading_it_back(name, format, checkpoint, tmp_path):
    ours, arrays = checkpoint(name)
    to_nvfp4(ours, tmp_path / "fp4", ExportOptions(format))
    found = read_folder(tmp_path / "fp4")
    quantised = {n for n in arrays if "_proj.weight" in n or ".w" in n.rsplit(".experts.")[-1]}
    quantised = {n for n in quantised if n.startswith("model.layers") and arrays[n].ndim == 2
                 and "norm" not in n and ".gate.weight" not in n}  # fmt: skip
    expected = dict(arrays)
    for weight in quantised:
        stem = weight.removesuffix(".weight")
        shape = (1,) if format == "nvfp4" else ()
        assert found[f"{stem}.{SCALE[format]}"].shape == shape
        expected[weight] = dequantised(found, stem, format)
        difference = np.abs(expected[weight].astype(np.float32) - arrays[weight].astype(np.float32))
        assert 0 < difference.max() < np.abs(arrays[weight].astype(np.float32)).max() / 5
    assert len(found) == len(arrays) + 2 * len(quantised)
    from_hugging_face(tmp_path / "fp4", tmp_path / "read")
    to_hugging_face(tmp_path / "read", tmp_path / "plain")
    same(read_folder(tmp_path / "plain"), expected)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("format", FORMATS)
def test_fused_projections_share_their_tensor_scale(format, checkpoint, tmp_path):
    ours, _ = checkpoint("mixtral")
    to_nvfp4(ours, tmp_path / "fp4", ExportOptions(format))
    found = read_folder(tmp_path / "fp4")

    def scale(stem):
        return float(found[f"model.layers.1.{stem}.{SCALE[format]}"].reshape(()))

    q, k, v, o = (scale(f"self_attn.{name}_proj") for name in "qkvo")
    assert q == k == v != o
    w1, w2, w3 = (scale(f"block_sparse_moe.experts.2.w{number}") for number in (1, 2, 3))
    assert w1 == w3 != w2


def test_configuration_of_compressed_tensors(checkpoint, tmp_path):
    ours, _ = checkpoint("mixtral")
    to_nvfp4(ours, tmp_path / "fp4")
    config = json.loads((tmp_path / "fp4/config.json").read_text())
    quantization = config["quantization_config"]
    gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in (0, 1)]
    assert config["dtype"] == "bfloat16" and quantization["ignore"] == ["lm_head", *gates]
    assert quantization["quantization_status"] == "compressed"
    assert quantization["format"] == "nvfp4-pack-quantized"
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    assert group["weights"]["strategy"] == "tensor_group"
    assert not list((tmp_path / "fp4").glob("hf_quant_config.json"))


@pytest.mark.parametrize("rule", ["attention", "mlp"])
def test_what_trained_in_bfloat16_stays_bfloat16(rule, tmp_path):
    values = {**CONFIGS["llama3.1"], "num_hidden_layers": 4}
    folder = write(tmp_path / "hf", values, tensors(values))
    model = load_hugging_face(folder, recipe="nvfp4", rules=PrecisionRules(1, 1))
    rules = {"attention": True, "mlp": True, rule: False}
    save_as_training_does(model, tmp_path / "run", precision={"recipe": "nvfp4", "rules": rules})
    to_nvfp4(tmp_path / "run", tmp_path / "fp4")
    found = read_folder(tmp_path / "fp4")
    kept = {"attention": "mlp.down_proj", "mlp": "self_attn.o_proj"}[rule]
    packed = {name for name in found if name.endswith(".weight_packed")}
    layers = {name.split(".")[2] for name in packed}
    assert layers == {"1", "2"}
    assert f"model.layers.1.{kept}.weight_packed" in packed
    ignore = json.loads((tmp_path / "fp4/config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignore and "model.layers.3.self_attn.k_proj" in ignore
    assert f"model.layers.1.{kept}" not in ignore
    assert len(packed) + len(ignore) == 1 + 4 * 7


@pytest.mark.slow
def test_calibration_measures_what_the_linears_see(tmp_path):
    """Against the model's own hidden states, with one block whose parts are taken apart."""
    values = {**CONFIGS["mixtral"], "num_hidden_layers": 1}
    model = load_hugging_face(write(tmp_path / "hf", values, tensors(values)))
    found = calibrate(model, [TOKENS[:1], TOKENS[1:]])
    graph, state = nnx.split(model.blocks["middle"])
    block = nnx.merge(graph, nnx.map(lambda _, leaf: leaf[0], state))
    x = model.embedding(jnp.asarray(TOKENS, jnp.int32))
    stem = "model.layers.0"
    normed = block.attention_norm(x)
    assert found.inputs[f"{stem}.self_attn.k_proj"] == pytest.approx(float(abs(normed).max()))
    rope = block.attention.rope(jnp.arange(x.shape[1])[None])
    _, key, value = block.attention.project(normed, rope)
    assert found.cache[f"{stem}.self_attn.k_proj"] == pytest.approx(float(abs(key).max()))
    assert found.cache[f"{stem}.self_attn.v_proj"] == pytest.approx(float(abs(value).max()))
    h = block.mlp_norm(x + block.attention(normed)).reshape(-1, x.shape[-1])
    moe = block.mlp.moe
    chosen = np.argsort(-np.asarray(h @ moe.router[...]), axis=-1)[:, :2]
    for expert in range(4):
        gate_up = jnp.einsum("md,dcf->mcf", h[(chosen == expert).any(-1)], moe.gate_up[...][expert])
        down = nnx.silu(gate_up[:, 0]) * gate_up[:, 1]
        name = f"{stem}.block_sparse_moe.experts.{expert}"
        assert found.inputs[f"{name}.w2"] == pytest.approx(float(abs(down).max()), rel=1e-5)
        assert found.inputs[f"{name}.w1"] == pytest.approx(float(abs(h).max()), rel=1e-5)


@pytest.mark.parametrize(
    "format", ["modelopt-nvfp4", pytest.param("nvfp4", marks=pytest.mark.slow)]
)
def test_calibrated_export_has_input_scales(format, checkpoint, tmp_path):
    ours, _ = checkpoint("llama3.1")
    calibration = calibrate(load_hugging_face(tmp_path / "hf"), [TOKENS])
    cache = "fp8" if format == "modelopt-nvfp4" else None
    to_nvfp4(ours, tmp_path / "fp4", ExportOptions(format, calibration, cache))
    found = read_folder(tmp_path / "fp4")
    q = "model.layers.1.self_attn.q_proj"
    if format == "nvfp4":
        expected = [np.float32(2688) / np.float32(calibration.inputs[q])]
        np.testing.assert_array_equal(found[f"{q}.input_global_scale"], expected)
        config = json.loads((tmp_path / "fp4/config.json").read_text())["quantization_config"]
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    else:
        amax = np.float32(calibration.inputs[q])
        assert found[f"{q}.input_scale"] == amax / np.float32(2688)
        k = "model.layers.0.self_attn.k_proj"
        assert found[f"{k}.k_scale"] == np.float32(calibration.cache[k]) / np.float32(448)
        config = json.loads((tmp_path / "fp4/hf_quant_config.json").read_text())["quantization"]
        assert (config["quant_algo"], config["kv_cache_quant_algo"]) == ("NVFP4", "FP8")
    from_hugging_face(tmp_path / "fp4", tmp_path / "read")  # activations' scales are no weights


def test_predictions_of_an_export_are_those_of_its_dequantised_weights(checkpoint, tmp_path):
    ours, _ = checkpoint("llama3.1")
    to_nvfp4(ours, tmp_path / "fp4")
    from_hugging_face(tmp_path / "fp4", tmp_path / "read")
    differences = compare_tensors(open_checkpoint(ours), tmp_path / "fp4")
    assert all(difference.is_fine for difference in differences)
    inexact = [difference for difference in differences if difference.largest]
    assert len(inexact) == 2 * 7 and all(0.02 < d.relative < 0.2 for d in inexact)
    first = load_hugging_face(tmp_path / "hf")
    second = load_hugging_face(tmp_path / "fp4")
    tokens = jnp.asarray(TOKENS, jnp.int32)
    assert divergence(first, first, tokens) == 0
    assert 1e-4 < divergence(first, second, tokens) < 1


def test_transformers_predicts_what_our_forward_of_the_export_does(checkpoint, tmp_path):
    """compressed-tensors decompresses, transformers computes in bfloat16, we in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    ours, _ = checkpoint("llama3.1")
    to_nvfp4(ours, tmp_path / "fp4")
    options = {"attn_implementation": "eager", "dtype": "auto"}
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp4", **options)
    with torch.no_grad():
        theirs = other.eval()(torch.from_numpy(TOKENS)).logits.float().numpy()
    tokens = jnp.asarray(TOKENS, jnp.int32)
    model = load_hugging_face(tmp_path / "fp4")
    first = nnx.log_softmax(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))
    second = nnx.log_softmax(jnp.asarray(theirs))
    assert float(jnp.mean(jnp.sum(jnp.exp(first) * (first - second), axis=-1))) <= 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nvfp5",), "format=nvfp5: unknown choice"),
        (("nvfp4", None, "fp8"), "kv_cache=fp8 needs format=modelopt-nvfp4"),
        (("modelopt-nvfp4", None, "fp8"), "kv_cache=fp8 needs activations=calibrated"),
        (("modelopt-nvfp4", None, None, "bfloat16"), "scales=bfloat16 is llm-compressor's"),
    ],
)
def test_options_that_do_not_go_together(arguments, message):
    with pytest.raises(UserError, match=message):
        ExportOptions(*arguments)


@pytest.mark.parametrize("part", ["weight_scale", "weight_global_scale"])
def test_missing_parts_of_a_quantised_weight_are_named(part, checkpoint, tmp_path):
    ours, _ = checkpoint("llama3.1")
    to_nvfp4(ours, tmp_path / "fp4")
    found = read_folder(tmp_path / "fp4")
    name = f"model.layers.0.mlp.up_proj.{part}"
    del found[name]
    write_file(tmp_path / "fp4/model.safetensors", found)
    with pytest.raises(UserError, match=f"lacks tensor {name}"):
        from_hugging_face(tmp_path / "fp4", tmp_path / "read")


def test_scales_that_do_not_fit_are_refused(checkpoint, tmp_path):
    ours, _ = checkpoint("llama3.1")
    to_nvfp4(ours, tmp_path / "fp4")
    found = read_folder(tmp_path / "fp4")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    found[name] = found[name][:, :2]
    write_file(tmp_path / "fp4/model.safetensors", found)
    with pytest.raises(UserError, match="has scales .* they do not fit"):
        from_hugging_face(tmp_path / "fp4", tmp_path / "read")


def test_other_formats_of_the_same_tools_are_refused(checkpoint, tmp_path):
    ours, _ = checkpoint("llama3.1")
    to_nvfp4(ours, tmp_path / "fp4")
    path = tmp_path / "fp4/config.json"
    path.write_text(path.read_text().replace("nvfp4-pack-quantized", "float-quantized"))
    with pytest.raises(UserError, match="format='float-quantized' cannot be read"):
        from_hugging_face(tmp_path / "fp4", tmp_path / "read")
    to_nvfp4(ours, tmp_path / "mo", ExportOptions("modelopt-nvfp4"))
    path = tmp_path / "mo/hf_quant_config.json"
    path.write_text(path.read_text().replace("W4A16_NVFP4", "FP8"))
    with pytest.raises(UserError, match="quant_algo='FP8' cannot be read"):
        from_hugging_face(tmp_path / "mo", tmp_path / "read")
