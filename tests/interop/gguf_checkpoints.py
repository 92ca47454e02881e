"""GGUF files written by the `gguf` package from the weights of a Hugging Face checkpoint."""

import numpy as np
import pytest

from .checkpoints import CONFIGS

gguf = pytest.importorskip("gguf")
ARCHITECTURES = {"llama3.1": "llama", "mixtral": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3",
                 "qwen3-moe": "qwen3moe"}  # fmt: skip


def interleaved(array, heads):
    """llama.cpp's order of a head's rows, from the loop in its converter's description."""
    rows = array.shape[0] // heads
    order = [head * rows + part * rows // 2 + row for head in range(heads)
             for row in range(rows // 2) for part in (0, 1)]  # fmt: skip
    return array[order]


def write_gguf(
    path, name, arrays, *, quantise=(), architecture=None, scaling=8.0, fields=lambda writer: None
):
    """fields: adds more fields, such as a tokenizer's."""
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
    fields(writer)
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
