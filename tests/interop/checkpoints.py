"""Tiny random checkpoints in Hugging Face's layout, made from a seed with NumPy alone.

Read by transformers in make_transformers_logits.py; nothing here shares code with fp4zoo.interop.
Configurations are as transformers 4 or 5 writes them.
"""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

COMMON = dict(
    vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64,
    rms_norm_eps=1e-5, initializer_range=0.02, use_cache=True, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8,
)  # fmt: skip


def config(model_type: str, class_name: str, **changes) -> dict:
    return {**COMMON, "model_type": model_type, "architectures": [class_name], **changes}


CONFIGS = {
    "llama2": config(
        "llama", "LlamaForCausalLM", num_key_value_heads=4, rope_scaling=None, rope_theta=10000.0,
        attention_bias=False, mlp_bias=False, pretraining_tp=1, torch_dtype="float32",
    ),
    "llama3.1": config(
        "llama", "LlamaForCausalLM", dtype="float32",
        rope_parameters={"rope_theta": 500000.0, **LLAMA3},
    ),
    "llama3.1-older": config(
        "llama", "LlamaForCausalLM", torch_dtype="float32", rope_theta=500000.0, rope_scaling=LLAMA3
    ),
    "llama-biases": config("llama", "LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "smollm2": config(
        "llama", "LlamaForCausalLM", tie_word_embeddings=True, rope_theta=100000.0,
        rope_interleaved=False, is_llama_config=True, head_dim=16,
    ),
    "mistral": config("mistral", "MistralForCausalLM", sliding_window=5, head_dim=None),
    "mixtral": config(
        "mixtral", "MixtralForCausalLM", sliding_window=None, num_local_experts=4,
        num_experts_per_tok=2, rope_theta=1e6, router_aux_loss_coef=0.02,
    ),
    "qwen2.5": config(
        "qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True, rope_theta=1e6, sliding_window=32,
        use_sliding_window=False, max_window_layers=2, rms_norm_eps=1e-6,
    ),
    "qwen3": config(
        "qwen3", "Qwen3ForCausalLM", head_dim=16, rope_theta=1e6, attention_bias=False,
        rms_norm_eps=1e-6, rope_scaling=None, sliding_window=None, use_sliding_window=False,
    ),
    "qwen3-moe": config(
        "qwen3_moe", "Qwen3MoeForCausalLM", head_dim=16, rope_theta=1e6, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], router_aux_loss_coef=0.001,
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(7).integers(3, 64, (2, 16))


def shapes(values: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a configuration, written out from transformers' files."""
    dim, width = values["hidden_size"], values["intermediate_size"]
    kind = values["model_type"]
    heads, keys = values["num_attention_heads"], values["num_key_value_heads"]
    head = values.get("head_dim") or dim // heads
    found = {"model.embed_tokens.weight": (values["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not values["tie_word_embeddings"]:
        found["lm_head.weight"] = (values["vocab_size"], dim)
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        block = {
            "input_layernorm.weight": (dim,),
            "post_attention_layernorm.weight": (dim,),
            "self_attn.q_proj.weight": (heads * head, dim),
            "self_attn.k_proj.weight": (keys * head, dim),
            "self_attn.v_proj.weight": (keys * head, dim),
            "self_attn.o_proj.weight": (dim, heads * head),
        }
        biased = [] if kind != "qwen2" else ["q_proj", "k_proj", "v_proj"]
        if values.get("attention_bias"):
            biased = ["q_proj", "k_proj", "v_proj", "o_proj"]
        for name in biased:
            block[f"self_attn.{name}.bias"] = block[f"self_attn.{name}.weight"][:1]
        if kind.startswith("qwen3"):
            block["self_attn.q_norm.weight"] = block["self_attn.k_norm.weight"] = (head,)
        if kind == "mixtral":
            experts = values["num_local_experts"]
            block["block_sparse_moe.gate.weight"] = (experts, dim)
            for expert in range(experts):
                stem = f"block_sparse_moe.experts.{expert}"
                block[f"{stem}.w1.weight"] = block[f"{stem}.w3.weight"] = (width, dim)
                block[f"{stem}.w2.weight"] = (dim, width)
        elif kind == "qwen3_moe":
            experts, small = values["num_experts"], values["moe_intermediate_size"]
            block["mlp.gate.weight"] = (experts, dim)
            for expert in range(experts):
                for name in ("gate_proj", "up_proj"):
                    block[f"mlp.experts.{expert}.{name}.weight"] = (small, dim)
                block[f"mlp.experts.{expert}.down_proj.weight"] = (dim, small)
        else:
            block |= {"mlp.gate_proj.weight": (width, dim), "mlp.up_proj.weight": (width, dim),
                      "mlp.down_proj.weight": (dim, width)}  # fmt: skip
            if values.get("mlp_bias"):
                block |= {"mlp.gate_proj.bias": (width,), "mlp.up_proj.bias": (width,),
                          "mlp.down_proj.bias": (dim,)}  # fmt: skip
        found |= {prefix + name: shape for name, shape in block.items()}
    return found


def tensors(values: dict, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors, large enough that the logits depend on every one of them."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, shape in sorted(shapes(values).items()):
        array = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            array = 1 + 0.2 * array
        elif len(shape) == 2 and "embed" not in name:
            array *= 1.5 / np.sqrt(shape[1])
        elif name.endswith(".bias"):
            array *= 0.2
        result[name] = array.astype(dtype)
    return result


def write(
    folder: Path, values: dict, arrays: dict[str, np.ndarray], *, files: int = 1, **extra: str
) -> Path:
    """Writes a folder with `files` safetensors files; extra: more files by name, dots as __."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    names = sorted(arrays)
    index = {}
    for number in range(files):
        file = "model.safetensors"
        if files > 1:
            file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = names[number::files]
        write_file(folder / file, {name: arrays[name] for name in chosen})
        index |= dict.fromkeys(chosen, file)
    if files > 1:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    for name, content in extra.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


KINDS = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip


def write_file(path: Path, arrays: dict[str, np.ndarray]) -> None:
    names = {dtype: name for name, dtype in KINDS.items()}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": names[array.dtype], "shape": array.shape, "data_offsets": [begin, len(data)]
        }  # fmt: skip
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder's files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, value in header.items():
            begin, end = value["data_offsets"]
            data = content[8 + length + begin : 8 + length + end]
            found[name] = np.frombuffer(data, KINDS[value["dtype"]]).reshape(value["shape"])
    return found


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Asserts that two checkpoints hold the same tensors, byte for byte."""
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert first[name].shape == second[name].shape, name
        assert first[name].tobytes() == second[name].tobytes(), name
