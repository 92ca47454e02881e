"""What the data pipeline can be told, as one frozen dataclass (the `data` configuration group)."""

from dataclasses import dataclass

from ..errors import UserError

PACKINGS = ("concatenate",)
BAD_RECORD_POLICIES = ("error", "skip")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes batches.

    Attributes:
      path: a text file, a JSONL file (both also as .gz), a directory or a glob pattern. None: the
        embedded default corpus, the source text of this Python's standard library.
      field: the key that holds the text of a JSONL record.
      tokenizer: a SentencePiece `.model`, a Hugging Face `tokenizer.json`, a directory that holds
        one of them, or "bytes". None: a SentencePiece model is trained on the corpus and cached.
      validation_fraction: share of the documents held out, in [0, 1). A document's content hash
        alone decides, so no document moves when others are added. 0: no validation split.
      packing: "concatenate": documents one after the other, cut every `sequence_length` tokens.
      shuffle: rows in a new global random order every epoch; False: in the corpus's order.
      num_workers: threads that prepare batches ahead; 0: in the caller's thread. Never changes
        what the batches hold.
      on_bad_record: "error" or "skip" (counted and reported) for text that is not UTF-8 and for
        JSONL lines without a usable text. The embedded corpus always skips.
      cache_dir: where tokenizers and token files are kept. None: $FP4ZOO_CACHE or
        ~/.cache/fp4zoo.
    """

    path: str | None = None
    field: str = "text"
    tokenizer: str | None = None
    validation_fraction: float = 0.02
    packing: str = "concatenate"
    shuffle: bool = True
    num_workers: int = 0
    on_bad_record: str = "error"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Raises UserError, one line that names the key, for a value that cannot work."""
        if not 0.0 <= self.validation_fraction < 1.0:
            raise UserError(
                f"data.validation_fraction={self.validation_fraction} must be in [0, 1)"
            )
        if self.packing not in PACKINGS:
            raise UserError(f"data.packing={self.packing!r} must be one of {', '.join(PACKINGS)}")
        if self.num_workers < 0:
            raise UserError(f"data.num_workers={self.num_workers} must be 0 or more")
        if self.on_bad_record not in BAD_RECORD_POLICIES:
            raise UserError(
                f"data.on_bad_record={self.on_bad_record!r} must be one of "
                f"{', '.join(BAD_RECORD_POLICIES)}"
            )
