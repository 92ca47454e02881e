"""Hugging Face's config.json <-> ModelConfig, strictly: nothing that could matter is ignored.

The defaults are those of transformers 5.24's configuration classes, which apply where a file leaves
a key out.
"""

from __future__ import annotations

from typing import Any

from ..errors import UserError, did_you_mean
from ..models import ModelConfig, MoEConfig, RopeScaling
from .config_reader import ConfigReader

# What a file may say without changing the logits of a forward pass.
_IRRELEVANT = {
    "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures",
    "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_llama_config", "label2id",
    "max_window_layers", "model_type", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "quantization_config", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "tokenizer_class", "torch_dtype",
    "transformers.js_config", "transformers_version", "use_cache", "problem_type",
    "is_encoder_decoder", "cross_attention_hidden_size", "use_bidirectional_attention",
}  # fmt: skip
_COMMON = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleaved", "partial_rotary_factor",
    "tie_word_embeddings", "attention_bias", "sliding_window", "use_sliding_window", "layer_types",
    "mlp_bias",
}  # fmt: skip
_MIXTURE = {
    "num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob",
    "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
# model_type -> what transformers takes where the file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
        "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen2": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "num_key_value_heads": 32,
    },
    "qwen3": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_config(config: dict[str, Any], where: str) -> ModelConfig:
    """The model that a config.json describes.

    where: the file's name, for messages.

    Raises:
      UserError: an unknown architecture or key, a value that our models do not have, a missing key.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        raise UserError(
            f"{where}: model_type={model_type!r} is not an architecture that can be converted"
            f"{did_you_mean(str(model_type), _DEFAULTS)}"
        )
    mixture = model_type in ("mixtral", "qwen3_moe")
    known = _COMMON | (_MIXTURE if mixture else set())
    unknown = sorted(config.keys() - known - _IRRELEVANT)
    if unknown:
        raise UserError(
            f"{where}: key {unknown[0]!r} is unknown for a {model_type} and might change what it "
            "computes: remove it if you know that it does not"
        )
    get = ConfigReader({**_DEFAULTS[model_type], **config}, where)
    get.only("hidden_act", "silu", "silu", "swish")
    get.only("partial_rotary_factor", 1.0, 1.0)
    get.only("rope_interleaved", False, False)
    heads = get.number("num_attention_heads")
    theta, scaling = _rope(get)
    common = {
        "vocab_size": get.number("vocab_size"),
        "num_layers": get.number("num_hidden_layers"),
        "embed_dim": get.number("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": get.number("num_key_value_heads", default=heads),
        "max_positions": get.number("max_position_embeddings"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": _sliding_window(get, model_type),
        "norm_epsilon": get.real("rms_norm_eps"),
        "tie_embeddings": get.flag("tie_word_embeddings"),
        "mlp_bias": get.flag("mlp_bias"),
        "attention_bias": model_type == "qwen2" or get.flag("attention_bias"),
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
    }
    head_dim = get.number("head_dim", default=max(1, common["embed_dim"] // heads))
    architecture = "llama" if model_type == "mistral" else model_type
    if not mixture:
        return ModelConfig(
            architecture, mlp_dim=get.number("intermediate_size"), head_dim=head_dim, **common
        )
    experts, width = "num_local_experts", "intermediate_size"
    if model_type == "qwen3_moe":
        experts, width = "num_experts", "moe_intermediate_size"
        get.only("norm_topk_prob", False, True)
        get.only("decoder_sparse_step", 1, 1)
        get.only("mlp_only_layers", [], [])
    moe = MoEConfig(get.number(experts), get.number("num_experts_per_tok"))
    return ModelConfig(
        architecture, mlp_dim=get.number(width), head_dim=head_dim, moe=moe, **common
    )


def hub_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json for transformers 4 and 5; `dtype` is that of the tensors, such as "bfloat16".

    Raises:
      UserError: the model has something that transformers' class of that name has not.
    """
    model_type = config.architecture
    if model_type == "llama" and config.sliding_window is not None:
        model_type = "mistral"
    _check_expressible(config, model_type)
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    result: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.resolved_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        # transformers 5 reads rope_parameters and dtype, 4 the other two.
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if model_type in ("mistral", "mixtral"):
        result["sliding_window"] = config.sliding_window
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        result["attention_bias"] = config.attention_bias
    if model_type == "llama":
        result["mlp_bias"] = config.mlp_bias
    if config.moe is not None:
        result["num_experts_per_tok"] = config.moe.experts_per_token
        if model_type == "mixtral":
            result["num_local_experts"] = config.moe.num_experts
        else:
            result |= {
                "num_experts": config.moe.num_experts,
                "moe_intermediate_size": config.mlp_dim,
                "norm_topk_prob": True,
            }
    return result


def _check_expressible(config: ModelConfig, model_type: str) -> None:
    windowed = ("mistral", "mixtral")
    faults = {
        "sliding_window": config.sliding_window is not None and model_type not in windowed,
        "attention_bias": config.attention_bias and model_type in windowed,
        "mlp_bias": config.mlp_bias and model_type != "llama",
        "qk_norm": config.qk_norm and model_type not in ("qwen3", "qwen3_moe"),
    }
    for key, fault in faults.items():
        if fault:
            raise UserError(
                f"model.{key}={getattr(config, key)}: transformers' {model_type} cannot express "
                "it, so this checkpoint has no Hugging Face form"
            )


def _rope(get: ConfigReader) -> tuple[float, RopeScaling | None]:
    """rope_theta and scaling from rope_parameters (transformers 5) or the two older keys."""
    rope = get.value("rope_parameters", get.value("rope_scaling", {}))
    if not isinstance(rope, dict):
        raise UserError(f"{get.where}: rope_parameters={rope!r} should be an object")
    inner = ConfigReader({"rope_theta": get.values.get("rope_theta"), **rope}, get.where)
    theta = inner.real("rope_theta", default=get.value("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    allowed = {"rope_type", "type", "rope_theta"}
    llama3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind == "llama3":
        missing = [key for key in llama3 if key not in rope]
        if missing:
            raise UserError(f"{get.where}: rope_type=llama3 lacks {missing[0]!r}: add it")
        allowed |= set(llama3)
    elif kind != "default":
        raise UserError(
            f"{get.where}: rope_type={kind!r} is not supported, only 'default' and 'llama3': this "
            "model cannot be converted"
        )
    unknown = sorted(rope.keys() - allowed - ({"partial_rotary_factor"} if _whole(rope) else set()))
    if unknown:
        raise UserError(f"{get.where}: {unknown[0]!r} in the rope parameters is not supported")
    scaling = None
    if kind == "llama3":
        factors = [inner.real(key) for key in llama3[:3]]
        scaling = RopeScaling(*factors, original_max_positions=inner.number(llama3[3]))
    return theta, scaling


def _whole(rope: dict[str, Any]) -> bool:
    return rope.get("partial_rotary_factor") == 1.0


def _sliding_window(get: ConfigReader, model_type: str) -> int | None:
    """The window of all layers; a null in the file is no window, whatever the default."""
    window = None
    if get.values.get("sliding_window") is not None:
        window = get.number("sliding_window")
    switched = get.value("use_sliding_window", model_type in ("mistral", "mixtral"))
    listed = get.value("layer_types", [])
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        raise get.wrong("layer_types", listed, "a list of names")
    kinds = set(listed)
    if kinds - {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise UserError(
            f"{get.where}: layer_types={sorted(kinds)}: layers of different kinds are not supported"
        )
    if kinds:
        switched = kinds == {"sliding_attention"}
    elif switched and model_type.startswith("qwen"):
        raise UserError(
            f"{get.where}: use_sliding_window=true, a window in some layers only, is not supported"
        )
    return window if switched and model_type != "llama" else None
