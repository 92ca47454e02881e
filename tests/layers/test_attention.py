import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo.layers import attention as module
from fp4zoo.layers.attention import Attention, AttentionPattern, dot_product_attention

# Legend: B batch, T tokens, N query heads, K key/value heads, H head dimension.

attend = jax.jit(dot_product_attention)


def naive_attention(query, key, value, allowed):
    """One query at a time, in float64; allowed [B, T, S]."""
    batch, length, heads, head_dim = query.shape
    group = heads // key.shape[2]
    output = np.zeros(query.shape)
    for b, t, n in np.ndindex(batch, length, heads):
        keys = key[b, allowed[b, t], n // group].astype(np.float64)
        scores = keys @ query[b, t, n].astype(np.float64) / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        output[b, t, n] = weights @ value[b, allowed[b, t], n // group] / weights.sum()
    return output


def random_inputs(batch=2, length=9, heads=4, kv_heads=2, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(batch, length, heads, head_dim)).astype(np.float32)
    key, value = rng.normal(size=(2, batch, length, kv_heads, head_dim)).astype(np.float32)
    return query, key, value


SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 0, 0]], np.int32)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_against_naive(window, packed, kv_heads):
    query, key, value = random_inputs(kv_heads=kv_heads)
    q, k = np.arange(9)[:, None], np.arange(9)
    allowed = np.broadcast_to(k <= q, (2, 9, 9))
    if window is not None:
        allowed = allowed & (q - window < k)
    if packed:
        allowed = allowed & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    segments = jnp.asarray(SEGMENTS) if packed else None
    pattern = AttentionPattern(segments, segments, sliding_window=window)
    output = attend(query, key, value, pattern)
    np.testing.assert_allclose(output, naive_attention(query, key, value, allowed), atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_query_offset_continues_a_sequence(window):
    """The last rows alone, against a longer cache whose end is unwritten, equal the whole."""
    query, key, value = random_inputs()
    segments = jnp.asarray(SEGMENTS)
    whole = attend(query, key, value, AttentionPattern(segments, segments, sliding_window=window))
    grow = ((0, 0), (0, 4), (0, 0), (0, 0))
    pattern = AttentionPattern(
        segments[:, 6:8],
        jnp.pad(segments, ((0, 0), (0, 4)), constant_values=2),
        query_offset=jnp.array(6),
        sliding_window=window,
    )
    cached_key = np.pad(key, grow, constant_values=50.0)
    cached_value = np.pad(value, grow, constant_values=50.0)
    part = attend(query[:, 6:8], cached_key, cached_value, pattern)
    np.testing.assert_allclose(part, whole[:, 6:8], atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_documents_are_isolated_bit_for_bit(dtype):
    """Forward and backward of document 2 do not feel the values of document 1."""
    first = np.concatenate([np.ones(5, bool), np.zeros(4, bool)])
    segments = jnp.asarray(np.where(first, 1, 2)[None], jnp.int32)
    pattern = AttentionPattern(segments, segments)

    @jax.jit
    def run(query, key, value):
        def loss(query, key, value):
            output = dot_product_attention(query, key, value, pattern)
            return jnp.sum(jnp.sin(output[:, 5:].astype(jnp.float32))), output[:, 5:]

        return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)

    inputs = [jnp.asarray(x, dtype) for x in random_inputs(batch=1)]
    changed = [x.at[:, :5].multiply(-37.5) for x in inputs]
    (gradients, output), (other_gradients, other_output) = run(*inputs), run(*changed)
    np.testing.assert_array_equal(output, other_output)
    for gradient, other in zip(gradients, other_gradients, strict=True):
        np.testing.assert_array_equal(gradient, other)
        np.testing.assert_array_equal(gradient[:, :5], 0)
        assert np.any(np.asarray(gradient[:, 5:], np.float32))


def test_implementation_that_ignores_segment_ids_is_refused(monkeypatch):
    def ignorant(query, key, value, pattern):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    monkeypatch.setitem(
        module.ATTENTION_IMPLEMENTATIONS,
        "ignorant",
        module.AttentionImplementation(ignorant, honours_segment_ids=False),
    )
    query, key, value = random_inputs()
    segments = jnp.asarray(SEGMENTS)
    with pytest.raises(ValueError, match="'ignorant' ignores segment ids.*use 'xla' or 'auto'"):
        dot_product_attention(
            query, key, value, AttentionPattern(segments, segments), implementation="ignorant"
        )
    plain = dot_product_attention(query, key, value, AttentionPattern(), implementation="ignorant")
    reference = attend(query, key, value, AttentionPattern())
    np.testing.assert_allclose(plain, reference, atol=2e-6)


def test_unknown_implementation_names_the_choices():
    with pytest.raises(ValueError, match="'cuddn'.*auto, xla, cudnn"):
        dot_product_attention(*random_inputs(), AttentionPattern(), implementation="cuddn")


@pytest.mark.parametrize("case", ["packed", "plain", "window", "offset"])
def test_cudnn_call_means_the_same_as_xla(monkeypatch, case):
    """cuDNN needs a GPU; what it is asked for does not: XLA is given the same request here."""
    real = jax.nn.dot_product_attention
    asked = []

    def as_xla(*arguments, implementation, **options):
        asked.append(implementation)
        return real(*arguments, implementation="xla", **options)

    query, key, value = random_inputs()
    segments = jnp.asarray(SEGMENTS)
    pattern = {
        "packed": AttentionPattern(segments, segments),
        "plain": AttentionPattern(),
        "window": AttentionPattern(segments, segments, sliding_window=3),
        "offset": AttentionPattern(query_offset=jnp.array(5), sliding_window=3),
    }[case]
    query = query[:, 5:] if case == "offset" else query
    expected = attend(query, key, value, pattern)
    monkeypatch.setattr(jax.nn, "dot_product_attention", as_xla)
    output = dot_product_attention(query, key, value, pattern, implementation="cudnn")
    assert asked == ["cudnn"]
    np.testing.assert_allclose(output, expected, atol=2e-6)


def test_automatic_choice(monkeypatch):
    def chosen(platform, shape, dtype):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        return module._automatic_implementation(jax.ShapeDtypeStruct(shape, dtype))

    assert chosen("cpu", (1, 8, 2, 64), jnp.bfloat16) == "xla"
    assert chosen("gpu", (1, 8, 2, 64), jnp.bfloat16) == "cudnn"
    assert chosen("gpu", (1, 8, 2, 64), jnp.float32) == "xla"
    assert chosen("gpu", (1, 8, 2, 20), jnp.bfloat16) == "xla"
    assert chosen("gpu", (1, 7, 2, 64), jnp.bfloat16) == "xla"


def test_softmax_is_float32_for_bfloat16_inputs():
    query, key, value = random_inputs(length=64, head_dim=64)
    allowed = np.broadcast_to(np.tri(64, dtype=bool), (2, 64, 64))
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
    exact = naive_attention(*(np.asarray(x, np.float32) for x in rounded), allowed)
    output = attend(*rounded, AttentionPattern())
    assert output.dtype == jnp.bfloat16
    # One rounding of the weights and one of the result; scores in bfloat16 would be off by 0.1.
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, atol=0.02)


def test_backward_stores_no_scores():
    query, key, value = random_inputs(length=64)
    segments = jnp.ones((2, 64), jnp.int32)
    _, pullback = jax.vjp(
        functools.partial(dot_product_attention, pattern=AttentionPattern(segments, segments)),
        *map(jnp.asarray, (query, key, value)),
    )
    assert max(jnp.size(leaf) for leaf in jax.tree.leaves(pullback)) <= query.size


def test_layer_shapes_and_parameters():
    layer = nnx.eval_shape(
        lambda: Attention(
            32, 4, num_kv_heads=2, head_dim=16, qk_norm=True, qkv_bias=True, rngs=nnx.Rngs(0)
        )
    )
    shapes = {
        ".".join(map(str, path)): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    assert shapes == {
        "qkv.kernel": (32, 2, 4, 16),
        "qkv.bias": (2, 4, 16),
        "output.kernel": (64, 32),
        "query_norm.scale": (16,),
        "key_norm.scale": (16,),
    }
    x = jax.ShapeDtypeStruct((2, 5, 32), jnp.bfloat16)
    y = nnx.eval_shape(lambda layer, x: layer(x), layer, x)
    assert y.shape == x.shape and y.dtype == jnp.bfloat16


def test_layer_is_causal():
    layer = Attention(32, 4, num_kv_heads=2, recipe="fp32", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 8, 32))
    call = nnx.jit(lambda layer, x: layer(x))
    y, changed = call(layer, x), call(layer, x.at[:, 5].add(1.0))
    np.testing.assert_array_equal(y[:, :5], changed[:, :5])
    assert np.all(np.any(np.asarray(y[:, 5:] != changed[:, 5:]), axis=-1))


def test_parts_compose_to_the_whole():
    """What generation with a cache does: project, attend, output, one token at a time."""
    layer = Attention(
        32, 4, num_kv_heads=2, recipe="fp32", sliding_window=4, qk_norm=True, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (2, 6, 32))
    whole = nnx.jit(lambda layer, x: layer(x))(layer, x)

    @nnx.jit
    def step(layer, token, cache, t):
        query, key, value = layer.project(token, layer.rope(t[None, None]))
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([key, value]), (0, 0, t, 0, 0))
        pattern = AttentionPattern(query_offset=t, sliding_window=4)
        mixed = dot_product_attention(query, cache[0], cache[1], pattern)
        return layer.output(mixed.reshape(2, 1, 32)), cache

    cache = jnp.zeros((2, 2, 10, 2, 8))
    for t in range(6):
        y, cache = step(layer, x[:, t : t + 1], cache, jnp.array(t))
        np.testing.assert_allclose(y[:, 0], whole[:, t], atol=1e-6)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads=6 is not a multiple of num_kv_heads=4"):
        Attention(48, 6, num_kv_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Attention.qkv.*24.*16"):
        Attention(96, 4, head_dim=24, recipe="nvfp4", rngs=nnx.Rngs(0))
