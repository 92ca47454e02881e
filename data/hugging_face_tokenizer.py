"""Hugging Face `tokenizer.json` files (Llama 3, Mistral, Qwen, SmolLM2) through `tokenizers`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ..errors import UserError
from .documents import lone_surrogate
from .tokenizer import HUGGING_FACE_FILE, PROBE, Tokenizer, content_fingerprint
from .tokenizer_settings import TokenizerSettings

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# For a tokenizer.json that lies alone: the names that published tokenizers give these tokens.
_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>")
_KNOWN_EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
_KNOWN_PAD = ("<pad>", "<|finetune_right_pad_id|>", "<|endoftext|>")
_MOST_TOKENS = 1 << 24  # beyond any vocabulary; tables of an entry per id are made


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. The beginning and end of a document come from the files beside it
    (`tokenizer_config.json`, `special_tokens_map.json`), else from the names in common use."""

    def __init__(
        self,
        content: bytes,
        name: str,
        settings: TokenizerSettings = TokenizerSettings(),  # noqa: B008  frozen
    ):
        """Takes the bytes of the file, its name for messages, and the files beside it.

        Raises:
          UserError: not a tokenizer.json, of a kind whose bytes cannot be counted, or one without
            an end-of-document token.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            specification: dict[str, Any] = json.loads(content)
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"{name} is not a tokenizer.json ({error}): name another data.tokenizer"
            ) from error
        self._tokenizer.encode_special_tokens = True  # "</s>" in a text stays text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._content = content
        self._settings = settings
        self.name = name
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MOST_TOKENS:
            raise UserError(
                f"{name} has ids up to {self.vocab_size - 1:,} (0 to {_MOST_TOKENS - 1:,} can be "
                "used): it is damaged, name another data.tokenizer"
            )
        self.bos_id = self._special("bos_token", _KNOWN_BOS)
        eos_id = self._special("eos_token", _KNOWN_EOS)
        if eos_id is None:
            raise UserError(
                f"{name} names no end-of-document token: put a tokenizer_config.json with "
                "eos_token beside it"
            )
        self.eos_id = eos_id
        pad_id = self._special("pad_token", _KNOWN_PAD)
        self.pad_id = eos_id if pad_id is None else pad_id
        self.special_tokens = {
            token["content"]: token["id"]
            for token in specification.get("added_tokens", [])
            if token["special"]
        }
        self.chat_template = settings.chat_template()
        self._lengths = self._count_bytes(vocabulary, specification)
        self._fallback = self._find_fallback(vocabulary, specification)
        # The files beside it choose these, so the content alone does not tell what is encoded.
        chosen = f" {self.bos_id} {self.eos_id} {self.pad_id}"
        self.fingerprint = content_fingerprint(content + chosen.encode())
        self.lossless = self.keeps(PROBE)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without beginning and end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """int32 arrays. The library's own pool decides how many threads; 1 forbids it."""
        previous = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        finally:
            if previous is None:
                del os.environ["TOKENIZERS_PARALLELISM"]
            else:
                os.environ["TOKENIZERS_PARALLELISM"] = previous
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]; 0 for special tokens and for ids that the file leaves out."""
        return self._lengths.copy()

    def save(self, directory: str | Path) -> Path:
        """Writes `tokenizer.json` and the settings that name its special tokens."""
        path = Path(directory, HUGGING_FACE_FILE)
        path.write_bytes(self._content)
        self._settings.save(directory)
        return path

    def _special(self, key: str, known: Sequence[str]) -> int | None:
        """The id of a special token that the settings name, else of the first known name.

        Raises:
          UserError: the settings name one that the file does not have.
        """
        if self._settings.names(key):
            token = self._settings.token(key)
            if token is None:
                return None
            token_id = None if lone_surrogate(token) else self._tokenizer.token_to_id(token)
            if token_id is None and key != "pad_token":  # which is only added for fine-tuning
                raise UserError(
                    f"{self.name} has no token {token!r}, which the settings beside it name as "
                    f"{key}: correct {key} in them, or set it to null"
                )
            return token_id
        ids = (self._tokenizer.token_to_id(token) for token in known)
        return next((token_id for token_id in ids if token_id is not None), None)

    def fallback_tokens(self) -> np.ndarray:
        """bool [vocab_size]: the unknown token, and byte tokens of models that spell in them. A
        byte-level vocabulary lacks nothing."""
        return self._fallback.copy()

    def _find_fallback(
        self, vocabulary: dict[str, int], specification: dict[str, Any]
    ) -> np.ndarray:
        found = np.zeros(self.vocab_size, bool)
        unknown = specification.get("model", {}).get("unk_token")
        for piece, token in vocabulary.items():
            found[token] = piece == unknown or _is_byte(piece)
        return found

    def _count_bytes(self, vocabulary: dict[str, int], specification: dict[str, Any]) -> np.ndarray:
        decoder = json.dumps(specification.get("decoder"), ensure_ascii=False)
        byte_level = '"ByteLevel"' in decoder
        if not byte_level and _SPACE not in decoder:
            raise UserError(
                f"{self.name} decodes neither by bytes nor by {_SPACE} for a space, so its "
                "bytes cannot be counted: use another data.tokenizer"
            )
        added = {token["id"]: token for token in specification.get("added_tokens", [])}
        lengths = np.zeros(self.vocab_size, np.int32)
        for piece, token in vocabulary.items():
            if token in added:
                lengths[token] = 0 if added[token]["special"] else len(piece.encode())
            elif byte_level:
                lengths[token] = len(piece)  # one character stands for one byte
            elif _is_byte(piece):
                lengths[token] = 1
            else:
                lengths[token] = len(piece.replace(_SPACE, " ").encode())
        return lengths


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
