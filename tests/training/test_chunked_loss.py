import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo import configs, models
from fp4zoo.errors import UserError
from fp4zoo.training.chunked_loss import choose_chunks, chunked_losses
from fp4zoo.training.cross_entropy import token_losses
from fp4zoo.training.evaluate import loss_sum
from fp4zoo.training.program import Program
from fp4zoo.training.state import abstract_model
from fp4zoo.training.step import StepConfig, make_train_step


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request):
    """(head, parameters, hidden, targets, weights) of a small model in bfloat16."""
    config = models.ModelConfig(
        architecture="llama",
        vocab_size=96,
        num_layers=1,
        embed_dim=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=48,
        max_positions=64,
        tie_embeddings=request.param,
    )
    _, graphdef, shapes = abstract_model(
        lambda: models.create(config, recipe="bf16", rngs=nnx.Rngs(0))
    )
    random = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda leaf: 0.1 * random.normal(size=leaf.shape).astype(leaf.dtype), shapes
    )

    def head(parameters, hidden):
        return nnx.merge(graphdef, parameters).head(hidden)

    keys = jax.random.split(jax.random.key(0), 3)
    hidden = 4 * jax.random.normal(keys[0], (4, 6, 32)).astype(jnp.bfloat16)
    targets = jax.random.randint(keys[1], (4, 6), 0, 96)
    weights = jax.random.uniform(keys[2], (4, 6)).at[0, 2:].set(0)
    return head, parameters, hidden, targets, weights


def gradients(function, parameters, hidden):
    (value, losses), found = jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(
        parameters, hidden
    )
    return value, losses, found


@pytest.mark.parametrize("chunks", [1, 3, 24])
def test_loss_and_gradients_are_those_of_all_logits_at_once(case, chunks):
    head, parameters, hidden, targets, weights = case

    def at_once(parameters, hidden):
        losses = token_losses(head(parameters, hidden), targets)
        return jnp.sum(weights * losses), losses

    def chunked(parameters, hidden):
        losses, total = chunked_losses(head, parameters, hidden, targets, weights, chunks)
        return total, losses

    value, losses, found = gradients(chunked, parameters, hidden)
    expected_value, expected_losses, expected = gradients(at_once, parameters, hidden)
    np.testing.assert_array_equal(losses, expected_losses)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])  # of hidden: no token meets another
    for got, wanted in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_chunks_that_do_not_divide_the_tokens(case):
    with pytest.raises(ValueError, match="5 chunks do not divide the 24 tokens"):
        chunked_losses(*case, 5)


def test_the_step_and_the_evaluation_are_the_same(trainer, make_batch):
    made = trainer()
    batch = make_batch(lengths=[16, 3, 9, 0])
    config = StepConfig(loss_chunks=4)
    step = jax.jit(make_train_step(made.graphdef, made.optimizer, made.schedule, config))
    state, metrics = step(made.state, batch)
    expected, expected_metrics = made.step(made.state, batch)
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    for got, wanted in zip(
        jax.tree.leaves(state.parameters), jax.tree.leaves(expected.parameters), strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    total = loss_sum(made.graphdef, made.parameters, one, loss_chunks=8)
    np.testing.assert_allclose(total / metrics["tokens"], metrics["loss"], rtol=1e-6)


def test_as_many_chunks_as_their_logits_need():
    assert choose_chunks(2048, 8192, 256) == 1  # 64 MiB
    assert choose_chunks(8192, 128_256, 4096) == 8
    assert choose_chunks(8192, 128_256 // 8, 4096) == 1
    assert choose_chunks(3 * 1024, 128_256, 1024) == 3
    assert choose_chunks(7, 2**31, 2) == 7
    assert choose_chunks(4096, 128_256, 4096) == 1  # 2 GiB, as much as the head's gradient


def program(**changes):
    options = ["model=llama-tiny", "precision=bf16", "model.num_layers=1", "model.vocab_size=65536"]
    options += ["model.embed_dim=64", "model.mlp_dim=64", "batch_size=8", "sequence_length=256"]
    config = configs.load([*options, "mesh.fsdp=1"])
    return Program(dataclasses.replace(config, **changes), devices=jax.devices()[:1])


def test_a_step_never_holds_all_logits():
    """2048 tokens of 65536: 512 MiB in float32. XLA's own account of the compiled step."""
    logits = 2048 * 65536 * 4
    memory = {
        chunks: program(loss_chunks=chunks).compile_train_step().memory_analysis()
        for chunks in (1, 16)
    }
    assert memory[1].temp_size_in_bytes > 1.9 * logits  # and their gradient
    head = 64 * 65536 * 4
    assert memory[16].temp_size_in_bytes < 2.1 * logits / 16 + 8 * head
    estimate = program(loss_chunks=16).estimate_memory()
    assert estimate.activations < program(loss_chunks=1).estimate_memory().activations / 4


def test_chunks_of_the_configuration():
    assert program().loss_chunks == 1
    assert program(batch_size=32).loss_chunks == 4
    with pytest.raises(UserError, match="loss_chunks=3 does not divide the 2048 tokens"):
        program(loss_chunks=3)
    with pytest.raises(ValueError, match="loss_chunks=0 is too small"):
        program(loss_chunks=0)
