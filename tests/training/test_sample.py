import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.training.sample import choose_token, sample_tokens


def generate(made, prompt, **options):
    settings = {"num_tokens": 6, "seed": 0, "vocab_size": 64, "max_positions": 64, **options}
    return sample_tokens(made.graphdef, made.parameters, prompt, **settings)


def test_greedy_text_is_the_argmax_of_the_whole_model(trainer):
    made = trainer()
    tokens = [3, 9]
    for token in generate(made, tokens, temperature=0):
        logits = made.model(jnp.asarray([tokens]))[0, -1]
        assert token == int(jnp.argmax(logits))
        tokens.append(token)


def test_repeats_from_the_seed(trainer):
    made = trainer()
    first = generate(made, [1])
    assert len(first) == 6
    assert generate(made, [1]) == first
    assert generate(made, [1], seed=1) != first


def test_stops_before_the_stop_token(trainer):
    made = trainer()
    text = generate(made, [1])
    stop = text[3]
    assert generate(made, [1], stop_token=stop) == text[: text.index(stop)]


def test_padding_of_the_vocabulary_is_never_drawn(trainer):
    tokens = generate(trainer(), [1], num_tokens=40, vocab_size=3, top_p=1.0)
    assert set(tokens) <= {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = jnp.log(jnp.asarray([0.1, 0.5, 0.05, 0.35]))
    keys = jax.random.split(jax.random.key(0), 2000)

    def draw(top_p, temperature=1.0):
        choose = jax.vmap(
            lambda key: choose_token(key, logits, temperature=temperature, top_p=top_p)
        )
        return np.bincount(choose(keys), minlength=4) / 2000

    np.testing.assert_allclose(draw(1.0), [0.1, 0.5, 0.05, 0.35], atol=0.04)
    np.testing.assert_allclose(draw(0.8), [0, 0.5 / 0.85, 0, 0.35 / 0.85], atol=0.04)
    np.testing.assert_allclose(draw(0.3), [0, 1, 0, 0])
    np.testing.assert_allclose(draw(1.0, temperature=0), [0, 1, 0, 0])


def test_too_long_a_text_is_refused(trainer):
    with pytest.raises(UserError, match="sample_tokens=64 after a prompt of 1 exceeds"):
        generate(trainer(), [1], num_tokens=64)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(trainer(), [])
