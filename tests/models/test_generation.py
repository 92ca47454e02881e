"""Decoding with a cache against the whole forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo import models
from fp4zoo.models import ModelConfig, MoEConfig, RopeScaling
from fp4zoo.models.decoder import Block
from fp4zoo.models.generation import extend, make_cache
from fp4zoo.models.llama import Llama

BASE = dict(
    architecture="llama", vocab_size=40, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
    head_dim=16, mlp_dim=48, max_positions=64,
)  # fmt: skip
CASES = {
    "sliding window": dict(
        sliding_window=4, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8), tie_embeddings=True
    ),
    "qwen3 experts": dict(architecture="qwen3_moe", qk_norm=True, moe=MoEConfig(4, 2)),
}


@pytest.mark.parametrize(
    "case", ["sliding window", pytest.param("qwen3 experts", marks=pytest.mark.slow)]
)
def test_logits_are_those_of_the_whole_forward_pass(case):
    check_against_forward_pass(ModelConfig(**BASE | CASES[case]))


def test_an_architecture_with_a_block_of_its_own_needs_nothing_more(monkeypatch):
    class NormAfter(Block):
        def __call__(self, x, *, rounding_keys, **rest):
            del rounding_keys
            x = x + self.attention_norm(self.attention(x, **rest))
            return x + self.mlp_norm(self.mlp(x, segment_ids=None, rounding_keys=None)[0]), {}

    class NormsAfter(Llama):
        block = NormAfter

    monkeypatch.setitem(models.ARCHITECTURES, "norms_after", NormsAfter)
    check_against_forward_pass(ModelConfig(**BASE | dict(architecture="norms_after")))


def check_against_forward_pass(config):
    model = models.create(config, recipe="fp32", rngs=nnx.Rngs(0))
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert leaf.dtype == jnp.float32
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 12)), jnp.int32)
    expected = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    step = nnx.jit(extend)
    cache = make_cache(model, batch_size=2, size=16)  # with room that must not be seen
    parts = [(0, 7), *((i, i + 1) for i in range(7, 12))]
    for start, stop in parts:
        logits, cache = step(model, tokens[:, start:stop], cache)
        np.testing.assert_allclose(logits, expected[:, stop - 1], atol=2e-5)
        assert int(cache.length) == stop
    spread = np.asarray(expected).std()
    assert spread > 100 * 2e-5


def test_cache_has_the_activation_dtype_and_every_segment():
    rules = models.PrecisionRules(first_blocks=1, last_blocks=1)
    config = ModelConfig(**BASE | dict(num_layers=3))
    create = lambda: models.create(  # noqa: E731
        config, recipe="nvfp4", rules=rules, activation_dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    cache = make_cache(nnx.eval_shape(create), batch_size=1, size=8)
    shapes = {name: (leaf.shape, leaf.dtype.name) for name, leaf in cache.keys.items()}
    expected = ((1, 1, 8, 2, 16), "bfloat16")
    assert shapes == dict.fromkeys(("prefix", "middle", "suffix"), expected)
