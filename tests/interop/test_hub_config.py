import dataclasses

import pytest

from fp4zoo.errors import UserError
from fp4zoo.interop.hub_config import hub_config, model_config
from fp4zoo.models import RopeScaling

from .checkpoints import CONFIGS, LLAMA3

LLAMA, MISTRAL, MIXTRAL = CONFIGS["llama2"], CONFIGS["mistral"], CONFIGS["mixtral"]
QWEN2, QWEN3, QWEN3_MOE = CONFIGS["qwen2.5"], CONFIGS["qwen3"], CONFIGS["qwen3-moe"]


def read(values, **changes):
    return model_config({**values, **changes}, "config.json")


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


@pytest.mark.parametrize("name", CONFIGS)
def test_our_config_means_the_same_model(name):
    config = model_config(CONFIGS[name], "config.json")
    assert model_config(hub_config(config, "bfloat16"), "config.json") == config


@pytest.mark.parametrize(
    ("values", "key", "field", "default"),
    [
        (LLAMA, "rms_norm_eps", "norm_epsilon", 1e-6),
        (MIXTRAL, "rms_norm_eps", "norm_epsilon", 1e-5),
        (LLAMA, "rope_theta", "rope_theta", 1e4),
        (MIXTRAL, "rope_theta", "rope_theta", 1e6),
        (MISTRAL, "sliding_window", "sliding_window", 4096),
        (MIXTRAL, "sliding_window", "sliding_window", None),
        (LLAMA, "num_key_value_heads", "num_kv_heads", 4),
        (LLAMA, "tie_word_embeddings", "tie_embeddings", False),
        (LLAMA, "max_position_embeddings", "max_positions", 2048),
        (QWEN3, "head_dim", "head_dim", 128),
    ],
)
def test_a_missing_key_has_transformers_default(values, key, field, default):
    assert getattr(model_config(without(values, key), "config.json"), field) == default


def test_null_window_is_no_window():
    assert read(MISTRAL, sliding_window=None).sliding_window is None
    assert read(MISTRAL).sliding_window == 5
    assert read(QWEN2).sliding_window is None  # use_sliding_window is false


def test_null_head_dim_and_experts():
    assert read(LLAMA, head_dim=None).head_dim == 16
    assert read(without(MIXTRAL, "num_local_experts", "num_experts_per_tok")).moe.num_experts == 8
    assert read(QWEN3_MOE).mlp_dim == 16


def test_rope_of_both_generations():
    scaling = RopeScaling(8.0, 1.0, 4.0, 8)
    for values in (CONFIGS["llama3.1"], CONFIGS["llama3.1-older"]):
        config = model_config(values, "config.json")
        assert (config.rope_theta, config.rope_scaling) == (500_000.0, scaling)
    assert read(LLAMA, rope_scaling={**LLAMA3, "type": "llama3"}).rope_scaling == scaling


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (LLAMA, {"model_type": "gpt2"}, "model_type='gpt2' is not an architecture"),
        (LLAMA, {"model_type": "lama"}, "did you mean 'llama'"),
        (LLAMA, {"model_type": None}, "model_type=None"),
        (LLAMA, {"clip_qkv": 8.0}, "key 'clip_qkv' is unknown for a llama and might change"),
        (LLAMA, {"num_local_experts": 8}, "key 'num_local_experts' is unknown for a llama"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "beta_fast": 1}}, "'beta_fast' in the rope parameters"),
        (LLAMA, {"rope_scaling": without(LLAMA3, "factor")}, "lacks 'factor'"),
        (LLAMA, {"hidden_size": None}, "config.json lacks hidden_size"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size='64' should be"),
        (LLAMA, {"num_attention_heads": 3}, "model.num_heads=3 is not a multiple"),
        (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings=1 should be true or false"),
        (QWEN2, {"use_sliding_window": True}, "a window in some layers only"),
        (
            QWEN3,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layers of different kinds",
        ),
        (QWEN3_MOE, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported, only True"),
        (without(QWEN3_MOE, "norm_topk_prob"), {}, "norm_topk_prob=False is not supported"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
    ],
)
def test_what_could_change_the_logits_is_an_error(values, changes, message):
    with pytest.raises(UserError, match=message) as error:
        read(values, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "model.qk_norm=True: transformers' llama cannot express it"),
        ({"sliding_window": 4, "attention_bias": True}, "transformers' mistral cannot express"),
    ],
)
def test_what_transformers_lacks_is_not_exported(changes, message):
    with pytest.raises(UserError, match=message):
        hub_config(dataclasses.replace(read(LLAMA), **changes), "bfloat16")
