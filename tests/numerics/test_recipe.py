import dataclasses
import pickle

import pytest

from fp4zoo.numerics import RECIPES, Format, Operand, get_recipe, nvfp4_recipe
from fp4zoo.numerics.recipe import uniform_recipe

NVFP4 = RECIPES["nvfp4"]


def test_nvfp4_is_the_published_recipe():
    nearest = Operand(Format.NVFP4)
    weight = Operand(Format.NVFP4, two_dimensional=True)
    assert NVFP4.operands == (
        nearest,
        weight,
        Operand(Format.NVFP4, stochastic=True),
        weight,
        Operand(Format.NVFP4, hadamard=True),
        Operand(Format.NVFP4, hadamard=True, stochastic=True),
    )
    assert NVFP4.uses_fp4 and NVFP4.uses_stochastic_rounding and NVFP4.quantizes_weight_once
    assert (weight.block, nearest.block) == ((16, 16), (1, 16))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("nvfp4-no-rht", {"wgrad_x": {"hadamard": False}, "wgrad_g": {"hadamard": False}}),
        ("nvfp4-no-sr", {"dgrad_g": {"stochastic": False}, "wgrad_g": {"stochastic": False}}),
        (
            "nvfp4-1d-weights",
            {"fprop_w": {"two_dimensional": False}, "dgrad_w": {"two_dimensional": False}},
        ),
    ],
)
def test_an_ablation_changes_one_thing(name, changed):
    operands = {
        operand: dataclasses.replace(getattr(NVFP4, operand), **change)
        for operand, change in changed.items()
    }
    assert RECIPES[name] == dataclasses.replace(NVFP4, name=name, **operands)
    assert RECIPES[name].uses_stochastic_rounding == (name != "nvfp4-no-sr")
    assert RECIPES[name].quantizes_weight_once == (name != "nvfp4-1d-weights")


def test_parts_combine():
    bare = nvfp4_recipe(hadamard=False, stochastic_rounding=False, two_dimensional_weights=False)
    assert bare.name == "nvfp4-no-rht-no-sr-1d-weights"
    assert set(bare.operands) == {Operand()}


@pytest.mark.parametrize("format", [Format.BF16, Format.FP16, Format.FP32])
def test_baselines_are_uniform(format):
    recipe = get_recipe(format.value)
    assert recipe == uniform_recipe(format.value, format)
    assert not recipe.uses_fp4 and not recipe.uses_stochastic_rounding
    assert recipe.is_float32 == (format is Format.FP32)
    assert not recipe.quantizes_weight_once


def test_high_precision_forward_changes_the_forward_alone():
    late = NVFP4.with_high_precision_forward()
    assert late.name == "nvfp4-bf16-forward"
    assert late.operands == (Operand(Format.BF16), Operand(Format.BF16), *NVFP4.operands[2:])
    assert late.uses_fp4 and not late.quantizes_weight_once
    assert NVFP4.with_high_precision_forward(Format.FP32).fprop_x == Operand(Format.FP32)


def test_names_are_keys_and_recipes_hash_and_pickle():
    for name, recipe in RECIPES.items():
        assert get_recipe(name) is recipe and get_recipe(recipe) is recipe and recipe.name == name
        assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert len(set(RECIPES.values())) == len(RECIPES)
    assert len({hash(recipe) for recipe in RECIPES.values()}) == len(RECIPES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_recipe("nvpf4"), "'nvpf4': did you mean 'nvfp4'"),
        (lambda: get_recipe("zzz"), "there are nvfp4, nvfp4-no-rht"),
        (lambda: Operand(Format.BF16, stochastic=True), "bf16 operand has no blocks"),
        (lambda: Operand(Format.FP32, two_dimensional=True), "fp32 operand has no blocks"),
        (lambda: replaced(wgrad_x=Operand()), "'test': the Hadamard.* wgrad_x and wgrad_g"),
        (lambda: replaced(fprop_w=Operand(hadamard=True)), "fprop_x and fprop_w"),
        (lambda: replaced(dgrad_g=Operand(hadamard=True)), "dgrad_g and dgrad_w"),
        (lambda: replaced(fprop_x=Operand(stochastic=True)), "fprop_x is rounded stochastically"),
        (lambda: replaced(fprop_w=Operand(stochastic=True)), "fprop_w is rounded stochastically"),
        (lambda: replaced(fprop_x=Operand(two_dimensional=True)), "fprop_x has 16 x 16 blocks"),
        (lambda: replaced(dgrad_g=Operand(two_dimensional=True)), "dgrad_g has 16 x 16 blocks"),
    ],
)
def test_a_recipe_that_cannot_be_honoured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def replaced(**operands):
    return dataclasses.replace(NVFP4, name="test", **operands)
