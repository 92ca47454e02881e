"""Text from a checkpoint: `python generate.py checkpoint=DIR prompt='def main():'`.

The prompt and what follows it go to stdout, all else to stderr. Exit status: 0, 1 when the system
failed, 2 for a mistake in the command, 130 when interrupted.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from fp4zoo import interop
from fp4zoo.configs import cli
from fp4zoo.configs.generation import GenerateConfig
from fp4zoo.data import Tokenizer, load_tokenizer_file
from fp4zoo.errors import UserError, discard_output
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.loading import load_model, load_tokenizer_of
from fp4zoo.models import Decoder, PrecisionRules
from fp4zoo.models.generation import Cache, extend, make_cache
from fp4zoo.training.sample import choose_token

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return cli.run(generate, [_quoted(argument) for argument in arguments], "generate")
    except BrokenPipeError:  # `| head`
        discard_output()
        return 0
    except OSError as error:  # such as a full disk behind stdout
        discard_output()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def generate(config: GenerateConfig) -> int:
    """Prints the prompt and its continuation, as it comes."""
    source = load_source(config)
    prompt = source.tokenizer.encode(config.prompt)
    if source.adds_start or not prompt:
        prompt = [source.tokenizer.start_id, *prompt]
    print(config.prompt, end="", flush=True)
    begin, count, shown, tokens = time.perf_counter(), 0, "", []
    for token in continue_tokens(source.model, prompt, config, source.vocab_size):
        if count == 0:
            begin = time.perf_counter()  # of the tokens after the first, which waits for XLA
        count += 1
        if token == source.tokenizer.eos_id:
            break
        tokens.append(token)
        text = source.tokenizer.decode([*prompt, *tokens])[len(source.tokenizer.decode(prompt)) :]
        if not text.endswith(_UNFINISHED):  # a character may take several tokens
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()
    seconds = time.perf_counter() - begin
    if count > 1:
        print(f"{count} tokens, {(count - 1) / seconds:.1f} a second", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Source:
    """What generates: a model, its tokenizer, and how many of its tokens are real."""

    model: Decoder
    tokenizer: Tokenizer
    vocab_size: int
    adds_start: bool


def load_source(config: GenerateConfig) -> Source:
    """Loads the checkpoint in the arithmetic that `config` asks for.

    Raises:
      UserError: there is none, or no tokenizer came with it.
    """
    try:
        path = Path(config.checkpoint).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise UserError(f"checkpoint={config.checkpoint}: {error}") from error
    if (path / "config.json").is_file():
        model = interop.load_hugging_face(
            path,
            recipe=config.recipe or "bf16",
            activation_dtype=config.activation_dtype or "bfloat16",
        )
        tokenizer = load_tokenizer_file(path)
        return _source(model, tokenizer, model.config.vocab_size)
    checkpoint = open_checkpoint(path)
    precision = checkpoint.settings.get("precision") or {}
    model = load_model(
        checkpoint,
        recipe=config.recipe or precision.get("recipe", "bf16"),
        rules=PrecisionRules(**precision.get("rules", {})),
        activation_dtype=config.activation_dtype or precision.get("activation_dtype", "bfloat16"),
    )
    return _source(model, load_tokenizer_of(checkpoint), checkpoint.vocab_size)


def _source(model: Decoder, tokenizer: Tokenizer, vocab_size: int) -> Source:
    # Tokenizers without a beginning (Qwen) were trained without anything in front of a text.
    return Source(
        model, tokenizer, min(vocab_size, tokenizer.vocab_size), tokenizer.bos_id is not None
    )


def continue_tokens(
    model: Decoder, prompt: Sequence[int], config: GenerateConfig, vocab_size: int
) -> Iterator[int]:
    """Yields up to `max_tokens` tokens that follow the prompt.

    vocab_size: tokens from this one on are never drawn.

    Raises:
      UserError: the prompt alone fills the model's context, or is not in its vocabulary.
    """
    length, most = len(prompt), model.config.max_positions
    if length >= most:
        raise UserError(
            f"the prompt has {length} tokens, the model's context is {most}: shorten the prompt"
        )
    if max(prompt) >= model.config.vocab_size:
        raise UserError(
            f"the tokenizer gives token {max(prompt)}, but the model has "
            f"{model.config.vocab_size}: they do not belong together"
        )
    count = min(config.max_tokens, most - length)
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(state, tokens: jax.Array, cache: Cache, key: jax.Array) -> tuple[jax.Array, Cache]:
        logits, cache = extend(nnx.merge(graph, state), tokens, cache)
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits[0], -jnp.inf)
        key = jax.random.fold_in(key, cache.length)
        token = choose_token(key, logits, temperature=config.temperature, top_p=config.top_p)
        return token, cache

    key = jax.random.key(config.seed)
    cache = make_cache(model, batch_size=1, size=length + count)
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    for _ in range(count):
        token, cache = step(state, tokens, cache, key)
        yield int(token)
        tokens = token[None, None]


def _quoted(argument: str) -> str:
    """A prompt as Hydra's grammar needs it, so that one can be any text."""
    key, equals, value = argument.partition("=")
    if key != "prompt" or not equals:
        return argument
    # A backslash counts there only in front of the quote.
    value = value.replace("${", "\\${")  # no interpolation
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    if escaped.endswith("\\"):
        escaped += "\\"
    return f"prompt='{escaped}'"


if __name__ == "__main__":
    sys.exit(main())
