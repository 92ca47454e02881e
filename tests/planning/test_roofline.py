"""The time model: its parts, and its distance from what NVIDIA has published."""

import dataclasses

import pytest

from fp4zoo.configs import load
from fp4zoo.planning import targets
from fp4zoo.planning.hardware import HARDWARE, PUBLISHED
from fp4zoo.planning.roofline import Collective, Work, link_bandwidth, step_time
from fp4zoo.planning.workload import expected_work
from fp4zoo.training.flops import PEAK_FLOPS, flops_per_token

BANDWIDTH = 7.928064e12  # of GB200 and GB300, as their targets say


def modelled_tflops(row, efficiency=None):
    config = load(row.overrides())
    hardware = HARDWARE[row.target]
    if efficiency is not None:
        hardware = dataclasses.replace(hardware, efficiency=efficiency)
    work = expected_work(config, config.mesh.sizes(row.devices))
    flops = flops_per_token(config.model, 8192) * row.batch_size * 8192 / row.devices
    return flops / step_time(work, hardware, BANDWIDTH).seconds / 1e12


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model}-{row.target}")
def test_published_steps_are_predicted_within_15_percent(row):
    assert modelled_tflops(row) == pytest.approx(row.tflops, rel=0.15)


@pytest.mark.parametrize("target", ["gb200", "gb300"])
def test_the_efficiency_is_the_one_that_fits_best(target):
    """One constant per GPU, to two digits: none has a smaller largest error."""

    def error(efficiency):
        rows = [row for row in PUBLISHED if row.target == target]
        return max(abs(modelled_tflops(row, efficiency) / row.tflops - 1) for row in rows)

    chosen = HARDWARE[target].efficiency
    assert error(chosen) <= min(error(chosen - 0.01), error(chosen + 0.01))


def test_parts_of_a_step():
    hardware = HARDWARE["gb200"]
    work = Work({"fp4": 1e15, "bf16": 1e14}, 1e13, 8e11, (Collective("all-gather", 8, 8, 1, 9e10),))
    time = step_time(work, hardware, 8e12)
    assert time.arithmetic == pytest.approx((0.1 + 0.04 + 0.004) / hardware.efficiency)
    assert time.streaming == pytest.approx(0.1 / 0.85)
    assert time.communication == pytest.approx(0.1)
    assert time.seconds == time.arithmetic + time.streaming
    assert time.slow_seconds == pytest.approx(time.seconds + 0.1)


def test_a_precision_without_units_runs_as_bf16():
    hardware = HARDWARE["h100"]
    fp4, bf16 = (step_time(Work({name: 1e15}, 0, 0), hardware, 1e12) for name in ("fp4", "bf16"))
    assert fp4 == bf16


@pytest.mark.parametrize(
    ("group", "span", "expected"),
    [
        (8, 8, 900e9),  # within a host
        (16, 16, 400e9),  # two hosts: each ring crosses by the eight ports of a host
        (2, 16, 50e9),  # one device of each of two hosts
    ],
)
def test_links_of_a_collective(group, span, expected):
    assert (
        link_bandwidth(HARDWARE["b200"], Collective("all-gather", group, span, 1, 1.0)) == expected
    )


def test_every_target_has_its_hardware():
    assert set(HARDWARE) == set(targets.NAMES)


def test_bf16_peaks_are_those_that_mfu_is_stated_against():
    for name, (kind, _) in targets.NAMES.items():
        matches = [known for known in PEAK_FLOPS if kind.startswith(known)]
        if matches:
            assert HARDWARE[name].peaks["bf16"] == PEAK_FLOPS[max(matches, key=len)]
