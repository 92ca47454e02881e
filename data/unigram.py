"""The loss of the simplest model, which every trained one must beat."""

import numpy as np

from .config import DataConfig
from .corpus import load_corpus
from .packing import Batch
from .pipeline import make_validation_batches
from .tokenizer import Tokenizer

_CHUNK = 1 << 22


def unigram_loss(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence_length: int,
    max_batches: int | None = None,
) -> float:
    """Nats per token of token frequencies, with one added to each count, on the validation batches.

    The frequencies are those of all targets of the training split that are trained on (of a
    mixture, of all sources alike, whatever their weights); the score is over the very targets of
    `make_validation_batches`'s batches.

    Returns:
      The mean; NaN without a validation split.
    """
    batches = make_validation_batches(
        config,
        tokenizer,
        batch_size=batch_size,
        sequence_length=sequence_length,
        max_batches=max_batches,
    )
    stream = load_corpus(config, tokenizer).train
    counts = np.ones(tokenizer.vocab_size, np.int64)
    for begin in range(0, len(stream.tokens), _CHUNK):
        tokens = stream.tokens[begin : begin + _CHUNK]
        if stream.mask is not None:
            tokens = tokens[stream.mask[begin : begin + _CHUNK] > 0]
        counts += np.bincount(tokens, minlength=tokenizer.vocab_size)
    return mean_loss(np.log(counts.sum()) - np.log(counts), batches)


def mean_loss(nats: np.ndarray, batches: list[Batch]) -> float:
    """The mean of nats[target] over the targets that count; NaN when there are none."""
    total, number = 0.0, 0.0
    for batch in batches:
        total += float((nats[batch["targets"]] * batch["loss_mask"]).sum())
        number += float(batch["loss_mask"].sum())
    return total / number if number else float("nan")
