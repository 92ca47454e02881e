"""SentencePiece models: any `.model`, and one trained on the corpus so that no byte gets lost."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from ..errors import UserError
from .tokenizer import PROBE, SENTENCEPIECE_FILE, Tokenizer, content_fingerprint
from .tokenizer_settings import TokenizerSettings

# SentencePiece writes a space as this character, and so would read it as a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# A text longer than this is encoded in parts that end at line ends: BPE takes more than linear
# time, and one line may be hundreds of megabytes.
_PART_CHARACTERS = 1 << 20
# 256 bytes, 4 special tokens and an alphabet.
SMALLEST_VOCABULARY = 512
_TRAINING_PIECE = 2048


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model behind this project's interface.

    Those trained here are lossless: byte fallback, no normalisation, no dummy prefix, whitespace
    kept. Published models such as Llama 2's prefix a space, so theirs count one byte more per
    document.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        settings: TokenizerSettings = TokenizerSettings(),  # noqa: B008  frozen
    ):
        """Takes the bytes of a `.model` file, and of those beside it.

        Raises:
          UserError: they are not a SentencePiece model, or it has no end-of-document token.
        """
        try:
            if not content:
                raise ValueError("an empty file")
            processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            self._pieces = list(map(processor.id_to_piece, range(processor.vocab_size())))
        except Exception as error:  # RuntimeError or TypeError by version, or pieces not UTF-8
            raise UserError(
                f"{name} is not a SentencePiece model ({error}): name another data.tokenizer"
            ) from error
        self._processor = processor
        self._content = content
        self._settings = settings
        self.chat_template = settings.chat_template()
        self.name = name
        self.vocab_size = processor.vocab_size()
        if processor.eos_id() < 0:
            raise UserError(f"{name} has no end-of-sentence token: train it with eos_id enabled")
        self.eos_id = processor.eos_id()
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.pad_id = processor.pad_id() if processor.pad_id() >= 0 else self.eos_id
        self.fingerprint = content_fingerprint(content)
        self.special_tokens = {
            piece: token for token, piece in enumerate(self._pieces) if processor.is_control(token)
        }
        bytes_as_pieces = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        has_bytes = all(processor.is_byte(token) for token in bytes_as_pieces)
        self._space_ids = [bytes_as_pieces[byte] for byte in _SPACE.encode()]
        self.lossless = False
        self.lossless = has_bytes and self.keeps(PROBE)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without beginning and end."""
        if self._is_plain(text):
            return self._processor.encode(text)
        ids: list[int] = []
        for part in _parts(text):
            for index, run in enumerate(part.split(_SPACE)):
                if index:
                    ids += self._space_ids
                ids += self._processor.encode(run)
        return ids

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """int32 arrays. The library's own threads work beside Python's lock."""
        plain = [self._is_plain(text) for text in texts]
        together = self._processor.encode(
            [text for text, is_plain in zip(texts, plain, strict=True) if is_plain],
            num_threads=num_threads,
        )
        encoded = iter(together)
        return [
            np.array(next(encoded) if is_plain else self.encode(text), np.int32)
            for text, is_plain in zip(texts, plain, strict=True)
        ]

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]; 0 for control and unknown tokens, 1 for byte tokens."""
        processor = self._processor
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, piece in enumerate(self._pieces):
            if processor.is_byte(token):
                lengths[token] = 1
            elif not processor.is_control(token) and not processor.is_unknown(token):
                lengths[token] = len(piece.replace(_SPACE, " ").encode())
        return lengths

    def fallback_tokens(self) -> np.ndarray:
        """bool [vocab_size]: unknown and byte tokens."""
        processor = self._processor
        kinds = (processor.is_byte, processor.is_unknown)
        return np.array([any(kind(i) for kind in kinds) for i in range(self.vocab_size)])

    def _is_plain(self, text: str) -> bool:
        """Whether the library may take `text` whole. A model that prefixes or normalises always
        does: in parts, every part would get the prefix."""
        return not self.lossless or (len(text) <= _PART_CHARACTERS and _SPACE not in text)

    def save(self, directory: str | Path) -> Path:
        """Writes `tokenizer.model` and the settings that came with it."""
        path = Path(directory, SENTENCEPIECE_FILE)
        path.write_bytes(self._content)
        self._settings.save(directory)
        return path


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str = "bpe") -> bytes:
    """Trains a lossless model and returns the bytes of its `.model` file.

    BPE by default: on 4 MB of Python source and 4096 tokens it trains in 1.5 s where "unigram"
    takes 54.6 s, and both put 3.4 bytes into a token. The text is given in runs of whole lines, so
    that pieces with newlines (")\\n") and runs of spaces are learned. Equal arguments give an equal
    model. It has fewer tokens than asked for when the text does not hold that many pieces.

    Raises:
      UserError: no text, or `vocab_size` below 512.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small to train SentencePiece on (at least "
            f"{SMALLEST_VOCABULARY}): raise data.tokenizer_vocab_size or model.vocab_size, or set "
            "data.tokenizer=bytes"
        )
    pieces = [piece for text in texts for piece in _training_pieces(text)]
    if not any(piece.strip("\0 \t\r\n") for piece in pieces):
        raise UserError("the corpus has no text to train a tokenizer on: set data.tokenizer=bytes")
    pieces = _without_rare_characters(pieces, (vocab_size - 260) // 4)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(pieces),
        model_writer=model,
        model_type=model_type,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.9999,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        # The trainer keeps the tab for itself as a border; it must be a piece all the same.
        user_defined_symbols=["\t"],
        max_sentence_length=1 << 24,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        num_threads=2,  # written into the file, so not the machine's number
        minloglevel=2,
    )
    return model.getvalue()


def _training_pieces(text: str) -> list[str]:
    """Runs of whole lines of about 2 KB; the trainer's sentences."""
    pieces, run, size = [], [], 0
    for line in text.splitlines(keepends=True):
        run.append(line)
        size += len(line)
        if size >= _TRAINING_PIECE:
            pieces.append("".join(run))
            run, size = [], 0
    return [*pieces, "".join(run)] if run else pieces


def _without_rare_characters(pieces: list[str], most_characters: int) -> list[str]:
    """`pieces` with all but the `most_characters` commonest characters made borders (tabs).

    The others are spelled in bytes. Without this a script with thousands of characters would leave
    no room for pieces of more than one, or fail.
    """
    characters = np.frombuffer("".join(pieces).encode("utf-32-le"), np.uint32)
    counts = np.bincount(characters)
    kept = np.argsort(counts, kind="stable")[::-1][:most_characters]
    counts[kept] = 0
    rare = dict.fromkeys(np.flatnonzero(counts).tolist(), "\t")
    return [piece.translate(rare) for piece in pieces] if rare else pieces


def _parts(text: str) -> Iterable[str]:
    """`text` in parts of at most `_PART_CHARACTERS`, cut behind line ends where there are any."""
    start = 0
    while len(text) - start > _PART_CHARACTERS:
        end = text.rfind("\n", start, start + _PART_CHARACTERS) + 1
        if end <= start:
            end = start + _PART_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]
