"""Backend `transformer_engine` with Transformer Engine's own Python files and no GPU.

`../test_transformer_engine.py` runs this file in a process of its own: Transformer Engine reads the
environment when it is imported, and its compiled module is a stand-in here. What is lowered and
compiled for a GPU is what a GPU would get; what is computed is Transformer Engine's own arithmetic
in JAX (NVTE_JAX_CUSTOM_CALLS=false), which its CUDA kernels are to be equal to.
"""

import functools
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then looks for no CUDA library
sys.path.insert(0, str(Path(__file__).parent))
common = importlib.import_module("transformer_engine.common")
common.load_framework_extension = lambda framework: None

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from flax import nnx  # noqa: E402
from jax.interpreters import partial_eval  # noqa: E402

from fp4zoo.configs import compose  # noqa: E402
from fp4zoo.errors import UserError  # noqa: E402
from fp4zoo.layers import NVFP4Dense, NVFP4MoE  # noqa: E402
from fp4zoo.numerics import (  # noqa: E402
    GEMM_NAME,
    QUANTIZED_NAME,
    get_recipe,
    grouped_linear,
    linear,
    nvfp4_recipe,
)
from fp4zoo.numerics.backends import transformer_engine, xla  # noqa: E402
from fp4zoo.numerics.backends.placement import Order  # noqa: E402
from fp4zoo.numerics.backends.transformer_engine_recipe import installation_fault  # noqa: E402
from fp4zoo.numerics.platform import DeviceKind, compiling_for  # noqa: E402
from fp4zoo.planning import targets  # noqa: E402
from fp4zoo.planning.counting import count  # noqa: E402
from fp4zoo.training.program import Program  # noqa: E402

from ....training.test_blackwell import LAYERS, LLAMA, fp4_products, gathered_bytes  # noqa: E402
from ...reference import count_primitive  # noqa: E402

KEY = jax.random.key(7)
B200 = DeviceKind("gpu", "NVIDIA B200", "10.0")
DENSE_CALLS = {"te_rht_amax_ffi": 2, "te_dbias_quantize_ffi": 3, "te_gemm_v2_ffi": 3}


def test_it_imports():
    assert installation_fault() is None


# What a GPU gets


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def custom_calls(function, *arguments) -> Counter:
    with compiling_for(B200):
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return Counter(re.findall(r"custom_call @(te_\w+)", text))


def forward_and_backward(call):
    def products(x, w, g):
        y, pullback = jax.vjp(call, x, w)
        return y, *pullback(g)

    return products


@pytest.mark.parametrize("content_seeded", [False, True], ids=["key", "content seeded"])
@pytest.mark.parametrize(
    ("function", "x", "w", "g"),
    [
        (linear, (2, 64, 128), (128, 2, 256), (2, 64, 2, 256)),
        (linear, (5, 128), (128, 256), (5, 256)),  # tokens are padded
        (grouped_linear, (4, 48, 128), (4, 128, 2, 256), (4, 48, 2, 256)),  # experts are a loop
    ],
    ids=["dense", "few tokens", "experts"],
)
def test_a_forward_and_backward_pass_is_eight_custom_calls(function, x, w, g, content_seeded):
    call = functools.partial(
        function,
        recipe=get_recipe("nvfp4"),
        key=KEY,
        content_seeded=content_seeded,
        backend="transformer_engine",
    )
    arguments = shape(*x), shape(*w, dtype=jnp.float32), shape(*g)
    assert custom_calls(forward_and_backward(call), *arguments) == DENSE_CALLS


def test_a_forward_pass_alone_is_one_product():
    call = functools.partial(
        linear, recipe=get_recipe("nvfp4"), key=KEY, backend="transformer_engine"
    )
    calls = custom_calls(call, shape(2, 1, 128), shape(128, 128, dtype=jnp.float32))
    assert calls == {"te_rht_amax_ffi": 1, "te_dbias_quantize_ffi": 2, "te_gemm_v2_ffi": 1}


def test_without_hadamard_there_are_fewer_and_smaller_features_fit():
    recipe = nvfp4_recipe(hadamard=False)
    call = functools.partial(linear, recipe=recipe, key=KEY, backend="transformer_engine")
    arguments = shape(64, 32), shape(32, 96, dtype=jnp.float32), shape(64, 96)
    expected = {name: runs for name, runs in DENSE_CALLS.items() if "rht" not in name}
    assert custom_calls(forward_and_backward(call), *arguments) == expected


def test_a_layer_of_somebodys_module():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = NVFP4Dense(128, 256, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return jnp.sum(self.up(jnp.tanh(x)) ** 2)

    with compiling_for(B200):
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    assert model.up.backend == "transformer_engine"  # auto, with Transformer Engine on a B200

    def gradients(model, x):
        return nnx.value_and_grad(lambda model, x: model(x))(model, x)[1]

    graphdef, state = nnx.split(model)

    def step(state, x):
        return nnx.state(gradients(nnx.merge(graphdef, state), x))

    calls = custom_calls(step, state, shape(64, 128))
    # Nobody wants x's gradient: JAX leaves its product out.
    assert calls == DENSE_CALLS | {"te_gemm_v2_ffi": 2}


def test_a_mixture_runs_when_asked_to_and_auto_takes_the_batched_products():
    def create(backend):
        options = {"capacity_factor": 1.0, "backend": backend}
        return nnx.eval_shape(lambda: NVFP4MoE(128, 128, 4, 2, rngs=nnx.Rngs(0), **options))

    with compiling_for(B200):
        assert create("auto").backend == "xla"
        graphdef, state = nnx.split(create("transformer_engine"))

    def loss(state, x):
        return jnp.sum(nnx.merge(graphdef, state)(x)[0].astype(jnp.float32) ** 2)

    calls = custom_calls(jax.grad(loss, (0, 1), allow_int=True), state, shape(2, 64, 128))
    assert calls == {name: 2 * runs for name, runs in DENSE_CALLS.items()}


@pytest.mark.parametrize(
    ("policy", "products", "roundings"),
    [
        (jax.checkpoint_policies.save_only_these_names(QUANTIZED_NAME, GEMM_NAME), 6, 6),
        (jax.checkpoint_policies.nothing_saveable, 7, 10),
    ],
    ids=["save_quantized", "full"],
)
def test_saved_residuals_are_not_rounded_again(policy, products, roundings):
    """Two layers of three products and three roundings (each of both layouts at once). Without
    saved residuals the first's product and both layers' two roundings of the forward pass run
    again."""
    call = functools.partial(
        linear, recipe=get_recipe("nvfp4"), key=KEY, backend="transformer_engine"
    )

    def two_layers(x, w):
        return call(jnp.tanh(call(jnp.tanh(x), w)), w)

    def loss(x, w):
        y = jax.checkpoint(two_layers, policy=policy)(x, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    with compiling_for(B200):
        arguments = shape(64, 128), shape(128, 128, dtype=jnp.float32)
        jaxpr = jax.jit(jax.grad(loss, (0, 1))).trace(*arguments).jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * 2)
    assert count_primitive(live, "te_gemm_v2_ffi_wrapper") == products
    assert count_primitive(live, "te_dbias_quantize_ffi_wrapper") == roundings


needs_plugin = pytest.mark.skipif(
    targets.plugin_library() is None, reason="the CUDA plugin's wheels are not installed"
)


@functools.cache
def compiled(*overrides):
    """The training step of a small Llama on four B200, and the text that XLA made of it."""
    options = [*LLAMA, "model.num_kv_heads=4", "backend=auto", *overrides]
    target = targets.find_target("b200")
    devices = targets.target_devices("b200", 4)
    program = Program(compose.load(options), devices, available=target.memory_bytes)
    with targets.cudnn_of(target), jax.set_mesh(program.mesh):
        lowered = program.lower_train_step()
        return program, lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()


@needs_plugin
def test_fsdp_moves_packed_weights():
    """Codes and one scale for 16 of them: its kernels have repeated those of 16 x 16 blocks."""
    program, text = compiled("mesh.fsdp=4")
    assert {choice.name for _, choice in program.backends} == {"transformer_engine"}
    assert count(text, 4).gemms["fp4"] == fp4_products(program)
    config = program.config.model
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    block = config.embed_dim * (config.resolved_head_dim * heads + 3 * config.mlp_dim)
    received = gathered_bytes(text, 4)
    packed = sum(received[dtype] for dtype in ("s8", "u8", "f4e2m1fn", "f8e4m3fn"))
    assert packed == 2 * LAYERS * 3 / 4 * block * (1 / 2 + 1 / 16)
    table = config.vocab_size * config.embed_dim
    assert received["bf16"] + received["f32"] <= 2 * 2 * 4 * table
    # Parts of the weights' gradients are added up in float32, if not scattered.
    added = [c for c in count(text, 4).work.collectives if c.kind == "all-reduce"]
    assert sum(c.num_bytes for c in added) >= LAYERS * 2 * 3 / 4 * block * 4
    assert not re.search(r"= \(*bf16\[.*(all-reduce|reduce-scatter)(-start)?\(", text)


def test_what_a_mesh_leaves_too_small_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = shape(64, 128), shape(128, 128, dtype=jnp.float32)
    call = functools.partial(linear, recipe=get_recipe("nvfp4"), key=KEY)
    call = functools.partial(call, backend="transformer_engine", kernel_axes=("embed", "mlp"))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(UserError, match="mesh.tensor=2 .*128"),
    ):
        jax.eval_shape(call, x, w)


def test_experts_that_a_mesh_divides_are_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = shape(4, 64, 128), shape(4, 128, 128, dtype=jnp.float32)
    call = functools.partial(grouped_linear, recipe=get_recipe("nvfp4"), key=KEY)
    call = functools.partial(call, backend="transformer_engine")
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(UserError, match="mesh.expert=2"):
        jax.eval_shape(call, x, w)


# What it computes


@pytest.fixture
def in_jax(monkeypatch):
    """Transformer Engine's arithmetic in JAX, mended.

    Its rounding to E4M3 is to IEEE's, which ends at 240 and makes larger scales NaN; scales of
    16 x 16 blocks are tiled where they ought to be repeated; and the factor 1/6 comes first, where
    its CUDA kernels and its reference in PyTorch multiply as we do (which decides ties).
    """
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    module = importlib.import_module("transformer_engine.jax.quantize.quantizer")
    source = textwrap.dedent(inspect.getsource(module.NVFP4Quantizer._quantize_func))
    for ours, theirs in (
        (
            "jax.lax.optimization_barrier(block_scale_inv)",
            "jax.lax.reduce_precision(block_scale_inv, 4, 3)",
        ),
        (
            "return _reduce(lambda x, a: jnp.repeat(x, reps[a], a), range(x.ndim), x)",
            "return jnp.tile(x, reps)",
        ),
        (
            "block_scale_inv = block_amax * (tensor_scale * jnp.float32(1 / 6))",
            "block_scale_inv = block_scale_inv * tensor_scale",
        ),
    ):
        assert source.count(theirs) == 1, theirs
        source = source.replace(theirs, ours)
    names = {**vars(module), "_reduce": functools.reduce}
    exec(source, names)
    monkeypatch.setattr(module.NVFP4Quantizer, "_quantize_func", names["_quantize_func"])


multiplies_in_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax.nn.scaled_matmul has no CPU path"
)


def operands(rows, in_features, out_features, experts=()):
    random = np.random.default_rng(0)
    x = random.normal(size=(*rows, in_features)) * np.exp(random.normal(size=(*rows, 1)))
    w = random.normal(size=(*experts, in_features, *out_features)) * 0.1
    g = random.normal(size=(*rows, *out_features))
    return x.astype(jnp.bfloat16), w.astype(np.float32), g.astype(jnp.bfloat16)


def run(function, recipe, backend, arguments, key=KEY, **options):
    call = functools.partial(function, recipe=recipe, key=key, backend=backend, **options)
    return jax.jit(forward_and_backward(call))(*arguments)


@multiplies_in_jax
@pytest.mark.parametrize(
    ("function", "recipe", "arguments"),
    [
        (linear, nvfp4_recipe(stochastic_rounding=False), operands((2, 48), 128, (2, 64))),
        (
            grouped_linear,
            nvfp4_recipe(stochastic_rounding=False, hadamard=False, two_dimensional_weights=False),
            operands((3, 48), 64, (96,), experts=(3,)),
        ),
    ],
    ids=["dense", "experts, nothing but 1D blocks"],
)
def test_products_are_the_emulations_to_bfloat16_rounding(in_jax, function, recipe, arguments):
    ours = run(function, recipe, "transformer_engine", arguments)
    for a, b in zip(ours, run(function, recipe, "emulated", arguments), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(c.astype(jnp.bfloat16), np.float64) for c in (a, b))
        # Sums in another order: a few values round to the neighbouring bfloat16.
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-6 * np.abs(b).max())
        assert np.mean(a != b) < 1e-3 and np.abs(b).max() > 0


def test_codes_scales_and_amax_are_the_emulations_bit_for_bit(in_jax):
    from transformer_engine.jax.cpp_extensions import quantize

    recipe = nvfp4_recipe(stochastic_rounding=False)
    x, w, g = operands((64,), 128, (256,))

    @jax.jit
    def both(x, w, g):
        quantizers = transformer_engine.quantizers(recipe)
        theirs = [
            quantize(array, quantizer=quantizer)
            for array, quantizer in (
                (x, quantizers.x),
                (w, quantizers.kernel),
                (g, quantizers.dgrad),
            )
        ]
        pack = functools.partial(xla.pack, order=Order())
        ours = [
            (pack(recipe.fprop_x, x[None], -1), pack(recipe.wgrad_x, x[None], -2, swap=True)),
            (pack(recipe.dgrad_w, w[None], -1), pack(recipe.fprop_w, w[None], -2, swap=True)),
            (pack(recipe.dgrad_g, g[None], -1), pack(recipe.wgrad_g, g[None], -2, swap=True)),
        ]
        layouts = [(t.rowwise_tensor, t.colwise_tensor) for t in theirs]
        return jax.tree.leaves(
            [[(t.data, t.scale_inv, t.amax) for t in pair] for pair in layouts]
        ), [
            (p.codes[0], xla._row_scales(p.codes, p.scales)[0], p.scale.reshape(1) * 2688)
            for pair in ours
            for p in pair
        ]

    theirs, ours = both(x, w, g)
    for a, b in zip(theirs, jax.tree.leaves(ours), strict=True):
        a, b = (np.asarray(c.astype(jnp.float32)) for c in (a, b))
        if a.size == 1:
            np.testing.assert_allclose(a, b, rtol=1e-6)  # amax, through a division and back
        else:
            np.testing.assert_array_equal(a, b)


@multiplies_in_jax
def test_stochastic_rounding_follows_the_key_and_is_unbiased(in_jax):
    recipe, arguments = get_recipe("nvfp4"), operands((64,), 128, (128,))
    call = functools.partial(linear, recipe=recipe, backend="transformer_engine")

    @jax.jit
    def weight_gradient(key, x, w, g):
        return jax.vjp(functools.partial(call, key=key), x, w)[1](g)[1]

    first, second = (weight_gradient(jax.random.key(n), *arguments) for n in (0, 1))
    again = weight_gradient(jax.random.key(0), *arguments)
    assert np.array_equal(first, again) and not np.array_equal(first, second)
    exact = np.asarray(arguments[0], np.float64).T @ np.asarray(arguments[2], np.float64)
    draws = [weight_gradient(jax.random.key(n), *arguments) for n in range(32)]
    error = np.linalg.norm(first - exact) / np.linalg.norm(exact)
    mean_error = np.linalg.norm(np.mean(draws, 0) - exact) / np.linalg.norm(exact)
    assert mean_error < 0.75 * error  # what is left is x's rounding to nearest


@multiplies_in_jax
def test_content_seeded_calls_draw_by_their_gradient(in_jax):
    x, w, g = operands((64,), 128, (128,))
    call = functools.partial(
        linear, recipe=get_recipe("nvfp4"), content_seeded=True, backend="transformer_engine"
    )

    @jax.jit
    def input_gradient(g):
        return jax.vjp(call, x, w)[1](g)[0].astype(jnp.float32)

    other = np.array(g)
    other[0, 0] *= -1  # the same amax: rows but the first have the same scales
    assert np.array_equal(input_gradient(g), input_gradient(g))
    assert not np.array_equal(input_gradient(g)[1:], input_gradient(other)[1:])
