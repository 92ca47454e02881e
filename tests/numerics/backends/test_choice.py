"""Which backend a device gets, and why not another. Devices are simulated."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from flax import nnx

from fp4zoo.errors import UserError
from fp4zoo.layers import NVFP4Dense, NVFP4MoE
from fp4zoo.numerics import LinearSizes, Operand, choose_backend, get_recipe
from fp4zoo.numerics.backends import choice
from fp4zoo.numerics.formats import Format
from fp4zoo.numerics.platform import compiling_for

NVFP4 = get_recipe("nvfp4")
ENTERS = LinearSizes(256, 512)


def gpu(name, capability):
    return SimpleNamespace(platform="gpu", device_kind=name, compute_capability=capability)


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
H100 = gpu("NVIDIA H100 80GB HBM3", "9.0")
B200 = gpu("NVIDIA B200", "10.0")
GB300 = gpu("NVIDIA GB300", "10.3")
RTX_5090 = gpu("NVIDIA GeForce RTX 5090", "12.0")


@pytest.fixture(params=[True, False], ids=["with TE", "without TE"])
def transformer_engine(request, monkeypatch):
    fault = None if request.param else "Transformer Engine is not installed: install it"
    monkeypatch.setattr(choice, "installation_fault", lambda: fault)
    return request.param


class TestAuto:
    @pytest.mark.parametrize("device", [B200, GB300], ids=lambda d: d.device_kind)
    def test_datacenter_blackwell_runs_in_hardware(self, device, transformer_engine):
        chosen = choose_backend("auto", NVFP4, device, ENTERS)
        assert device.device_kind in chosen.reason
        if transformer_engine:
            assert chosen.name == "transformer_engine"
        else:
            assert chosen.name == "xla"
            assert "not transformer_engine: " in chosen.reason
            assert "is not installed" in chosen.reason

    @pytest.mark.parametrize(
        ("device", "reason"),
        [
            (CPU, "this CPU has no FP4 tensor cores"),
            (H100, "H100 .* compute capability 9.0 .* need compute capability 10.0 or 10.3"),
            (RTX_5090, "RTX 5090 is consumer Blackwell .*12.0"),
            (gpu("NVIDIA VR NVL72", "10.7"), "10.7"),
        ],
        ids=lambda value: getattr(value, "device_kind", ""),
    )
    def test_every_other_device_emulates(self, device, reason, transformer_engine):
        chosen = choose_backend("auto", NVFP4, device, ENTERS)
        assert chosen.name == "emulated"
        assert re.search(reason, chosen.reason), chosen.reason

    def test_what_transformer_engine_ignores_goes_to_xla(self, transformer_engine):
        finish = NVFP4.with_high_precision_forward()
        chosen = choose_backend("auto", finish, B200, ENTERS)
        assert chosen.name == "xla"
        if transformer_engine:
            assert "Transformer Engine has no fprop_x as in recipe" in chosen.reason

    def test_what_no_tensor_core_multiplies_is_emulated(self, transformer_engine):
        mixed = dataclasses.replace(
            NVFP4, name="mixed", wgrad_x=Operand(Format.BF16, hadamard=True)
        )
        chosen = choose_backend("auto", mixed, B200, ENTERS)
        assert chosen.name == "emulated"
        assert "wgrad_x in bf16 and wgrad_g in nvfp4" in chosen.reason

    def test_experts_in_tiles_are_emulated(self, transformer_engine):
        chosen = choose_backend("auto", NVFP4, B200, LinearSizes(256, 512, in_tiles=True))
        assert chosen.name == "emulated"
        assert "model.moe.capacity_factor" in chosen.reason

    def test_experts_with_a_capacity_are_batched_products(self, transformer_engine):
        chosen = choose_backend("auto", NVFP4, B200, LinearSizes(256, 512, experts=4))
        assert chosen.name == "xla"
        if transformer_engine:
            assert "not transformer_engine: it multiplies experts one after" in chosen.reason

    def test_a_size_that_one_cannot_run_goes_to_the_next(self, transformer_engine):
        assert choose_backend("auto", NVFP4, B200, LinearSizes(160, 512)).name == "xla"
        assert choose_backend("auto", NVFP4, B200, LinearSizes(48, 512)).name == "emulated"

    def test_a_recipe_without_fp4_needs_no_hardware(self):
        assert choose_backend("auto", get_recipe("bf16"), B200).name == "emulated"


class TestExplicit:
    @pytest.mark.parametrize("name", ["xla", "transformer_engine"])
    @pytest.mark.parametrize("device", [H100, RTX_5090], ids=lambda d: d.device_kind)
    def test_a_device_that_cannot_is_refused(self, name, device, transformer_engine):
        message = f"backend={name}: {device.device_kind} .*backend=emulated"
        with pytest.raises(UserError, match=message):
            choose_backend(name, NVFP4, device)

    def test_xla_runs_on_a_cpu_for_comparing_and_transformer_engine_does_not(self):
        assert choose_backend("xla", NVFP4, CPU).name == "xla"
        with pytest.raises(UserError, match="this CPU has no FP4 tensor cores"):
            choose_backend("transformer_engine", NVFP4, CPU)

    @pytest.mark.parametrize(
        ("name", "sizes", "message"),
        [
            ("emulated", LinearSizes(40, 64), "in_features=40 is not a multiple of 16: use 48"),
            ("xla", LinearSizes(64, 48), "out_features=48 is not a multiple of 32: use 64"),
            ("transformer_engine", LinearSizes(160, 128), "in_features=160 .* 128: use 256"),
            ("xla", LinearSizes(64, 64, in_tiles=True), "set model.moe.capacity_factor"),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused(self, name, sizes, message, monkeypatch):
        monkeypatch.setattr(choice, "installation_fault", lambda: None)
        with pytest.raises(UserError, match=message):
            choose_backend(name, NVFP4, B200, sizes)

    def test_without_transformer_engine_the_error_says_so(self, monkeypatch):
        monkeypatch.setattr(choice, "installation_fault", lambda: "it is not installed")
        with pytest.raises(UserError, match="backend=transformer_engine: it is not installed"):
            choose_backend("transformer_engine", NVFP4, B200)

    @pytest.mark.parametrize("operand", ["wgrad_x", "dgrad_w"])
    def test_an_option_that_transformer_engine_would_ignore_is_named(self, operand, monkeypatch):
        monkeypatch.setattr(choice, "installation_fault", lambda: None)
        changed = dataclasses.replace(getattr(NVFP4, operand), stochastic=True)
        recipe = dataclasses.replace(NVFP4, name="test", **{operand: changed})
        with pytest.raises(UserError, match=f"has no {operand} as in recipe 'test'.*backend=xla"):
            choose_backend("transformer_engine", recipe, B200)

    @pytest.mark.parametrize("suffix", ["", "-no-rht", "-no-sr", "-1d-weights"])
    def test_transformer_engine_has_every_nvfp4_recipe(self, suffix, monkeypatch):
        monkeypatch.setattr(choice, "installation_fault", lambda: None)
        recipe = get_recipe(f"nvfp4{suffix}")
        smaller = LinearSizes(32, 96)

        def chosen(sizes):
            return choose_backend("transformer_engine", recipe, B200, sizes).name

        assert chosen(ENTERS) == chosen(ENTERS._replace(experts=4)) == "transformer_engine"
        if suffix == "-no-rht":  # its tiles are the Hadamard kernel's
            assert chosen(smaller) == "transformer_engine"
        else:
            with pytest.raises(UserError, match="in_features=32 is not a multiple of 128"):
                chosen(smaller)

    def test_a_misspelt_name(self):
        with pytest.raises(UserError, match="did you mean 'emulated'"):
            choose_backend("emulate", NVFP4, CPU)


class TestLayers:
    """The layers of a program for a device run there, and say where."""

    def dense(self, sizes=(256, 512), **arguments):
        return nnx.eval_shape(lambda: NVFP4Dense(*sizes, rngs=nnx.Rngs(0), name="up", **arguments))

    def mixture(self, **arguments):
        def create():
            return NVFP4MoE(64, 128, 4, 2, rngs=nnx.Rngs(0), name="moe", **arguments)

        return nnx.eval_shape(create)

    def test_backend_is_what_was_chosen(self, monkeypatch):
        monkeypatch.setattr(choice, "installation_fault", lambda: "not here")
        assert self.dense().backend == "emulated"
        with compiling_for(B200):
            assert self.dense().backend == "xla"
            assert self.mixture(capacity_factor=1.0).backend == "xla"
            assert self.mixture().backend == "emulated"

    def test_an_error_names_the_layer(self):
        with compiling_for(H100), pytest.raises(UserError, match="^up: backend=xla: NVIDIA H100"):
            self.dense(backend="xla")
        with compiling_for(B200), pytest.raises(UserError, match="^moe: .*capacity_factor"):
            self.mixture(backend="xla")

    @pytest.mark.parametrize("backend", ["xla", "transformer_engine"])
    def test_or_the_layer_runs_in_bf16_and_says_so(self, backend, caplog, monkeypatch):
        monkeypatch.setattr(choice, "installation_fault", lambda: None)
        with compiling_for(B200):
            layer = self.dense((48, 64), backend=backend, on_unsupported="bf16")
        assert layer.recipe.name == "bf16"
        assert f"up: backend={backend}: in_features=48" in caplog.text
        assert "runs in bf16" in caplog.text
