"""GGUF files written by the `gguf` package from the weights of a Hugging Face checkpoint."""

import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.interop import from_gguf, to_hugging_face
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.hub_config import model_config
from fp4zoo.interop.inspection import describe

from .checkpoints import CONFIGS, read_folder, same, tensors

gguf = pytest.importorskip("gguf")
ARCHITECTURES = {"llama3.1": "llama", "mixtral": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3",
                 "qwen3-moe": "qwen3moe"}  # fmt: skip


def interleaved(array, heads):
    """llama.cpp's order of a head's rows, from the loop in its converter's description."""
    rows = array.shape[0] // heads
    order = [head * rows + part * rows // 2 + row for head in range(heads)
             for row in range(rows // 2) for part in (0, 1)]  # fmt: skip
    return array[order]


def write_gguf(path, name, arrays, *, quantise=(), architecture=None, scaling=8.0):
    values = CONFIGS[name]
    kind = architecture or ARCHITECTURES[name]
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(values.get("head_dim") or 16)
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    rope = values.get("rope_parameters", values)
    writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    experts = values.get("num_local_experts") or values.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(values.get("moe_intermediate_size", 48))
    if name == "llama3.1":
        writer.add_tensor("rope_freqs.weight", llama3_factors(scaling))
    names = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
             "model.norm.weight": "output_norm.weight"}  # fmt: skip
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate": "ffn_gate_inp",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
             "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}  # fmt: skip
    stacks = {}
    for key, array in arrays.items():
        if key in names:
            put(writer, names[key], array, quantise)
            continue
        layer, part, suffix = key.split(".")[2], key.split(".")[-2], key.split(".")[-1]
        if ".experts." in key:
            stacks.setdefault(f"blk.{layer}.{parts[part]}_exps.{suffix}", []).append(array)
            continue
        if kind == "llama" and part in ("q_proj", "k_proj"):
            heads = "num_attention_heads" if part == "q_proj" else "num_key_value_heads"
            array = interleaved(array, values[heads])
        put(writer, f"blk.{layer}.{parts[part]}.{suffix}", array, quantise)
    for key, members in stacks.items():
        put(writer, key, np.stack(members), quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer, name, array, quantise):
    if any(part in name for part in quantise):
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array)


def llama3_factors(factor):
    """As llama.cpp's converter: what each frequency is divided by."""
    found = []
    for i in range(0, 16, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / 16)
        low, high = 8192 / 1.0, 8192 / 4.0
        if wavelength < high:
            found.append(1.0)
        elif wavelength > low:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_the_hugging_face_checkpoint(name, tmp_path):
    arrays = tensors(CONFIGS[name])
    from_gguf(write_gguf(tmp_path / "x.gguf", name, arrays), tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    same(read_folder(tmp_path / "back"), arrays)
    found, expected = open_checkpoint(tmp_path / "ours").model, model_config(CONFIGS[name], "")
    if name == "llama3.1":
        assert found.rope_scaling.original_max_positions == 8192  # of the published models
        assert found.rope_scaling.factor == 8
    else:
        assert found == expected


def test_half_precision_stays_and_quantised_tensors_become_float32(tmp_path):
    arrays = {n: a.astype(np.float16) for n, a in tensors(CONFIGS["qwen2.5"]).items()}
    wide = {n: a.astype(np.float32) if "up_proj" in n else a for n, a in arrays.items()}
    path = write_gguf(tmp_path / "x.gguf", "qwen2.5", wide, quantise=("ffn_up",))
    from_gguf(path, tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    found = read_folder(tmp_path / "back")
    for name, array in arrays.items():
        if "up_proj" in name:
            blocks = wide[name].reshape(len(array), -1, 32)
            step = np.abs(blocks).max(-1, keepdims=True) / 127
            error = np.abs(found[name].reshape(blocks.shape) - blocks)
            assert found[name].dtype == np.float32 and (error <= 0.6 * step).all()
        else:
            assert found[name].dtype == np.float16 and (found[name] == array).all()


def test_description(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "mixtral", tensors(CONFIGS["mixtral"]))
    text = describe(path)
    assert "a GGUF file" in text and "mixtral, 2 layers of 64" in text and "4 experts of 48" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(architecture="bert"), "architecture 'bert' cannot be converted"),
        (dict(scaling=3.0), "rope_freqs.weight is of no published Llama model"),
    ],
)
def test_what_is_not_known_is_refused(options, message, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "llama3.1", tensors(CONFIGS["llama3.1"]), **options)
    with pytest.raises(UserError, match=message):
        from_gguf(path, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_unknown_tensors_and_other_files_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a GGUF file")
    with pytest.raises(UserError, match="cannot be read as GGUF") as error:
        from_gguf(path, tmp_path / "ours")
    assert "\n" not in str(error.value)
    arrays = tensors(CONFIGS["qwen3"])
    arrays["model.layers.0.self_attn.gate.weight"] = np.ones((2, 32), np.float32)
    write_gguf(path, "qwen3", arrays)
    with pytest.raises(UserError, match=r"has unknown tensors model.layers.0.mlp.gate.weight"):
        from_gguf(path, tmp_path / "ours")
