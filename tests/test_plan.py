"""plan.py as it is called: what it prints, what it refuses, and that it compiles for real GPUs."""

import json

import pytest

from fp4zoo import plan
from fp4zoo.planning import targets

pytestmark = pytest.mark.usefixtures("optimized")
needs_plugin = pytest.mark.skipif(
    targets.plugin_library() is None,
    reason="the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed",
)
TINY = [
    "model.vocab_size=256",
    "model.num_layers=2",
    "model.embed_dim=128",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=64",
    "model.mlp_dim=128",
    "batch_size=8",
    "sequence_length=128",
    "remat=save_quantized",
]
KEYS = {
    "fits", "gib_per_device", "device_gib", "parameters_gib", "optimizer_gib", "temporaries_gib",
    "fp4_gemms", "other_gemms", "flops_per_step", "collective_bytes", "step_seconds",
    "tokens_per_second_per_device", "tflops_per_device", "assumptions",
}  # fmt: skip


@needs_plugin
def test_json_is_one_object_of_the_promised_keys(capsys):
    status = plan.main([*TINY, "precision=bf16", "target=b200", "devices=2", "json=true"])
    result = json.loads(capsys.readouterr().out)
    assert status == 0
    assert set(result) == KEYS
    assert result["fits"] is True
    assert result["device_gib"] == pytest.approx(178.4, abs=0.1)
    state = result["parameters_gib"] + result["optimizer_gib"] + result["temporaries_gib"]
    assert state <= result["gib_per_device"] <= 1.1 * state
    assert result["optimizer_gib"] == pytest.approx(2 * result["parameters_gib"], rel=1e-3)
    assert result["fp4_gemms"] == 0
    # Per block: q/k/v, output, gate and up, down; the head. Three products each.
    assert result["other_gemms"] == 3 * (2 * 4 + 1)
    assert result["collective_bytes"]["all-gather"] > 0
    seconds = result["step_seconds"]
    assert result["tokens_per_second_per_device"] == pytest.approx(8 * 128 / 2 / seconds)
    assert result["tflops_per_device"] == pytest.approx(
        result["flops_per_step"] / 2 / seconds / 1e12
    )


@needs_plugin
def test_a_run_that_does_not_fit_says_so_and_fails(capsys, monkeypatch):
    target = targets.find_target("b200")
    small = targets.Target(**{**vars(target), "memory_bytes": 2**20})
    monkeypatch.setattr(plan, "find_target", lambda name: small)
    status = plan.main(
        [*TINY, "precision=bf16", "devices=1", "model.num_layers=1", "tokens=1e12", "price=4"]
    )
    printed = capsys.readouterr().out
    assert status == 1
    assert "does not fit" in printed
    for word in ("parameters", "optimizer", "gradients", "activations", "temporaries", "MFU"):
        assert word in printed
    assert "GPU-hours for 1e+12 tokens" in printed and "cost" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target=b20"], "target=b20: unknown choice: did you mean 'b200'?"),
        (["target=b200", "devices=0"], "devices=0 is too small"),
        (["price=3"], "price=3 needs tokens="),
        (["targt=b200"], "targt"),
        (["tokens=-1"], "tokens=-1 must be positive"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys):
    assert plan.main([*TINY, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_without_the_plugin_the_two_wheels_are_named(capsys, monkeypatch):
    monkeypatch.setattr(targets, "plugin_library", lambda: None)
    assert plan.main([*TINY, "target=b200"]) == 2
    error = capsys.readouterr().err
    assert "jax-cuda13-plugin" in error and "jax-cuda13-pjrt" in error


@needs_plugin
@pytest.mark.parametrize("key", ["mesh.data=3", "mesh.tensor=2"])
def test_what_train_py_would_refuse_is_refused(key, capsys):
    assert plan.main([*TINY, "target=b200", "devices=2", "mesh.fsdp=1", key]) == 2
    assert "mesh" in capsys.readouterr().err
