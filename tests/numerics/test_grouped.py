"""`grouped_linear`: every expert is a linear layer of its own tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.numerics import RECIPES, get_recipe, grouped_linear
from fp4zoo.numerics.random_bits import content_hash, fold, key_words

from .reference import assert_close, count_e2m1_roundings, gemms, gradient_bits

KEY = jax.random.key(7)
WORDS = key_words(KEY)
EXPERTS, TILES, ROWS, K, N = 4, 6, 32, 48, 32
# Expert 1 has no token, expert 3 two tiles; the last tile is unused and says the last expert.
TILE_EXPERT, NUM_TILES = np.array([0, 0, 2, 3, 3, 3], np.int32), np.int32(5)


@functools.partial(jax.jit, static_argnames=("recipe", "content_seeded"))
def run(recipe, x, w, g, tile_expert, num_tiles, key=KEY, content_seeded=False):
    def call(x, w):
        return grouped_linear(
            x,
            w,
            tile_expert,
            num_tiles,
            recipe=get_recipe(recipe),
            key=key,
            content_seeded=content_seeded,
        )

    y, pullback = jax.vjp(call, x, w)
    return y, *pullback(g.astype(y.dtype))


def operands(dtype=np.float32):
    """Experts of different magnitude; the last rows of an expert's last tile are empty."""
    random = np.random.default_rng(0)
    magnitude = np.array([1.0, 1.0, 100.0, 0.01])[TILE_EXPERT][:, None, None]
    used = np.ones((TILES, ROWS, 1))
    used[1, 20:] = used[2, 5:] = used[5] = 0
    x = random.normal(size=(TILES, ROWS, K)) * used * magnitude
    g = random.normal(size=(TILES, ROWS, N)) * used / magnitude
    w = random.normal(size=(EXPERTS, K, N)) * 0.1
    return x.astype(dtype), w.astype(np.float32), g.astype(dtype)


def expected(recipe, x, w, g, words=WORDS):
    """The NumPy reference on each expert's own rows; bits are those of the rows' places."""
    flat_g = np.asarray(g, np.float32).reshape(-1, N)
    flat_x = np.asarray(x, np.float32).reshape(-1, K)
    y, dx, dw = np.zeros((TILES * ROWS, N)), np.zeros((TILES * ROWS, K)), np.zeros(w.shape)
    bits = [np.asarray(b) for b in gradient_bits(words, flat_g.shape)]
    used = np.arange(TILES) < NUM_TILES
    for expert in range(EXPERTS):
        rows = np.repeat(used & (TILE_EXPERT == expert), ROWS)
        if rows.any():
            y[rows], dx[rows], dw[expert] = gemms(
                get_recipe(recipe),
                flat_x[rows],
                w[expert],
                flat_g[rows],
                [b[rows] for b in bits],
            )
    return y, dx, dw


def assert_close_by_expert(ours, reference, tolerance=2e-6):
    y, dx, dw = reference
    for rows, truth in ((ours[0], y), (ours[1], dx)):
        rows, truth = np.asarray(rows, np.float64), truth.reshape(rows.shape)
        for tile in range(TILES):
            assert_close(rows[tile], truth[tile], tolerance)
    for expert in range(EXPERTS):
        assert_close(ours[2][expert], dw[expert], tolerance)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-1d-weights", "bf16", "fp32"])
def test_each_expert_is_a_linear_layer(recipe):
    x, w, g = operands()
    ours = run(recipe, x, w, g, TILE_EXPERT, NUM_TILES)
    assert_close_by_expert(ours, expected(recipe, x, w, g))
    assert not np.any(ours[2][1])  # the expert without tokens


def test_content_seeded_mixes_in_the_gradient():
    x, w, g = operands()
    ours = run("nvfp4", x, w, g, TILE_EXPERT, NUM_TILES, None, True)
    words = fold(jnp.zeros(2, jnp.uint32), content_hash(jnp.asarray(g)))
    assert_close_by_expert(ours, expected("nvfp4", x, w, g, words))


def test_fused_out_features_are_the_flat_kernel():
    x, w, g = operands()
    fused = (x, w.reshape(EXPERTS, K, 2, N // 2), g.reshape(TILES, ROWS, 2, N // 2))
    y, dx, dw = run("nvfp4", *fused, TILE_EXPERT, NUM_TILES)
    assert (y.shape, dw.shape) == (fused[2].shape, fused[1].shape)
    flat = y.reshape(g.shape), dx, dw.reshape(w.shape)
    assert_close_by_expert(flat, expected("nvfp4", x, w, g))


def test_bfloat16_activations_have_float32_weight_gradients():
    x, w, g = operands(jnp.bfloat16)
    ours = run("nvfp4", x, w, g, TILE_EXPERT, NUM_TILES)
    assert [a.dtype for a in ours] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert_close_by_expert(ours, expected("nvfp4", x, w, g), 2.0**-8)


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_experts_do_not_see_each_other(recipe):
    """Whatever expert 2 receives, even NaN, the others compute the same bits."""
    x, w, g = operands()
    plain = run(recipe, x, w, g, TILE_EXPERT, NUM_TILES)
    for worst in (1e30, np.inf, np.nan):
        for which in (0, 1, 2):
            changed = [x.copy(), w.copy(), g.copy()]
            changed[which][2, 1, 3] = worst  # tile 2 is expert 2's, as is kernel 2
            results = run(recipe, *changed, TILE_EXPERT, NUM_TILES)
            differs = False
            for ours, theirs in zip(plain, results, strict=True):
                others = np.arange(ours.shape[0]) != 2
                np.testing.assert_array_equal(ours[others], theirs[others])
                differs |= not np.array_equal(ours[2], theirs[2])
                if worst == 1e30:
                    assert np.all(np.isfinite(theirs))
            assert differs
            if worst != 1e30:
                finite = [bool(np.all(np.isfinite(a))) for a in results]
                assert finite == [which == 2, which == 0, which == 1]


def test_no_tile_at_all_gives_zeros():
    x, w, g = operands()
    zero = np.zeros_like
    for result in run("nvfp4", zero(x), w, zero(g), TILE_EXPERT, np.int32(0)):
        np.testing.assert_array_equal(result, zero(result))


def test_vmap_is_a_loop():
    """An ensemble whose members route differently."""
    members = [operands(), operands()]
    tile_experts = np.stack([TILE_EXPERT, np.array([0, 1, 1, 2, 2, 3], np.int32)])
    num_tiles = np.array([5, 3], np.int32)
    keys = jax.random.split(KEY, 2)
    stacked = [np.stack(parts) for parts in zip(*members, strict=True)]
    mapped = jax.jit(jax.vmap(functools.partial(run, "nvfp4")))
    batched = mapped(*stacked, tile_experts, num_tiles, keys)
    for i in range(2):
        single = run("nvfp4", *members[i], tile_experts[i], num_tiles[i], keys[i])
        assert_close_by_expert([a[i] for a in batched], [np.asarray(a) for a in single], 1e-6)


def test_quantises_once():
    x, w, g = operands()

    def count(function):
        return count_e2m1_roundings(jax.make_jaxpr(function)(x, w).jaxpr)

    def call(x, w):
        tiles = jnp.asarray(TILE_EXPERT)
        return grouped_linear(x, w, tiles, NUM_TILES, recipe=RECIPES["nvfp4"], key=KEY)

    assert count(call) == 2
    assert count(jax.grad(lambda x, w: jnp.sum(call(x, w) * g), (0, 1))) == 5


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((2, 16, 32), (4, 48, 32), r"got \(2, 16, 32\) and \(4, 48, 32\)"),
        ((2, 20, 32), (4, 32, 32), "rows a multiple of 16"),
        ((32, 32), (4, 32, 32), "needs x"),
        ((2, 16, 32), (32, 32), "needs x"),
        ((2, 16, 32), (4, 32, 24), "32 features in and 24 out"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, w, message):
    with pytest.raises(ValueError, match=message):
        arguments = jnp.ones(x), jnp.ones(w), jnp.zeros(2, int), jnp.int32(2)
        grouped_linear(*arguments, recipe=RECIPES["nvfp4"], key=KEY)


def test_a_missing_key_is_named():
    x, w, _ = operands()
    with pytest.raises(ValueError, match="pass key="):
        grouped_linear(x, w, TILE_EXPERT, NUM_TILES, recipe=RECIPES["nvfp4"])
