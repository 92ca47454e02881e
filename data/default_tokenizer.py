"""The tokenizer of a configuration: a given one, a prepared folder's, or one trained once."""

import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from .cache import cache_directory, discard, hash_of, publish
from .config import DataConfig
from .corpus import prepared_tokenizer
from .documents import Source, all_kept, split_threshold
from .progress import note
from .sentencepiece_tokenizer import train_sentencepiece
from .sources import open_source, prepared_folder
from .tokenizer import SENTENCEPIECE_FILE, Tokenizer, check_vocabulary
from .tokenizer_files import load_tokenizer_file

_FORMAT = 2  # raise it when the same key would give another model
_SAMPLE_BYTES = 4_000_000
_SAMPLE_BYTES_PER_DOCUMENT = 200_000
_LARGEST_TRAINED_VOCABULARY = 32_768


def load_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    """The configured tokenizer, checked against the model's vocabulary.

    None takes a prepared folder's; without one it trains SentencePiece (lossless) on 4 MB of the
    training split, chosen by content hash, once: the model is cached. A mixture is sampled from all
    its sources alike.

    Args:
      config: the data configuration.
      vocab_size: the model's.

    Raises:
      UserError: no such file, not a tokenizer, more tokens than the model has, or no text to train
        on.
    """
    prepared = _prepared(config)
    if config.tokenizer is None and prepared is None:
        return _trained(config, vocab_size)
    tokenizer = prepared
    if tokenizer is None or config.tokenizer is not None:
        assert config.tokenizer is not None
        tokenizer = load_tokenizer_file(config.tokenizer)
    if tokenizer is prepared:
        again = f"prepare the text into another folder with --vocab-size {vocab_size}"
        check_vocabulary(tokenizer, vocab_size, again)
    else:
        check_vocabulary(tokenizer, vocab_size)
    if not tokenizer.lossless:
        note(
            f"data: the tokenizer {tokenizer.name} changes text (a prefix, normalisation or "
            "unknown characters), so bits per byte is approximate"
        )
    return tokenizer


def _prepared(config: DataConfig) -> Tokenizer | None:
    """The tokenizer of the prepared folders among the sources, which must be one."""
    folders = [prepared_folder(single.path) for single in config.single()]
    tokenizers = {folder: prepared_tokenizer(folder) for folder in folders if folder is not None}
    if len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) > 1:
        raise UserError(
            f"the prepared folders {', '.join(map(str, tokenizers))} have different tokenizers: "
            "prepare them with one data.tokenizer"
        )
    return next(iter(tokenizers.values()), None)


def _trained(config: DataConfig, vocab_size: int) -> Tokenizer:
    wanted = config.tokenizer_vocab_size
    if wanted is not None and wanted > vocab_size:
        raise UserError(
            f"data.tokenizer_vocab_size={wanted} is more than the model's {vocab_size} tokens: "
            f"set model.vocab_size={wanted} or more, or reduce it"
        )
    wanted = wanted or min(vocab_size, _LARGEST_TRAINED_VOCABULARY)
    sources = [open_source(single) for single in config.single()]
    description = " and ".join(source.description for source in sources)
    key = hash_of(
        format=_FORMAT,
        sources=[source.fingerprint() for source in sources],
        vocab_size=wanted,
        model_type=config.tokenizer_type,
        validation_fraction=config.validation_fraction,
        sample=(_SAMPLE_BYTES, _SAMPLE_BYTES_PER_DOCUMENT),
    )
    entry = cache_directory(config.cache_dir) / "tokenizers" / key
    file = entry / SENTENCEPIECE_FILE
    tokenizer = _cached(file)
    if tokenizer is None:
        began = time.perf_counter()
        share = _SAMPLE_BYTES // len(sources)
        texts = (
            text
            for source in sources
            for text in _sample(source, config.validation_fraction, share)
        )
        model = train_sentencepiece(texts, wanted, config.tokenizer_type)
        with publish(entry) as directory:
            (directory / SENTENCEPIECE_FILE).write_bytes(model)
        tokenizer = load_tokenizer_file(file)
        note(
            f"data: trained SentencePiece on {description} in "
            f"{time.perf_counter() - began:.1f} s: {file}"
        )
    tokenizer.name = f"SentencePiece for {description}"
    return tokenizer


def _cached(file: Path) -> Tokenizer | None:
    """The tokenizer of a cache entry; None when there is none, or it is damaged and so removed."""
    if not file.is_file():
        return None
    try:
        return load_tokenizer_file(file)
    except UserError:
        discard(file.parent)
        return None


def _sample(source: Source, validation_fraction: float, num_bytes: int) -> Iterator[str]:
    """About `num_bytes` of the training split's text, the same whenever it is asked for."""
    threshold = split_threshold(source, validation_fraction)
    chosen = round(2**64 * min(1.0, num_bytes / max(1, source.total_bytes)))
    size = 0
    for document in all_kept(source):
        if document.split_hash >= threshold and document.sample_hash < chosen:
            text = document.text[:_SAMPLE_BYTES_PER_DOCUMENT]
            yield text
            size += len(text)
            if size > 2 * num_bytes:  # compressed files hold more than their size says
                return
