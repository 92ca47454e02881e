import pytest

from fp4zoo.configs import load
from fp4zoo.models import count_parameters
from fp4zoo.planning.workload import expected_work, parameter_counts
from fp4zoo.training.flops import flops_per_token

LONG = ["sequence_length=4096", "batch_size=64"]


def work_of(*overrides, devices=8):
    config = load([*LONG, *overrides])
    return config, expected_work(config, config.mesh.sizes(devices))


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "smollm2-360m", "qwen3-30b-a3b"])
def test_operations_are_those_of_the_model(model):
    """Without recomputation; only the attention's product that the backward repeats is more."""
    config, work = work_of(f"model={model}", "remat=none")
    total = sum(work.gemm_flops.values()) + work.attention_flops * 6 / 7
    tokens = 64 * 4096 / 8
    assert total == pytest.approx(tokens * flops_per_token(config.model, 4096), rel=1e-3)


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "llama-3.1-405b"])
def test_parameters_are_the_model_s(model):
    config = load([f"model={model}"])
    counts = parameter_counts(config.model)
    assert sum(counts.values()) == pytest.approx(count_parameters(config.model), rel=1e-3)


def test_tensor_parallelism_divides_the_work_and_adds_collectives():
    _, whole = work_of("model=llama-3-8b", "mesh.fsdp=8")
    _, split = work_of("model=llama-3-8b", "mesh.fsdp=2", "mesh.tensor=4")
    assert split.gemm_flops["fp4"] == pytest.approx(whole.gemm_flops["fp4"])
    kinds = {entry.group for entry in split.collectives}
    assert kinds == {2, 4}


def test_full_remat_runs_the_forward_products_twice():
    _, none = work_of("model=llama-3-8b", "remat=none")
    _, full = work_of("model=llama-3-8b", "remat=full")
    assert full.gemm_flops["fp4"] == pytest.approx(none.gemm_flops["fp4"] * 4 / 3)


def test_packed_weights_are_gathered_in_nine_sixteenths_of_a_byte():
    def gathered(precision):
        _, work = work_of("model=llama-3-8b", f"precision={precision}")
        return work.bytes_by_collective()["all-gather"]

    assert gathered("nvfp4") / gathered("bf16") == pytest.approx(9 / 32)


def test_experts_exchange_tokens():
    _, work = work_of("model=mixtral-8x7b", "mesh.fsdp=1", "mesh.expert=8")
    tokens = 64 * 4096 / 8
    sent = 4 * 32 * 2 * 2 * tokens * 4096 * 7 / 8  # there and back, forward and backward
    assert work.bytes_by_collective()["all-to-all"] == pytest.approx(sent)
