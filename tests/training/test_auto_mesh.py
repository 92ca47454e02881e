import dataclasses
import functools
import math

import jax
import pytest

from fp4zoo import configs
from fp4zoo.errors import UserError
from fp4zoo.training.auto_mesh import (
    choose_mesh,
    estimate,
    step_seconds,
)
from fp4zoo.training.memory import GIB, USABLE
from fp4zoo.training.program import Program
from fp4zoo.training.sharding import MeshConfig

B200 = 178 * GIB


@functools.cache
def run(*overrides):
    """(configuration, parameters as shapes): nothing is allocated, whatever the size."""
    config = configs.load(["precision=nvfp4", "remat=save_quantized", *overrides])
    single = dataclasses.replace(config, mesh=MeshConfig())
    return config, Program(single, jax.devices()[:1]).state.parameters


def choose(*overrides, devices, available=B200, per_host=8):
    config, parameters = run(*overrides)
    return choose_mesh(
        config,
        parameters,
        num_devices=devices,
        devices_per_host=min(devices, per_host),
        available=available,
        on_cpu=False,
    )


def sizes(choice, devices):
    return {name: size for name, size in choice.config.sizes(devices).items() if size > 1}


LARGE = ("sequence_length=4096", "batch_size=128")


@pytest.mark.parametrize(
    ("overrides", "devices", "expected"),
    [
        # Within a host parameters are cut: as fast as copies, and smaller.
        (("model=llama-tiny",), 8, {"fsdp": 8}),
        (("model=llama-3-8b", "sequence_length=4096", "batch_size=16"), 8, {"fsdp": 8}),
        # Over the hosts they are copied, as long as they fit.
        (("model=llama-3-8b", *LARGE), 64, {"data": 8, "fsdp": 8}),
        # Fewer sequences than devices: the rest of those cut the matrices.
        (("model=llama-3-8b", "sequence_length=4096", "batch_size=4"), 8, {"fsdp": 4, "tensor": 2}),
        # Where even the state does not fit on a host.
        (
            ("model=llama-3.1-405b", "sequence_length=4096", "batch_size=512", "remat=full"),
            512,
            {"fsdp": 64, "tensor": 8},
        ),
        # What is given stays.
        (("model=llama-tiny", "mesh.tensor=2"), 8, {"fsdp": 4, "tensor": 2}),
        (("model=llama-tiny", "mesh.fsdp=-1"), 8, {"fsdp": 8}),
        (("model=llama-tiny", "mesh.data=2", "mesh.fsdp=4"), 8, {"data": 2, "fsdp": 4}),
        (("model=llama-tiny", "mesh.data=8"), 8, {"data": 8}),
    ],
)
def test_the_mesh_of_a_model_and_so_many_devices(overrides, devices, expected):
    assert sizes(choose(*overrides, devices=devices), devices) == expected


@pytest.mark.parametrize("model", ["llama-tiny", "llama-3-8b", "llama-3-70b", "mixtral-8x7b"])
@pytest.mark.parametrize("devices", [2, 8, 64, 512])
def test_a_mesh_that_fits_is_found_where_there_is_one(model, devices):
    length = 256 if model == "llama-tiny" else 4096
    overrides = (f"model={model}", f"sequence_length={length}", "batch_size=512", "remat=full")
    config, parameters = run(*overrides)
    choice = choose(*overrides, devices=devices)
    assert choice == choose(*overrides, devices=devices)
    chosen = choice.config.sizes(devices)
    assert math.prod(chosen.values()) == devices
    needed = estimate(config, parameters, chosen, on_cpu=False).total

    def known(**options):
        return {name: options.get(name, 1) for name in chosen}

    others = [known(data=devices), known(fsdp=devices)]
    if devices >= 8:
        others += [known(fsdp=devices // 8, tensor=8), known(data=devices // 8, fsdp=8)]
    for other in others:
        try:
            size = estimate(config, parameters, other, on_cpu=False).total
        except UserError:
            continue
        if needed > USABLE * B200:
            assert size >= needed and "of which none fits" in choice.reason
        elif size <= USABLE * B200:
            ours, theirs = (
                step_seconds(config, parameters, sizes, min(devices, 8))
                for sizes in (chosen, other)
            )
            assert ours <= theirs * 1.05


def test_the_reason_is_one_line_with_numbers():
    reason = choose("model=llama-3-8b", *LARGE, devices=64).reason
    assert "mesh=auto: data 8 x fsdp 8 needs about " in reason and "178.00 GiB" in reason
    assert "is the fastest by estimate of the " in reason and "\n" not in reason


def test_experts_are_divided_rather_than_gathered():
    assert sizes(choose("model=mixtral-8x7b", *LARGE, devices=64), 64)["expert"] > 1


def test_less_memory_cuts_more():
    options = ("model=llama-3-8b", *LARGE)
    config, parameters = run(*options)
    small = choose(*options, devices=64, available=64 * GIB)
    needed = estimate(config, parameters, small.config.sizes(64), on_cpu=False).total
    assert needed <= USABLE * 64 * GIB
    assert sizes(small, 64) != sizes(choose(*options, devices=64), 64)


def test_a_batch_that_no_mesh_divides():
    with pytest.raises(UserError, match="mesh=auto finds no mesh of 7 devices that divides"):
        choose("model=llama-3-8b", "sequence_length=4096", "batch_size=8", devices=7)
    with pytest.raises(UserError, match=r"mesh \(tensor=3\) does not divide the 8 device"):
        choose("model=llama-tiny", "mesh.tensor=3", devices=8)


@pytest.mark.parametrize("model", ["llama-tiny", "mixtral-tiny"])
def test_the_estimate_is_the_program_s(model):
    config, parameters = run(f"model={model}", "optimizer.first_moment_dtype=bfloat16")
    single = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1)
    program = Program(dataclasses.replace(config, mesh=MeshConfig()), jax.devices()[:1])
    ours, theirs = estimate(config, parameters, single, on_cpu=True), program.estimate_memory()
    assert ours.parameters == theirs.parameters and ours.gradients == theirs.gradients
    assert ours.activations == theirs.activations
    assert ours.optimizer == pytest.approx(theirs.optimizer, abs=16)  # its counters
