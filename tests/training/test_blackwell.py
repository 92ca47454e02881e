"""The real training step, compiled by XLA for Blackwell GPUs that are not there.

What is read is the compiled program: every FP4 projection is cuDNN's block-scaled product, forward
and both backward ones, and what moves of the weights is packed.
"""

import collections
import functools

import pytest

from fp4zoo.configs import compose
from fp4zoo.planning import targets
from fp4zoo.planning.counting import count
from fp4zoo.planning.hlo import Module
from fp4zoo.training.program import Program

pytestmark = [
    pytest.mark.usefixtures("optimized"),
    pytest.mark.skipif(
        targets.plugin_library() is None,
        reason="the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed: pip install "
        "-e '.[plan]' (Python 3.12 or newer)",
    ),
]

LAYERS = 2
SIZES = [
    f"model.num_layers={LAYERS}",
    "model.embed_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    "model.mlp_dim=512",
    "model.vocab_size=512",
    "precision.rules.first_blocks=0",
    "precision.rules.last_blocks=0",
    "batch_size=4",
    "sequence_length=128",
]
LLAMA = ("model=llama-tiny", *SIZES)
MIXTRAL = ("model=mixtral-tiny", *SIZES, "model.moe.capacity_factor=1.25")
PRODUCT = 'custom_call_target="__cudnn$blockScaledDot"'


@functools.cache
def compiled(target: str, num_devices: int, *overrides: str) -> tuple[Program, str]:
    """The program, and the text that XLA made of it."""
    program = Program(
        compose.load([*overrides, "backend=xla"]),
        targets.target_devices(target, num_devices),
        available=targets.find_target(target).memory_bytes,
    )
    with targets.cudnn_of(targets.find_target(target)):
        lowered = program.lower_train_step()
    # Choosing among kernels takes half of the time, and is no part of what is tested.
    return program, lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()


def fp4_products(program: Program) -> int:
    """Runs of FP4 products in a step without recomputation: three for each FP4 linear."""
    return 3 * LAYERS * len(program.backends)


def check_products(target: str, overrides: tuple[str, ...], num_devices: int = 1) -> None:
    program, text = compiled(target, num_devices, *overrides)
    assert len(program.backends) == 4
    assert {choice.name for _, choice in program.backends} == {"xla"}
    assert count(text, num_devices).gemms["fp4"] == fp4_products(program)
    # What is not FP4: the head's three products, and a layer's two of the router (the third, over
    # eight experts, is shorter than what is counted).
    others = {name: runs for name, runs in count(text, num_devices).gemms.items() if name != "fp4"}
    router = 2 * LAYERS if program.config.model.moe else 0
    assert sum(others.values()) == 3 + router, others
    # One body for the layers' loop, so each product stands in the text once, unless XLA peels it.
    if num_devices == 1:
        assert text.count(PRODUCT) == 3 * len(program.backends)


def test_every_fp4_projection_of_a_mixtral_is_a_block_scaled_product_on_gb300():
    check_products("gb300", MIXTRAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "overrides"),
    [("b200", LLAMA), ("gb300", LLAMA), ("b200", MIXTRAL)],
    ids=["llama-b200", "llama-gb300", "mixtral-b200"],
)
def test_every_fp4_projection_is_a_block_scaled_product(target, overrides):
    check_products(target, overrides)


def test_fsdp_moves_packed_weights_on_b200():
    """A Llama's step on four GPUs: what is gathered of the blocks' weights is FP4 and scales."""
    fsdp = (*LLAMA, "mesh.fsdp=4")
    check_products("b200", fsdp, num_devices=4)
    program, text = compiled("b200", 4, *fsdp)
    config = program.config.model
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    block = config.embed_dim * (config.resolved_head_dim * heads + 3 * config.mlp_dim)
    received = gathered_bytes(text, 4)
    packed = sum(received[dtype] for dtype in ("s8", "u8", "f4e2m1fn", "f8e4m3fn"))
    # For the forward and for the backward pass three quarters of the weights come from the others:
    # half a byte a code, and one scale for 16 x 16 of them.
    assert packed == 2 * LAYERS * 3 / 4 * block * (1 / 2 + 1 / 256)
    in_bfloat16 = 2 * LAYERS * 3 / 4 * block * 2
    assert in_bfloat16 / packed == pytest.approx(3.97, abs=0.01)
    # What else is gathered is the embedding's and the head's, once in either pass.
    table = config.vocab_size * config.embed_dim
    assert received["bf16"] + received["f32"] <= 2 * 2 * 4 * table
    scattered = [c for c in count(text, 4).work.collectives if c.kind == "reduce-scatter"]
    assert sum(c.num_bytes for c in scattered) >= LAYERS * 3 / 4 * block * 4 / 4


@pytest.mark.slow
def test_gradients_go_where_their_parameters_are_on_a_mesh_of_three_axes():
    """data x fsdp x tensor: weight gradients are scattered over fsdp before data adds them up, and
    the activations that tensor adds up are scattered over the sequence."""
    mesh = (*LLAMA, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "batch_size=8")
    check_products("b200", mesh, num_devices=8)
    program, text = compiled("b200", 8, *mesh)
    config = program.config.model
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    blocks = LAYERS * config.embed_dim * (config.resolved_head_dim * heads + 3 * config.mlp_dim)
    table = config.vocab_size * config.embed_dim
    received: collections.Counter[tuple[str, str]] = collections.Counter()
    # Devices of a group are neighbours along tensor, then fsdp, then data.
    axes = {(2, 2): "tensor", (2, 3): "fsdp", (2, 5): "data"}
    for entry in count(text, 8).work.collectives:
        received[entry.kind, axes.get((entry.group, entry.span), "several")] += int(entry.num_bytes)
    assert received["reduce-scatter", "fsdp"] >= blocks / 2 * 4 / 2
    assert blocks / 4 * 4 <= received["all-reduce", "data"] <= (blocks + 2 * table) / 4 * 4
    # A device's tokens: 2 rows of 128. Two sums a layer in either pass, half of each received.
    residual = 2 * 128 * config.embed_dim * 4
    assert received["reduce-scatter", "tensor"] == 2 * 2 * LAYERS * residual / 2
    assert received["all-reduce", "tensor"] <= residual + 4096  # the head's gradient of its input
    assert received["all-reduce", "several"] <= 2 * 4 * table


def gathered_bytes(text: str, num_devices: int) -> collections.Counter[str]:
    """Bytes that all-gathers bring one device in a step from the others, by dtype."""
    received: collections.Counter[str] = collections.Counter()
    for execution in Module(text).executions():
        instruction = execution.instruction
        if instruction.opcode in ("all-gather", "all-gather-start"):
            for operand in instruction.operands:
                part = execution.computation.shape_of(operand)
                others = num_devices - 1
                received[part.dtype] += int(execution.times * part.num_bytes * others)
    return received
