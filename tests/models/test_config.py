import dataclasses
import importlib.resources

import pytest
import yaml

from fp4zoo import models
from fp4zoo.models import ModelConfig, MoEConfig, RopeScaling

# Published parameter counts (tied heads once); the tiny ones are ours.
PARAMETERS = {
    "llama-tiny": 6_031_616,
    "mixtral-tiny": 15_476_992,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}

SIZES = importlib.resources.files("fp4zoo.configs") / "model"


def load(name):
    values = yaml.safe_load((SIZES / f"{name}.yaml").read_text())
    for key, kind in (("rope_scaling", RopeScaling), ("moe", MoEConfig)):
        if values[key] is not None:
            values[key] = kind(**values[key])
    return ModelConfig(**values)


def small(**changes):
    values = dict(
        architecture="llama", vocab_size=64, num_layers=2, embed_dim=32, num_heads=4,
        num_kv_heads=2, mlp_dim=48, max_positions=64,
    )  # fmt: skip
    return ModelConfig(**(values | changes))


def test_every_size_has_a_published_count():
    assert {path.name.removesuffix(".yaml") for path in SIZES.iterdir()} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    assert models.count_parameters(load(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_files_state_every_field(name):
    values = yaml.safe_load((SIZES / f"{name}.yaml").read_text())
    assert set(values) == {field.name for field in dataclasses.fields(ModelConfig)}


def test_context_details_of_the_families():
    llama31, llama32 = load("llama-3.1-8b"), load("llama-3.2-1b")
    assert llama31.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert llama32.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert llama31.max_positions == llama32.max_positions == 131_072
    assert load("mistral-7b").sliding_window == 4096
    assert load("mixtral-8x7b").sliding_window is None
    assert load("mixtral-8x7b").rope_theta == 1e6
    assert load("smollm2-1.7b").rope_theta == 130_000
    assert load("llama-3-8b").rope_theta == 500_000


def test_tiny_mixture_has_the_active_work_of_the_tiny_llama():
    dense, mixture = load("llama-tiny"), load("mixtral-tiny")
    assert mixture.moe is not None
    assert mixture.moe.experts_per_token * mixture.mlp_dim == dense.mlp_dim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_kv_heads=3), "model.num_heads=4 is not a multiple of model.num_kv_heads=3"),
        (dict(embed_dim=30), "model.embed_dim=30 is not a multiple of model.num_heads=4"),
        (dict(embed_dim=28), "model.head_dim=7 is odd"),
        (dict(num_layers=0), "model.num_layers=0 must be positive"),
        (dict(sliding_window=-1), "model.sliding_window=-1 must be positive"),
        (dict(head_dim=0), "model.head_dim=0 must be positive"),
    ],
)
def test_impossible_numbers_name_the_key(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        small(**changes)
    assert "\n" not in str(error.value)


def test_impossible_mixtures_name_the_key():
    with pytest.raises(ValueError, match="moe.experts_per_token=9 .* moe.num_experts=8"):
        MoEConfig(num_experts=8, experts_per_token=9)
    with pytest.raises(ValueError, match="moe.capacity_factor=0.0 must be positive, or null"):
        MoEConfig(num_experts=8, experts_per_token=2, capacity_factor=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architecture="lama"), "model.architecture=lama.*did you mean 'llama'"),
        (dict(architecture="mixtral"), "model.moe is missing"),
        (dict(moe=MoEConfig(4, 2)), "model.moe is set.*architecture=llama.*use mixtral"),
        (
            dict(architecture="qwen2", attention_bias=True, moe=MoEConfig(4, 2)),
            "model.moe is set.*architecture=qwen2.*use mixtral",
        ),
        (dict(architecture="qwen2"), "model.attention_bias=false.*set it to true, or use llama"),
        (dict(architecture="qwen3"), "model.qk_norm=false: model.architecture=qwen3 normalises"),
        (dict(architecture="qwen3_moe", moe=MoEConfig(4, 2)), "model.qk_norm=false.*qwen3_moe"),
        (dict(architecture="mixtral", moe=MoEConfig(4, 2), mlp_bias=True), "model.mlp_bias=true"),
    ],
)
def test_what_an_architecture_lacks_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        models.count_parameters(small(**changes))
    assert "\n" not in str(error.value)
