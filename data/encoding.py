"""From documents to a stream's tokens: where they begin and end, and which are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from .chat import ChatTemplate, TemplateFailure, load_chat_template
from .config import DataConfig
from .documents import BadRecord, Document, lone_surrogate
from .tokenizer import Tokenizer

Segment = tuple[str | int, bool]  # a text or a special token, and whether it is trained on


@dataclass(frozen=True)
class Encoded:
    """A document's targets.

    Attributes:
      ids: int [N]: its tokens, and the end-of-document token if there is to be one.
      mask: uint8 [N], 1 where trained on; None: everywhere.
      first: its first token when that is only an input, not in `ids`; else None.
    """

    ids: np.ndarray
    mask: np.ndarray | None
    first: int | None


def start_id(config: DataConfig, tokenizer: Tokenizer) -> int:
    """What a document's first token is predicted from, by `data.document_start`.

    Raises:
      UserError: "bos" with a tokenizer that has none.
    """
    if config.document_start == "eos":
        return tokenizer.eos_id
    if config.document_start == "bos" and tokenizer.bos_id is None:
        raise UserError(
            f"data.document_start=bos, but the tokenizer {tokenizer.name} has no beginning-of-"
            "document token: set data.document_start=eos or auto"
        )
    return tokenizer.start_id


class DocumentEncoder:
    """Encodes the documents of one source."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        """Takes the configuration of the source.

        Raises:
          UserError: chats without a template, or a template that is none.
        """
        self._tokenizer = tokenizer
        self._has_end = config.document_end == "eos"
        self._start = None if config.document_start == "none" else start_id(config, tokenizer)
        self._format = config.format
        self._template: ChatTemplate | None = None
        if config.format == "chat":
            self._template = load_chat_template(config.chat_template, tokenizer)

    @property
    def masks(self) -> bool:
        """Whether some tokens are not trained on."""
        return self._format != "text"

    @property
    def keeps_first(self) -> bool:
        """Whether a document's first token is only an input."""
        return self._start is None

    def settings(self) -> dict[str, object]:
        """JSON-able: what decides the tokens beside the tokenizer and the documents."""
        return {
            "format": self._format,
            "end": self._tokenizer.eos_id if self._has_end else None,
            "keeps_first": self.keeps_first,
            "template": self._template.source if self._template else None,
        }

    def encode(
        self, documents: Sequence[Document], *, num_threads: int = 1
    ) -> list[Encoded | BadRecord]:
        """Each document's targets, or why it has none."""
        if not self.masks:
            texts = [document.text for document in documents]
            encoded = self._tokenizer.encode_batch(texts, num_threads=num_threads)
            pairs = zip(encoded, documents, strict=True)
            return [self._finish(ids, None, document) for ids, document in pairs]
        segments: list[list[Segment] | BadRecord] = [self._segments(one) for one in documents]
        texts = [
            part
            for found in segments
            if not isinstance(found, BadRecord)
            for part, _ in found
            if isinstance(part, str)
        ]
        encoded = iter(self._tokenizer.encode_batch(texts, num_threads=num_threads))
        results: list[Encoded | BadRecord] = []
        for found, document in zip(segments, documents, strict=True):
            if isinstance(found, BadRecord):
                results.append(found)
                continue
            ids, mask = [], []
            for part, trained in found:
                tokens = next(encoded) if isinstance(part, str) else np.array([part], np.int64)
                ids.append(tokens)
                mask.append(np.full(len(tokens), trained, np.uint8))
            results.append(self._finish(np.concatenate(ids), np.concatenate(mask), document))
        return results

    def _segments(self, document: Document) -> list[Segment] | BadRecord:
        record = document.record
        assert record is not None
        if self._template is None:
            return [(record["prompt"], False), (record["completion"], True)]
        try:
            segments = self._template.segments(record["messages"])
        except TemplateFailure as failure:
            detail = f"the chat template (data.chat_template sets another) says: {failure}"
            return BadRecord("template", document.name, detail)
        if any(isinstance(part, str) and lone_surrogate(part) for part, _ in segments):
            detail = "the chat template writes half a surrogate pair"
            return BadRecord("template", document.name, detail)
        if not any(trained for _, trained in segments):
            return BadRecord("template", document.name, "the chat template leaves the answers out")
        if segments[0][0] == self._start:  # packing puts it there
            segments = segments[1:]
        return segments

    def _finish(
        self, ids: np.ndarray, mask: np.ndarray | None, document: Document
    ) -> Encoded | BadRecord:
        eos_id = self._tokenizer.eos_id
        has_own_end = mask is not None and len(ids) > 0 and ids[-1] == eos_id
        if self._has_end and not has_own_end:
            ids = np.concatenate([ids, [eos_id]], dtype=np.int32, casting="unsafe")
            # After an answer the end is to be learned, after what somebody else says not.
            mask = None if mask is None else np.append(mask, mask[-1] if len(mask) else 0)
        first = None
        if self.keeps_first and len(ids):
            first, ids, mask = int(ids[0]), ids[1:], None if mask is None else mask[1:]
        if not len(ids):
            return BadRecord("no tokens", document.name, "it has no token to predict")
        if mask is not None and not mask.any():
            return BadRecord("no answer", document.name, "it has no token to train on")
        return Encoded(ids, mask, first)
