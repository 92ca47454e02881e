import pytest
from flax import nnx

from fp4zoo import models
from fp4zoo.models import ModelConfig, MoEConfig, PrecisionRules
from fp4zoo.models.precision_plan import fit_rules, make_segments

RULES = PrecisionRules()


def create(num_layers=4, recipe="nvfp4", rules=RULES, **changes):
    config = ModelConfig(
        architecture="mixtral" if "moe" in changes else "llama", vocab_size=64,
        num_layers=num_layers, embed_dim=32, num_heads=2, num_kv_heads=1, mlp_dim=48,
        max_positions=64, **changes,
    )  # fmt: skip
    return nnx.eval_shape(
        lambda: models.create(config, recipe=recipe, rules=rules, rngs=nnx.Rngs(0))
    )


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, (0, 0)), (3, (0, 0)), (4, (0, 1)), (7, (0, 1)), (8, (1, 1)), (32, (1, 4)), (62, (2, 8))],
)
def test_default_blocks_in_bf16(num_layers, expected):
    assert PrecisionRules().block_counts(num_layers) == expected


def test_explicit_blocks_in_bf16():
    assert PrecisionRules(first_blocks=0, last_blocks=0).block_counts(32) == (0, 0)
    assert PrecisionRules(first_blocks=2, last_blocks=8).block_counts(62) == (2, 8)
    with pytest.raises(
        ValueError, match="first_blocks=3 and last_blocks=2 exceed model.num_layers=4"
    ):
        PrecisionRules(first_blocks=3, last_blocks=2).block_counts(4)
    with pytest.raises(ValueError, match="precision.rules.last_blocks=-1 must be 0 or more"):
        PrecisionRules(last_blocks=-1)


def spans(segments):
    return [(s.name, s.start, s.stop, s.attention.name, s.mlp.name) for s in segments]


def test_segments():
    assert spans(make_segments(32, "nvfp4", PrecisionRules())) == [
        ("prefix", 0, 1, "bf16", "bf16"),
        ("middle", 1, 28, "nvfp4", "nvfp4"),
        ("suffix", 28, 32, "bf16", "bf16"),
    ]
    assert spans(make_segments(4, "nvfp4", PrecisionRules(0, 4))) == [
        ("suffix", 0, 4, "bf16", "bf16")
    ]
    assert spans(make_segments(4, "nvfp4", PrecisionRules(0, 0, attention=False))) == [
        ("middle", 0, 4, "bf16", "nvfp4")
    ]
    assert spans(make_segments(4, "nvfp4", PrecisionRules(0, 0, mlp=False))) == [
        ("middle", 0, 4, "nvfp4", "bf16")
    ]
    assert spans(make_segments(32, "fp32", PrecisionRules())) == [("middle", 0, 32, "fp32", "fp32")]


def test_layers_have_the_planned_recipes():
    model = create(rules=PrecisionRules(1, 1, attention=False))
    recipes = {
        name: (block.attention.qkv.recipe.name, block.attention.output.recipe.name,
               block.mlp.gate_up.recipe.name, block.mlp.down.recipe.name)
        for name, block in model.blocks.items()
    }  # fmt: skip
    assert recipes == {
        "prefix": ("bf16",) * 4,
        "middle": ("bf16", "bf16", "nvfp4", "nvfp4"),
        "suffix": ("bf16",) * 4,
    }


def test_plan_of_a_llama():
    plan = create(rules=PrecisionRules(0, 1)).plan
    # A block: q/k/v 32 · (2 + 2) · 16, output 32 · 32, gate/up 32 · 96, down 48 · 32. Head 32 · 64.
    assert [(row.path, row.precision, row.parameters) for row in plan.rows] == [
        ("blocks 0-2 attention.qkv", "nvfp4", 3 * 2048),
        ("blocks 0-2 attention.output", "nvfp4", 3 * 1024),
        ("blocks 0-2 mlp.gate_up", "nvfp4", 3 * 3072),
        ("blocks 0-2 mlp.down", "nvfp4", 3 * 1536),
        ("blocks 3 attention.qkv", "bf16", 2048),
        ("blocks 3 attention.output", "bf16", 1024),
        ("blocks 3 mlp.gate_up", "bf16", 3072),
        ("blocks 3 mlp.down", "bf16", 1536),
        ("head", "fp32", 2048),
    ]
    total = 4 * 7680 + 2048
    assert plan.fp4_parameter_share == pytest.approx(3 * 7680 / total)
    assert plan.fp4_flops_share == pytest.approx(3 * 7680 / total)
    assert plan.fp4_block_parameter_share == pytest.approx(3 / 4)
    assert sum(row.parameter_share for row in plan.rows) == pytest.approx(1)


def test_plan_of_a_mixture_counts_active_experts_as_work():
    plan = create(2, rules=PrecisionRules(0, 0), moe=MoEConfig(8, 2)).plan
    rows = {row.path: row for row in plan.rows}
    assert rows["blocks 0-1 mlp.router"].precision == "fp32"
    assert rows["blocks 0-1 mlp.gate_up"].parameters == 2 * 8 * 3072
    work = 2 * (2048 + 1024 + 2 * 3072 + 2 * 1536)
    router, head = 2 * 32 * 8, 2048
    assert plan.fp4_flops_share == pytest.approx(work / (work + router + head))


def test_plan_covers_all_matrices():
    """Everything but norms and the embedding table is in the plan, for both architectures."""
    for changes in ({}, {"moe": MoEConfig(4, 2)}):
        model = create(**changes)
        matrices = sum(
            leaf.size
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
            if path[-1] not in ("scale", "embedding")
        )
        assert sum(row.parameters for row in model.plan.rows) == matrices


def test_without_fp4():
    plan = create(recipe="bf16").plan
    assert plan.fp4_parameter_share == 0
    assert {row.precision for row in plan.rows} == {"bf16", "fp32"}


def test_summary_is_a_table():
    lines = create(rules=PrecisionRules(0, 1)).plan.summary().splitlines()
    assert lines[0] == (
        "Precision plan for nvfp4: FP4 holds 75.0% of the blocks' linear parameters; "
        "with the output head 70.3%, and 70.3% of the linear FLOPs"
    )
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[2].split() == ["blocks", "0-2", "attention.qkv", "nvfp4", "6,144", "18.8", "18.8"]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({"mlp_dim": 72}, "attention"), ({"head_dim": 24}, "mlp"), ({"embed_dim": 40}, None)],
)
def test_dimensions_that_blocks_do_not_divide_stop_or_stay_bf16(changes, kept, caplog):
    config = ModelConfig(
        **{
            "architecture": "llama", "vocab_size": 64, "num_layers": 2, "embed_dim": 32,
            "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 48, "max_positions": 64,
        } | changes
    )  # fmt: skip
    ((name, size),) = changes.items()
    with pytest.raises(ValueError, match=rf"model\.{name}={size} .* use {size + 8}, precision"):
        fit_rules(RULES, "nvfp4", config)
    assert fit_rules(RULES, "bf16", config) == RULES
    fitted = fit_rules(PrecisionRules(on_unsupported="bf16"), "nvfp4", config)
    assert (fitted.attention, fitted.mlp) == (kept == "attention", kept == "mlp")
    assert f"{name}={size}" in caplog.text
