"""The search: what it tries, how it ranks, and what it says of candidates that it compiled."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fp4zoo import plan
from fp4zoo.configs.compose import load
from fp4zoo.configs.planning import PlanConfig
from fp4zoo.errors import UserError
from fp4zoo.planning import search, targets

pytestmark = pytest.mark.usefixtures("optimized")

GIB = 2**30
TARGET = targets.Target("b200", "NVIDIA B200", (10, 0), 178 * GIB, 8 * 10**12, 148, 8, 92300, "")
MODEL = ("model=llama-3.2-1b", "precision=nvfp4", "batch_size=32", "sequence_length=4096")


def configuration(*overrides: str, devices: int = 8) -> PlanConfig:
    return load([*MODEL, f"devices={devices}", *overrides], "plan")


def shape(candidate: search.Candidate) -> tuple:
    config = candidate.config
    return (*dataclasses.astuple(config.mesh), config.gradient_accumulation, config.remat)


def compiled(monkeypatch, outcomes):
    """Replaces the compiler: outcomes(config) -> (GiB, seconds), or a UserError. Returns what was
    asked for, in order."""
    asked = []

    def make_forecast(config, target, _):
        gib, seconds = outcomes(config)
        step: Any = SimpleNamespace(memory=SimpleNamespace(total=gib * GIB))
        time: Any = SimpleNamespace(seconds=seconds)
        return search.Forecast(config, target, step, time, time, model_flops=0.0)

    def compile_step(config, target, num_devices):
        assert (target, num_devices) == (TARGET, config.devices)
        asked.append(config)
        outcome = outcomes(config)
        if isinstance(outcome, UserError):
            raise outcome

    monkeypatch.setattr(search, "compile_step", compile_step)
    monkeypatch.setattr(search, "make_forecast", make_forecast)
    return asked


def run(config, width=140):
    console = Console(record=True, width=width)
    return search.search(config, TARGET, console), console.export_text()


def test_every_mesh_part_and_policy_that_divides_is_ranked_once():
    ranked = search.rank(configuration(), TARGET)
    shapes = [shape(candidate) for candidate in ranked]
    assert len(set(shapes)) == len(shapes)
    assert {entry[-1] for entry in shapes} == {"none", "save_quantized", "full"}
    for candidate in ranked:
        config = candidate.config
        assert math.prod(dataclasses.astuple(config.mesh)) == 8
        rows = config.batch_size // config.gradient_accumulation
        assert rows % (config.mesh.data * config.mesh.fsdp * config.mesh.expert) == 0
        assert (config.batch_size, config.sequence_length) == (32, 4096)
    # Sizes of tensor that divide 8 key/value heads, of data and fsdp what is left.
    assert {entry[4] for entry in shapes} == {1, 2, 4, 8}
    assert {entry[:2] for entry in shapes if entry[4] == 1} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    seconds = [round(candidate.estimated_seconds, 4) for candidate in ranked]
    assert seconds == sorted(seconds)


def test_experts_are_divided_where_there_are_some():
    config = configuration("model=mixtral-8x7b", "model.moe.capacity_factor=1.25")
    assert {shape(candidate)[2] for candidate in search.rank(config, TARGET)} == {1, 2, 4, 8}


def test_the_fastest_that_fits_when_compiled_wins(monkeypatch):
    """The best by estimate does not fit, the second is slower than the third."""
    config = configuration("search_compiles=3")
    best = [shape(candidate) for candidate in search.rank(config, TARGET)]
    results = dict(zip(best[:3], [(300, 0.1), (100, 0.3), (120, 0.2)], strict=True))
    asked = compiled(monkeypatch, lambda c: results[shape(SimpleNamespace(config=c))])
    forecast, text = run(config)
    assert [shape(SimpleNamespace(config=c)) for c in asked] == best[:3]
    assert shape(SimpleNamespace(config=forecast.config)) == best[2]
    lines = [line for line in text.splitlines() if "compiled" in line and "GiB" not in line]
    assert [line.split("│")[3].strip() for line in lines] == ["0.200", "0.300", "0.100"]
    assert "(does not fit)" in lines[2] and "(does not fit)" not in lines[0] + lines[1]
    assert text.count("estimate") == 5 + 1 + 0  # the next five, and the line above the table


def test_a_candidate_that_cannot_be_compiled_is_listed_with_its_reason(monkeypatch):
    config = configuration("search_compiles=2")
    first = shape(search.rank(config, TARGET)[0])

    def outcomes(config):
        if shape(SimpleNamespace(config=config)) == first:
            return UserError("XLA says no")
        return 50, 0.5

    compiled(monkeypatch, outcomes)
    forecast, text = run(config, width=80)
    assert shape(SimpleNamespace(config=forecast.config)) != first
    assert "XLA says no" in text and "…" not in text
    compiled(monkeypatch, lambda config: UserError("XLA says no"))
    with pytest.raises(UserError, match="XLA says no"):
        run(config)


def test_nothing_fits():
    small = dataclasses.replace(TARGET, memory_bytes=GIB)
    with pytest.raises(
        UserError, match=r"nothing fits into 8 x b200: the smallest, .* needs .*; raise"
    ):
        search.search(configuration(), small, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.skipif(
    targets.plugin_library() is None,
    reason="the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed",
)
def test_a_search_compiles_its_best_and_prints_the_winner(capsys):
    arguments = [
        *MODEL,
        "target=b200",
        "devices=8",
        "search=true",
        "search_compiles=2",
        "json=true",
    ]
    assert plan.main([*arguments, "model.num_layers=4"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["fits"] is True and result["fp4_gemms"] > 0
    assert captured.err.count("compiled") == 2
