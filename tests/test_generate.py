import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from fp4zoo import generate, models
from fp4zoo.configs.generation import GenerateConfig
from fp4zoo.data import ByteTokenizer
from fp4zoo.errors import UserError
from fp4zoo.models import ModelConfig
from fp4zoo.training.state import split_model

CONFIG = ModelConfig(
    architecture="llama", vocab_size=272, num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1,
    head_dim=16, mlp_dim=48, max_positions=48,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    model = models.create(CONFIG, recipe="fp32", rngs=nnx.Rngs(3))
    model.output_head.kernel[...] *= 30  # so that the likeliest token is clear
    return model


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run's folder, as training leaves it."""
    folder = tmp_path_factory.mktemp("run")
    step = folder / "checkpoints" / "5"
    (step / "config").mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(step / "parameters", split_model(model)[1])
    precision = {"recipe": "fp32", "activation_dtype": "float32", "rules": {}}
    settings = {"model": dataclasses.asdict(CONFIG), "precision": precision}
    (step / "config" / "metadata").write_text(json.dumps(settings))
    (folder / "tokenizer").mkdir()
    ByteTokenizer().save(folder / "tokenizer")
    return folder


def greedy(model, prompt, count, vocab_size):
    """The likeliest continuation by whole forward passes over a fixed window."""
    tokens = list(prompt)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    for _ in range(count):
        window = jnp.asarray([tokens + [0] * (32 - len(tokens))], jnp.int32)
        logits = np.array(forward(model, window))[0, len(tokens) - 1]
        tokens.append(int(logits[:vocab_size].argmax()))
    return tokens[len(prompt) :]


def test_greedy_text_is_the_likeliest_continuation(run, model, capsys):
    tokenizer = ByteTokenizer()
    prompt = [tokenizer.bos_id, *tokenizer.encode("if x")]
    expected = greedy(model, prompt, 12, tokenizer.vocab_size)
    if tokenizer.eos_id in expected:
        expected = expected[: expected.index(tokenizer.eos_id)]
    arguments = [f"checkpoint={run}", "prompt=if x", "temperature=0", "max_tokens=12"]
    assert generate.main(arguments) == 0
    captured = capsys.readouterr()
    text = tokenizer.decode([*tokenizer.encode("if x"), *expected])
    assert captured.out.rstrip("\n\N{REPLACEMENT CHARACTER}") == text.rstrip(
        "\n\N{REPLACEMENT CHARACTER}"
    )
    assert "a second" in captured.err


@pytest.mark.slow  # four programs to compile
def test_sampling_follows_the_seed_and_stays_in_the_vocabulary(model):
    def sample(seed, vocab_size=272):
        config = GenerateConfig(checkpoint="", max_tokens=40, temperature=2.0, seed=seed)
        return list(generate.continue_tokens(model, [1, 2], config, vocab_size))

    first, small = sample(0), sample(1, vocab_size=5)
    assert first == sample(0) != sample(1) and len(first) == 40
    assert max(small) < 5 <= max(first)


def test_text_ends_where_the_context_does(model):
    config = GenerateConfig(checkpoint="", max_tokens=1000, temperature=0)
    assert len(list(generate.continue_tokens(model, [1] * 40, config, 272))) == 8
    with pytest.raises(UserError, match="the prompt has 48 tokens, the model's context is 48"):
        list(generate.continue_tokens(model, [1] * 48, config, 272))
    with pytest.raises(UserError, match="the tokenizer gives token 300, but the model has 272"):
        list(generate.continue_tokens(model, [300], config, 272))


@pytest.mark.parametrize(
    "prompt",
    [
        "def f(x, y=[1]):\n    return {'a': x}",
        "it's",
        "a \\ b\\",
        "${x} #",
        "\\'",
        "",
        "null",
        "=,=",
    ],
)
def test_any_text_can_be_a_prompt(prompt, monkeypatch):
    seen = []
    monkeypatch.setattr(generate, "generate", lambda config: seen.append(config.prompt) or 0)
    assert generate.main(["checkpoint=x", f"prompt={prompt}"]) == 0
    assert seen == [prompt]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing value: set checkpoint"),
        (["checkpoint=/nowhere"], "checkpoint=/nowhere does not exist"),
        (["checkpoint=x", "temprature=0"], "unknown key 'temprature': did you mean 'temperature'?"),
        (["checkpoint=x", "top_p=0"], "top_p=0 must be above 0"),
        (["checkpoint=x", "max_tokens=0"], "max_tokens=0 is too small"),
        (["checkpoint=x", "recipe=fp3"], "recipe"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert generate.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_needs_no_checkpoint(capfd):
    assert generate.main(["--help"]) == 0
    assert "python generate.py checkpoint=" in capfd.readouterr().out
