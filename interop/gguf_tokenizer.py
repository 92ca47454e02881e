"""A GGUF file's own tokenizer as the files that it was made from: SentencePiece or tokenizer.json.

llama.cpp stores a vocabulary, what kind of token each is, and either scores ("llama":
SentencePiece's byte-pair encoding) or merges and the name of the expression that splits a text into
words ("gpt2": byte-level). The rest of the original files is implied by that name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.tokenizer import HUGGING_FACE_FILE, SENTENCEPIECE_FILE, Tokenizer
from ..data.tokenizer_settings import CONFIG_FILE, TokenizerSettings
from ..errors import UserError, did_you_mean

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's token types
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours: llama.cpp's
_REMEDY = "give --tokenizer DIR, a folder with the model's tokenizer files"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Words:
    """How a text is cut into words before merging, as in the published tokenizer.json.

    splits: expressions, applied one after the other. gpt2: GPT-2's expression follows them.
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False  # every digit on its own
    normalizer: str | None = None
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_LLAMA = _Words((_LLAMA3,), ignore_merges=True, add_bos=True)
_WORD_RULES = {
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _Words((_QWEN2,), normalizer="NFC"),
    "smollm": _Words(gpt2=True, digits=True),
    "gpt-2": _Words(gpt2=True),
    "tekken": _Words((_TEKKEN,), ignore_merges=True, add_bos=True),
    # What llama.cpp itself does with a file that names no expression.
    "default": _Words((
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )),
}  # fmt: skip


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> TokenizerSource | None:
    """The tokenizer of a file, None if it has none.

    Raises:
      UserError: one of a kind that is not known, or damaged; the message offers --tokenizer.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    makers = {"llama": _sentencepiece, "gpt2": _byte_level}
    if not isinstance(model, str) or model not in makers:
        raise UserError(
            f"{path}: its tokenizer is of the kind {model!r}, which is not known"
            f"{did_you_mean(str(model), makers)}: {_REMEDY}"
        )
    return makers[model](_read(metadata, path))


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer's files by name, and what they make."""

    files: dict[str, bytes]
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _Vocabulary:
    """The fields that both kinds have, checked."""

    path: Path
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    special: dict[str, int]  # "bos", "eos", "unk", "pad": ids of those that there are

    def fail(self, what: str) -> UserError:
        return UserError(f"{self.path}: its tokenizer {what}: {_REMEDY}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.fail(f"has {key}={value!r}, which is not true or false")
        return value

    def settings(self, *, add_bos: bool, kind: str) -> TokenizerSettings:
        """tokenizer_config.json: special tokens (null: no text begins with one), chat template."""
        values: dict[str, Any] = {
            f"{name}_token": self.tokens[token] for name, token in self.special.items()
        }
        if not add_bos:
            values["bos_token"] = None
        values |= {"add_bos_token": add_bos, "add_eos_token": self.flag("add_eos_token", False)}
        template = self.metadata.get("tokenizer.chat_template")
        if template is not None:
            if not isinstance(template, str):
                raise self.fail("has a chat template that is no text")
            values["chat_template"] = template
        values |= {"clean_up_tokenization_spaces": False, "tokenizer_class": kind}
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        return TokenizerSettings({CONFIG_FILE: text.encode()})


def _read(metadata: Mapping[str, Any], path: Path) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    vocabulary = _Vocabulary(path, metadata, [], [], {})
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise vocabulary.fail("has no list of tokens")
    if types is None:
        types = [_NORMAL] * len(tokens)
    if not isinstance(types, list) or not all(kind in range(1, 7) for kind in types):
        raise vocabulary.fail("has a token of an unknown type")
    if not tokens or len(types) != len(tokens):
        raise vocabulary.fail(f"has {len(tokens)} tokens but {len(types)} types")
    special = {}
    for name, key in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < len(tokens):
            raise vocabulary.fail(f"has {key}_token_id={token!r} among {len(tokens)} tokens")
        special[name] = token
    types = list(types)
    for name in special.keys() & {"bos", "eos"}:  # some files call them normal
        types[special[name]] = _CONTROL
    return _Vocabulary(path, metadata, tokens, types, special)


def _sentencepiece(vocabulary: _Vocabulary) -> TokenizerSource:
    """A SentencePiece model of the kind BPE, which is what llama.cpp computes with the scores."""
    from ..data.sentencepiece_tokenizer import SentencePieceTokenizer

    try:
        from sentencepiece import sentencepiece_model_pb2 as messages
    except ImportError as error:
        raise UserError("this needs the protobuf package: pip install 'fp4zoo[gguf]'") from error
    tokens, special = vocabulary.tokens, dict(vocabulary.special)
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise vocabulary.fail("does not have a score for each token")
    if not all(isinstance(score, float) and math.isfinite(score) for score in scores):
        raise vocabulary.fail("has a score that is no number")
    if "unk" not in special and _UNKNOWN in vocabulary.types:
        special["unk"] = vocabulary.types.index(_UNKNOWN)
    if "unk" not in special:
        raise vocabulary.fail("has no unknown token")
    model: Any = messages.ModelProto()  # type: ignore[attr-defined]
    kinds = list(vocabulary.types)
    kinds[special["unk"]] = _UNKNOWN
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    add_bos = vocabulary.flag("add_bos_token", True)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = _BYTE in kinds
    if not add_bos:
        special["bos"] = special["unk"]  # not a control token, so the library has no beginning
    for name, token in special.items():  # the library finds the ids by these spellings
        setattr(trainer, f"{name}_id", token)
        setattr(trainer, f"{name}_piece", tokens[token])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = vocabulary.flag("add_space_prefix", True)
    normalizer.remove_extra_whitespaces = vocabulary.flag("remove_extra_whitespaces", False)
    content = model.SerializeToString()
    settings = vocabulary.settings(add_bos=add_bos, kind="LlamaTokenizer")
    return _checked(SentencePieceTokenizer, SENTENCEPIECE_FILE, content, settings, vocabulary)


def _byte_level(vocabulary: _Vocabulary) -> TokenizerSource:
    """A tokenizer.json with a byte-level BPE model."""
    from tokenizers.pre_tokenizers import ByteLevel

    from ..data.hugging_face_tokenizer import HuggingFaceTokenizer

    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _WORD_RULES:
        raise vocabulary.fail(
            f"splits words by {name!r}, which is not known{did_you_mean(str(name), _WORD_RULES)}"
        )
    words = _WORD_RULES[name]
    alphabet = set(ByteLevel.alphabet())
    vocab, added = {}, []
    for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == _NORMAL:
            if not text or not alphabet.issuperset(text):
                raise vocabulary.fail(f"has token {token}, {text!r}, which is not spelled in bytes")
            if text in vocab:
                raise vocabulary.fail(f"has the token {text!r} twice")
            vocab[text] = token
        elif kind != _UNUSED:
            added.append({
                "id": token, "content": text, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": kind != _USER_DEFINED,
            })  # fmt: skip
    # The library numbers added tokens itself, behind the vocabulary; others must be part of it.
    if [token["id"] for token in added] != list(range(len(vocab), len(vocab) + len(added))):
        vocab |= {token["content"]: token["id"] for token in added}
    add_bos = vocabulary.flag("add_bos_token", words.add_bos) and "bos" in vocabulary.special
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": vocabulary.flag("add_space_prefix", False),
        "trim_offsets": True, "use_regex": words.gpt2,
    }  # fmt: skip
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in words.splits
    ]
    if words.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": _beginning(vocabulary) if add_bos else byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": words.ignore_merges, "vocab": vocab, "merges": _merges(vocabulary),
        },
    }  # fmt: skip
    text = json.dumps(content, ensure_ascii=False).encode()
    settings = vocabulary.settings(add_bos=add_bos, kind="PreTrainedTokenizerFast")
    return _checked(HuggingFaceTokenizer, HUGGING_FACE_FILE, text, settings, vocabulary)


def _merges(vocabulary: _Vocabulary) -> list[list[str]]:
    merges = vocabulary.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise vocabulary.fail("has no list of merges")
    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2:
            raise vocabulary.fail(f"has the merge {' '.join(pair)!r}, which is not of two tokens")
    return pairs


def _beginning(vocabulary: _Vocabulary) -> dict[str, Any]:
    """A post-processor of the library that puts the beginning in front of a text."""
    token = vocabulary.special["bos"]
    text = vocabulary.tokens[token]
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }


def _checked(
    kind: type[Any], name: str, content: bytes, settings: TokenizerSettings, vocabulary: _Vocabulary
) -> TokenizerSource:
    try:
        tokenizer = kind(content, f"{vocabulary.path}'s {name}", settings)
    except UserError as error:
        raise vocabulary.fail(f"cannot be used ({' '.join(str(error).split())})") from error
    return TokenizerSource({name: content, **settings.files}, tokenizer)
