import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo import models
from fp4zoo.layers.rope import rope_frequencies, rope_tables
from fp4zoo.models import ModelConfig, MoEConfig, PrecisionRules

ALL_FP4 = PrecisionRules(first_blocks=0, last_blocks=0)


@functools.cache
def make(recipe="fp32", *, moe=None, num_layers=3, rules=ALL_FP4, remat="none", seed=0,
         activation_dtype="float32", tie_embeddings=False, sliding_window=None):  # fmt: skip
    config = ModelConfig(
        architecture="llama" if moe is None else "mixtral", vocab_size=64, num_layers=num_layers,
        embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48, max_positions=64,
        tie_embeddings=tie_embeddings, sliding_window=sliding_window, moe=moe,
    )  # fmt: skip
    return models.create(
        config, recipe=recipe, rules=rules, remat=remat, activation_dtype=activation_dtype,
        rngs=nnx.Rngs(seed),
    )  # fmt: skip


def abstract(*arguments, **options):
    """The same model without memory behind its parameters."""
    return nnx.eval_shape(lambda: make.__wrapped__(*arguments, **options))


@functools.cache
def tokens(batch=2, length=16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 64, (batch, length)), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_gradients(graph, parameters, tokens, segment_ids, weights, key):
    def loss(parameters):
        model = nnx.merge(graph, parameters)
        hidden, auxiliary = model.hidden(tokens, segment_ids, rounding_key=key)
        logits = model.head(hidden)
        return jnp.mean(weights[..., None] * jnp.sin(3 * logits)), (logits, auxiliary)

    return jax.value_and_grad(loss, has_aux=True)(parameters)


def loss_and_gradients(model, tokens, segment_ids=None, weights=None, key=None):
    """((loss, (logits, auxiliary)), gradients) of a sum that any change of a logit would move."""
    weights = jnp.ones(tokens.shape) if weights is None else weights
    graph, parameters = nnx.split(model)
    return _loss_and_gradients(graph, parameters, tokens, segment_ids, weights, key)


def assert_trees_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def unstacked(model):
    """The model's blocks one by one, in order."""
    for segment in model.segments:
        graph, parameters = nnx.split(model.blocks[segment.name])
        for layer in range(segment.stop - segment.start):
            yield nnx.merge(graph, jax.tree.map(lambda x, layer=layer: x[layer], parameters))


@pytest.mark.parametrize(("recipe", "moe"), [("fp32", None), ("nvfp4", MoEConfig(4, 2))])
def test_scan_equals_a_loop_over_blocks(recipe, moe):
    """Prefix, middle and suffix run in order, each with its own parameters and precision."""
    model = make(recipe, moe=moe, num_layers=4, rules=PrecisionRules(1, 1))
    segment_ids = jnp.asarray([[1] * 9 + [2] * 7, [1] * 12 + [0] * 4], jnp.int32)

    @jax.jit
    def loop(tokens):
        config = model.config
        frequencies = rope_frequencies(config.resolved_head_dim, config.rope_theta)
        rope = rope_tables(jnp.arange(16)[None], frequencies)
        x, reports = model.embedding(tokens), []
        for block in unstacked(model):
            x, report = block(x, rope=rope, segment_ids=segment_ids, rounding_keys=None)
            reports.append(report)
        return model.head(model.final_norm(x)), reports

    expected, reports = loop(tokens())
    hidden, auxiliary = jax.jit(model.hidden)(tokens(), segment_ids)
    np.testing.assert_allclose(jax.jit(model.head)(hidden), expected, atol=1e-5)
    if moe is None:
        assert auxiliary == {}
        return
    assert set(auxiliary) == {
        "load_balance_loss", "router_z_loss", "tokens_per_expert", "dropped_fraction"
    }  # fmt: skip
    counts = np.stack([report["tokens_per_expert"] for report in reports])
    np.testing.assert_array_equal(auxiliary["tokens_per_expert"], counts)
    # 28 tokens that are not padding, two experts each.
    np.testing.assert_array_equal(counts.sum(axis=1), [56] * 4)
    for name in ("load_balance_loss", "router_z_loss"):
        total = sum(float(report[name]) for report in reports)
        assert float(auxiliary[name]) == pytest.approx(total, rel=1e-5)
    assert float(auxiliary["dropped_fraction"]) == 0


def test_dropped_fraction_is_the_mean_over_layers():
    model = make(moe=MoEConfig(4, 2, capacity_factor=0.5), num_layers=2)
    _, auxiliary = jax.jit(model.hidden)(tokens(1, 64))
    # An expert takes 0.5 · 64 · 2 / 4 = 16 of a sequence's 128 choices, if it gets that many.
    kept = np.minimum(auxiliary["tokens_per_expert"], 16).sum(axis=1)
    assert float(auxiliary["dropped_fraction"]) == pytest.approx(np.mean(1 - kept / 128))
    assert kept.max() < 128


def test_golden_logits():
    """Initialisation and computation together; the numbers were recorded from this code."""
    model = make()
    logits = jax.jit(lambda tokens: model(tokens))(tokens())
    assert logits.shape == (2, 16, 64) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0, 0, :4], GOLDEN_FIRST, atol=2e-5)
    np.testing.assert_allclose(logits[1, 15, :4], GOLDEN_LAST, atol=2e-5)


GOLDEN_FIRST = [0.118409, 0.131180, 0.106014, 0.096631]
GOLDEN_LAST = [0.092929, 0.101589, 0.128063, 0.037743]


def test_initial_deviations():
    model = make(num_layers=8)
    (block,) = model.blocks.values()
    assert float(jnp.std(block.attention.qkv.kernel[...])) == pytest.approx(0.02, rel=0.03)
    assert float(jnp.std(block.mlp.gate_up.kernel[...])) == pytest.approx(0.02, rel=0.03)
    for kernel in (block.attention.output.kernel[...], block.mlp.down.kernel[...]):
        assert float(jnp.std(kernel)) == pytest.approx(0.02 / 4, rel=0.03)
    # Every layer draws its own numbers.
    assert len({float(x) for x in block.mlp.down.kernel[:, 0, 0]}) == 8


@pytest.mark.parametrize("moe", [None, pytest.param(MoEConfig(4, 2), marks=pytest.mark.slow)])
def test_precisions_start_at_the_same_parameters(moe):
    def per_layer(model):
        return [nnx.state(block) for block in unstacked(model)]

    reference = make("fp32", moe=moe, num_layers=4)
    split = make("nvfp4", moe=moe, num_layers=4, rules=PrecisionRules(1, 1), remat="full")
    assert list(split.blocks) == ["middle", "prefix", "suffix"]
    assert_trees_equal(per_layer(reference), per_layer(split))
    assert_trees_equal(nnx.state(reference.embedding), nnx.state(split.embedding))
    assert_trees_equal(nnx.state(reference.output_head), nnx.state(split.output_head))
    other = make("fp32", moe=moe, num_layers=4, seed=1)
    assert np.any(other.embedding.embedding[...] != reference.embedding.embedding[...])


@pytest.mark.parametrize("recipe", ["fp32", "nvfp4"])
def test_causal(recipe):
    """In FP4 a tensor's scale sees later tokens too, so that the past is close instead of equal."""
    model = make(recipe, tie_embeddings=True)
    call = jax.jit(lambda tokens: model(tokens))
    first = tokens()
    changed = first.at[:, 9].set((first[:, 9] + 1) % 64)
    a, b = call(first), call(changed)
    if recipe == "fp32":
        np.testing.assert_array_equal(a[:, :9], b[:, :9])
    else:
        np.testing.assert_allclose(a[:, :9], b[:, :9], atol=0.05)
    assert np.all(np.any(np.asarray(a[:, 9:] != b[:, 9:]), axis=-1))


@pytest.mark.parametrize(
    ("recipe", "activation_dtype"), [("fp32", "float32"), ("bf16", "bfloat16")]
)
def test_packed_documents_are_isolated_bit_for_bit(recipe, activation_dtype):
    """Other tokens in document 1: document 2 has the same logits and gives the same gradients."""
    model = make(recipe, activation_dtype=activation_dtype)
    segment_ids = jnp.asarray([[1] * 7 + [2] * 9, [1] * 11 + [2] * 5], jnp.int32)
    second = (segment_ids == 2).astype(jnp.float32)
    first = tokens()
    changed = jnp.where(segment_ids == 1, tokens(seed=1), first)
    (loss, (logits, _)), gradients = loss_and_gradients(model, first, segment_ids, second)
    (other_loss, (other_logits, _)), other = loss_and_gradients(model, changed, segment_ids, second)
    mask = np.asarray(segment_ids) == 2
    np.testing.assert_array_equal(np.asarray(logits)[mask], np.asarray(other_logits)[mask])
    assert np.any(np.asarray(logits)[~mask] != np.asarray(other_logits)[~mask])
    assert float(loss) == float(other_loss) != 0
    assert_trees_equal(gradients, other)


def test_a_packed_document_computes_as_if_alone():
    model = make()
    call = jax.jit(lambda *inputs: model(*inputs))
    row = tokens(1, 16)
    segment_ids = jnp.asarray([[1] * 6 + [2] * 10], jnp.int32)
    positions = jnp.asarray([[*range(6), *range(10)]], jnp.int32)
    packed = call(row, segment_ids, positions)
    np.testing.assert_allclose(packed[:, 6:], call(row[:, 6:]), atol=1e-6)
    np.testing.assert_allclose(packed[:, :6], call(row[:, :6]), atol=1e-6)


def test_sliding_window_bounds_what_a_token_feels():
    """Three layers of window 3 look back 3 · 2 tokens and no further."""
    model = make(sliding_window=3)
    call = jax.jit(lambda tokens: model(tokens))
    first = tokens()
    changed = first.at[:, 4].set((first[:, 4] + 1) % 64)
    differs = np.any(np.asarray(call(first) != call(changed)), axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(differs), range(4, 11))


def test_tied_embeddings_learn_from_both_ends():
    model = make(tie_embeddings=True)
    assert model.output_head is None
    np.testing.assert_allclose(
        model.head(jnp.ones((1, 32))), model.embedding.embedding[...].sum(1)[None], rtol=1e-4
    )
    gradient = loss_and_gradients(model, jnp.zeros((1, 4), jnp.int32))[1]
    # Only token 0 is looked up, but every row is a class of the head.
    assert np.all(np.any(np.asarray(gradient["embedding"]["embedding"][...]), axis=1))


@pytest.mark.parametrize(
    ("recipe", "remat", "moe"),
    [
        ("nvfp4", "save_quantized", None),
        pytest.param("fp32", "full", None, marks=pytest.mark.slow),
        pytest.param("nvfp4", "full", None, marks=pytest.mark.slow),
        pytest.param("nvfp4", "save_quantized", MoEConfig(4, 2), marks=pytest.mark.slow),
    ],
)
def test_remat_changes_nothing_but_memory(recipe, remat, moe):
    key = jax.random.key(0)
    plain = loss_and_gradients(make(recipe, moe=moe), tokens(), key=key)
    again = loss_and_gradients(make(recipe, moe=moe, remat=remat), tokens(), key=key)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("moe", [None, MoEConfig(4, 2)])
def test_remat_does_not_repeat_quantising(moe):
    """Quantisers work on the bits of floats, nothing else does: those operations are counted."""

    def operations(remat):
        graph, parameters = nnx.split(abstract("nvfp4", moe=moe, remat=remat))
        text = _loss_and_gradients.lower(
            graph, parameters, tokens(), None, jnp.ones((2, 16)), jax.random.key(0)
        ).as_text()
        return text.count("stablehlo.bitcast_convert")

    assert operations("none") > 0
    assert operations("save_quantized") == operations("none")
    assert operations("full") > operations("none")


def lowered_size(num_layers, recipe, moe, rules):
    model = abstract(recipe, moe=moe, num_layers=num_layers, rules=rules)
    graph, parameters = nnx.split(model)
    return len(
        _loss_and_gradients.lower(
            graph, parameters, tokens(), tokens(), jnp.ones((2, 16)), jax.random.key(0)
        ).as_text()
    )


@pytest.mark.parametrize("rules", [ALL_FP4, PrecisionRules()])
@pytest.mark.parametrize("moe", [None, MoEConfig(4, 2)])
def test_program_does_not_grow_with_depth(moe, rules):
    size = lowered_size(8, "nvfp4", moe, rules)
    assert lowered_size(32, "nvfp4", moe, rules) == pytest.approx(size, rel=0.1)


def test_rounding_key_decides_the_gradients_and_nothing_else():
    model = make("nvfp4")
    run = functools.partial(loss_and_gradients, model, tokens())
    (loss, _), gradients = run(key=jax.random.key(0))
    assert_trees_equal(gradients, run(key=jax.random.key(0))[1])
    (other_loss, _), other = run(key=jax.random.key(1))
    assert float(loss) == float(other_loss)
    kernels = [
        (np.asarray(a), np.asarray(b))
        for (path, a), (_, b) in zip(
            nnx.to_flat_state(gradients), nnx.to_flat_state(other), strict=True
        )
        if path[-1] == "kernel" and "blocks" in path
    ]
    assert len(kernels) == 4
    for a, b in kernels:
        # Every layer draws its own bits, so every layer's gradient changes.
        assert np.all(np.any(a != b, axis=tuple(range(1, a.ndim))))
        np.testing.assert_allclose(a, b, atol=0.5 * np.abs(a).max())


def test_layers_with_equal_inputs_draw_different_bits():
    """Two layers, two linears: all keys of one step differ."""
    model = make("nvfp4", num_layers=4)
    keys = jax.random.key_data(model._rounding_keys(jax.random.key(0)))
    assert keys.shape[:2] == (4, 4)
    assert len(np.unique(keys.reshape(16, -1), axis=0)) == 16
    assert make("fp32")._rounding_keys(jax.random.key(0)) is None


@pytest.mark.parametrize("activation_dtype", ["float32", "bfloat16", "float16"])
def test_activations_have_the_asked_dtype(activation_dtype):
    model = make("bf16", activation_dtype=activation_dtype)
    hidden, _ = jax.eval_shape(model.hidden, tokens())
    assert hidden.dtype == activation_dtype
    assert jax.eval_shape(model.head, hidden).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_bfloat16_activations_approximate_float32():
    model, rounding_model = make("fp32"), make("fp32", activation_dtype="bfloat16")
    exact = jax.jit(lambda tokens: model(tokens))(tokens())
    rounded = jax.jit(lambda tokens: rounding_model(tokens))(tokens())
    np.testing.assert_allclose(rounded, exact, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(remat="everything"), "remat=everything: unknown choice"),
        (dict(activation_dtype="bfloat"), "activation_dtype=bfloat.*did you mean 'bfloat16'"),
        (dict(recipe="nvfp"), "unknown recipe 'nvfp': did you mean 'nvfp4'"),
        (dict(rules=PrecisionRules(4, 4)), "first_blocks=4 and last_blocks=4 exceed"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**({"recipe": "nvfp4"} | arguments))
    assert "\n" not in str(error.value)


def test_dimension_without_blocks_names_the_key():
    config = ModelConfig("llama", 64, 2, 32, 4, 2, mlp_dim=40, max_positions=64)
    with pytest.raises(
        ValueError, match="model.head_dim=8 is not a multiple of 16, which nvfp4 needs in attention"
    ):
        models.create(config, rules=ALL_FP4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model.mlp_dim=40 is not a multiple of 16"):
        rules = PrecisionRules(0, 0, attention=False)
        models.create(config, rules=rules, rngs=nnx.Rngs(0))


def test_too_long_a_sequence_names_the_key():
    with pytest.raises(ValueError, match="65 tokens exceeds model.max_positions=64"):
        jax.eval_shape(make().hidden, tokens(1, 65))
