"""What the data pipeline can be told, as frozen dataclasses (the `data` configuration group)."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import UserError, check_choice, did_you_mean

PACKINGS = ("concatenate", "best_fit")
BAD_RECORD_POLICIES = ("error", "skip")
FORMATS = ("text", "prompt_completion", "chat")
TOKENIZER_TYPES = ("bpe", "unigram")
DOCUMENT_STARTS = ("auto", "bos", "eos", "none")
DOCUMENT_ENDS = ("eos", "none")
_MOST_WORKERS = 256
_LARGEST_SHARE = 1_000_000
_LONGEST_NAME = 255  # bytes, on every file system in use
_WORDS = {
    str: "text",
    str | None: "text or null",
    float: "a number",
    bool: "true or false",
    int: "a whole number",
    int | None: "a whole number or null",
}


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture. Every source has a weight, or every one a number of epochs.

    Attributes:
      path: as `data.path`, but always given.
      weight: share of the training rows relative to the other sources' weights.
      epochs: times that the source is read while the whole mixture is read once; fractions work.
      field: the key of the text, if it is not `data.field`.
      format: what a record is, if it is not `data.format`.
    """

    path: str | None = None
    weight: float | None = None
    epochs: float | None = None
    field: str | None = None
    format: str | None = None


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes batches.

    Attributes:
      path: a text, JSONL, Parquet, Arrow or ArrayRecord file (text and JSONL also as .gz or .zst),
        a directory of such files, a glob pattern, a dataset that Hugging Face `datasets` saved, or
        a folder that `python -m fp4zoo.data.prepare` wrote. None: the embedded default corpus, the
        source text of this Python's standard library.
      sources: a mixture instead of `path`: [{path, weight or epochs, field, format}, ...]. Weights
        are shares of rows; epochs are how often a source is read per pass over the mixture. None:
        `path` alone.
      format: what a record is. "text": a document. "prompt_completion": an object with `prompt` and
        `completion`, trained on the completion. "chat": an object with a list of `messages`, each
        with `role` and `content`, trained on what the assistant says.
      field: the key or column that holds the text, or the messages of a chat if not "messages".
        Files of plain text have none.
      chat_template: a Jinja file that writes chats out. None: the tokenizer's own template.
      tokenizer: a SentencePiece `.model`, a Hugging Face `tokenizer.json`, a directory that holds
        one of them, or "bytes". None: a SentencePiece model is trained on the corpus and cached; a
        prepared folder brings its own.
      tokenizer_type: the kind of SentencePiece model that is trained: "bpe" or "unigram".
      tokenizer_vocab_size: tokens of the model that is trained. None: the model's vocabulary, at
        most 32768.
      document_start: what a document's first token is predicted from: the tokenizer's "bos" or
        "eos"; "auto" is bos where there is one, else eos; with "none" the first token is not
        predicted.
      document_end: the token that is predicted behind a document: "eos", or "none".
      validation_fraction: share of the documents held out, in [0, 1). A document's content hash
        alone decides, so no document moves when others are added. 0: no validation split.
      packing: "concatenate": documents one after the other, cut every `sequence_length` tokens.
        "best_fit": a document is cut only where it is longer than a row; rows have some padding.
      shuffle: rows in a new global random order every epoch; False: in the corpus's order.
      num_workers: threads that prepare batches ahead; 0: in the caller's thread. Never changes
        what the batches hold.
      on_bad_record: "error" or "skip" (counted and reported) for text that is not UTF-8 and for
        records that are no document. The embedded corpus always skips.
      cache_dir: where tokenizers, token files and indexes are kept. None: $FP4ZOO_CACHE or
        ~/.cache/fp4zoo.
    """

    path: str | None = None
    sources: tuple[SourceConfig, ...] | None = None
    format: str = "text"
    field: str = "text"
    chat_template: str | None = None
    tokenizer: str | None = None
    tokenizer_type: str = "bpe"
    tokenizer_vocab_size: int | None = None
    document_start: str = "auto"
    document_end: str = "eos"
    validation_fraction: float = 0.02
    packing: str = "concatenate"
    shuffle: bool = True
    num_workers: int = 0
    on_bad_record: str = "error"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Raises UserError, one line that names the key, for a value that cannot work."""
        _check_types(self)
        if self.sources is not None:
            sources = tuple(_source(number, value) for number, value in enumerate(self.sources))
            object.__setattr__(self, "sources", sources)
            _check_shares(sources)
        check_choice("data.format", self.format, FORMATS)
        check_choice("data.packing", self.packing, PACKINGS)
        check_choice("data.on_bad_record", self.on_bad_record, BAD_RECORD_POLICIES)
        check_choice("data.tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        check_choice("data.document_start", self.document_start, DOCUMENT_STARTS)
        check_choice("data.document_end", self.document_end, DOCUMENT_ENDS)
        if not 0.0 <= self.validation_fraction < 1.0:
            raise UserError(
                f"data.validation_fraction={self.validation_fraction} must be in [0, 1)"
            )
        if not 0 <= self.num_workers <= _MOST_WORKERS:
            raise UserError(
                f"data.num_workers={self.num_workers} must be 0 to {_MOST_WORKERS}: threads beyond "
                "the CPUs gain nothing"
            )
        for key in ("path", "tokenizer", "chat_template", "cache_dir"):
            check_path(f"data.{key}", getattr(self, key))
        if self.tokenizer_vocab_size is not None and self.tokenizer_vocab_size < 1:
            raise UserError(
                f"data.tokenizer_vocab_size={self.tokenizer_vocab_size} must be positive, or null "
                "for the model's vocabulary"
            )
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raises UserError for keys of which one would be ignored beside another."""
        if self.sources is not None and self.path is not None:
            raise UserError(
                f"data.path={self.path} and data.sources are both given: list the path in "
                "data.sources, or remove one of them"
            )
        for key in ("tokenizer_vocab_size", "tokenizer_type"):
            if self.tokenizer is not None and getattr(self, key) != getattr(DataConfig, key):
                raise UserError(
                    f"data.{key}={getattr(self, key)} is for a tokenizer that is trained, but "
                    f"data.tokenizer={self.tokenizer} is given: remove one of them"
                )
        formats = {source.format or self.format for source in self.sources or ()} or {self.format}
        if self.chat_template is not None and "chat" not in formats:
            raise UserError(
                f"data.chat_template={self.chat_template} is for chats: set data.format=chat, or "
                "leave it out"
            )
        if self.sources is None:
            check_field("data", self.field, self.format)

    def single(self) -> list["DataConfig"]:
        """A configuration of `path` alone for each source; of `path` without `sources`."""
        if self.sources is None:
            return [self]
        alone = []
        for source in self.sources:
            record_format = source.format or self.format
            values = {"path": source.path, "sources": None, "format": record_format}
            if record_format != "chat":
                values["chat_template"] = None
            values["field"] = source.field or self.field
            if record_format == "prompt_completion":
                values["field"] = DataConfig.field
            alone.append(dataclasses.replace(self, **values))
        return alone


def _check_types(config: DataConfig) -> None:
    """Raises UserError for a value of another type than the key's; whole numbers become floats."""
    for key, kind in get_type_hints(DataConfig).items():
        value = getattr(config, key)
        if key == "sources":
            is_list = isinstance(value, (list, tuple))
            if value is not None and not (is_list and value):
                shown = list(value) if is_list else value
                raise UserError(
                    f"data.sources={shown}: expected a list, [{{path: FILE, weight: 1}}, ...], or "
                    "null for data.path alone"
                )
        elif not isinstance(value, int | float if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"data.{key}={shown}: expected {_WORDS[kind]}")
        elif kind is float:
            object.__setattr__(config, key, float(value))


def _source(number: int, value: SourceConfig | Mapping[str, Any]) -> SourceConfig:
    where = f"data.sources[{number}]"
    if isinstance(value, Mapping):
        names = [field.name for field in dataclasses.fields(SourceConfig)]
        for key in value:
            if key not in names:
                raise UserError(f"unknown key {where}.{key}{did_you_mean(key, names)}")
        value = SourceConfig(**value)
    if not isinstance(value, SourceConfig):
        raise UserError(f"{where}={value}: write {{path: ..., weight: ...}}")
    for key in ("path", "field", "format"):
        if not isinstance(getattr(value, key), str | None):
            raise UserError(f"{where}.{key}={getattr(value, key)}: expected text")
    if value.path is None:
        raise UserError(f"{where} has no path: give it one, such as {{path: FILE, weight: 1}}")
    check_path(f"{where}.path", value.path)
    if value.format is not None:
        check_choice(f"{where}.format", value.format, FORMATS)
    if value.field is not None:
        check_field(where, value.field, value.format)
    return value


def check_field(where: str, field: str, record_format: str | None) -> None:
    """Raises UserError for a key that no record can have, or that these records do not use."""
    if not field:
        raise UserError(f"{where}.field is empty: name the key that holds the text")
    if record_format == "prompt_completion" and field != DataConfig.field:
        raise UserError(
            f"{where}.field={field} is not used by prompt_completion records, whose keys are "
            "prompt and completion: leave it out"
        )


def check_path(key: str, path: str | None) -> None:
    """Raises UserError for a path that no file can have."""
    if path is None:
        return
    if not path.strip() or "\0" in path:
        raise UserError(f"{key}={path!r} is empty: name a file, or null for the default")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}={path}: there is no such user's home directory") from error
    try:
        longest = max((len(os.fsencode(part)) for part in expanded.parts), default=0)
    except UnicodeEncodeError as error:
        raise UserError(f"{key}={path} is no name that a file can have: correct it") from error
    if longest > _LONGEST_NAME:
        raise UserError(f"{key}={path[:40]}... has a name of more than {_LONGEST_NAME} bytes")


def _check_shares(sources: tuple[SourceConfig, ...]) -> None:
    """Every source has a positive weight, or every one a positive number of epochs."""
    by_epochs = [source.epochs is not None for source in sources]
    for number, source in enumerate(sources):
        where = f"data.sources[{number}] ({source.path})"
        if source.weight is None and source.epochs is None:
            raise UserError(f"{where} has neither weight nor epochs: give it one of them")
        if source.weight is not None and source.epochs is not None:
            raise UserError(f"{where} has both weight and epochs: remove one of them")
        if by_epochs[number] != by_epochs[0]:
            raise UserError(
                f"{where} has {'epochs' if by_epochs[number] else 'a weight'} but others have "
                f"{'a weight' if by_epochs[number] else 'epochs'}: use one kind for all"
            )
        for key in ("weight", "epochs"):
            share = getattr(source, key)
            if share is None:
                continue
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not is_number or not 0 < share <= _LARGEST_SHARE:
                raise UserError(
                    f"{where} has {key}={str(share)[:40]}: give a positive number up to "
                    f"{_LARGEST_SHARE:,}, or remove the source"
                )
