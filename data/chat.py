"""Chats written out by a Jinja template, cut into what the assistant said and the rest."""

import json
import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from .extras import needs
from .records import ANSWER_ROLE
from .tokenizer import Tokenizer

# Special tokens spelled in a message stay text. They are written in characters of this range while
# the template runs, so that they differ from the template's own.
_PRIVATE_RANGE = range(0xF0000, 0xFFFFE)
# What one writing of a chat may take, so that a template that never ends does not hang the run.
_MOST_CHARACTERS = 64 << 20
_MOST_NUMBERS = 1 << 20  # of its ranges; real templates count messages


class TemplateFailure(Exception):
    """A chat that the template does not take; the text says why."""


class ChatTemplate:
    """A Jinja template as `transformers` runs it: sandboxed, with its functions and variables."""

    def __init__(self, source: str, tokenizer: Tokenizer, name: str):
        """Compiles `source`.

        Raises:
          UserError: it is not a Jinja template, or jinja2 is not installed.
        """
        needs("jinja2", "data.format=chat")
        import jinja2
        import jinja2.sandbox

        self.source = source
        self._numbers_left = 0
        self._special = tokenizer.special_tokens
        names = sorted(self._special, key=len, reverse=True)
        self._border = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        by_id = {token: text for text, token in self._special.items()}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        # No strftime_now: tokens must not depend on the day. Templates fall back on a fixed date.
        environment.globals |= {
            "raise_exception": _raise,
            "range": self._range,
            "bos_token": by_id.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
            "eos_token": by_id.get(tokenizer.eos_id, ""),
        }
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{name} is not a Jinja template ({reason}): name another data.chat_template"
            ) from error

    def segments(self, messages: list[dict[str, str]]) -> list[tuple[str | int, bool]]:
        """Texts and special tokens in order, and whether the assistant said them.

        What the assistant said is what its message adds to the text behind the prompt for it: the
        answer and the token that ends it.

        Raises:
          TemplateFailure: the template refuses the messages, or writes earlier ones differently
            when more follow.
        """
        messages, spelled = self._protected(messages)
        whole = self._render(messages, False)
        segments, position = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ANSWER_ROLE:
                continue
            before = self._render(messages[:number], True)
            after = self._render(messages[: number + 1], False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise TemplateFailure(
                    f"it writes message {number} differently when it is the last, so that the "
                    "answers cannot be told from the rest"
                )
            segments += self._cut(whole[position : len(before)], spelled, False)
            segments += self._cut(after[len(before) :], spelled, True)
            position = len(after)
        return segments + self._cut(whole[position:], spelled, False)

    def _render(self, messages: list[dict[str, str]], prompt: bool) -> str:
        self._numbers_left, written, size = _MOST_NUMBERS, [], 0
        try:
            for part in self._template.generate(messages=messages, add_generation_prompt=prompt):
                written.append(part)
                size += len(part)
                if size > _MOST_CHARACTERS:
                    raise ValueError(f"it writes more than {_MOST_CHARACTERS:,} characters")
            return "".join(written)
        except Exception as error:  # a template is a program: it may raise anything
            reason = " ".join(str(error).split())
            raise TemplateFailure(reason or type(error).__name__) from error

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        if len(numbers) > self._numbers_left:
            raise OverflowError(f"its loops count more than {_MOST_NUMBERS:,} numbers")
        self._numbers_left -= len(numbers)
        return numbers

    def _protected(
        self, messages: list[dict[str, str]]
    ) -> tuple[list[dict[str, str]], dict[int, str]]:
        """The messages with a character for each special token spelled in them; what they mean."""
        border = self._border
        if border is None or not any(border.search(message["content"]) for message in messages):
            return messages, {}
        used = {character for message in messages for character in message["content"]}
        unused = (chr(code) for code in _PRIVATE_RANGE if chr(code) not in used)
        spelled = {text: next(unused) for text in self._special}
        protected = [
            message | {"content": border.sub(lambda found: spelled[found[0]], message["content"])}
            for message in messages
        ]
        return protected, {ord(character): text for text, character in spelled.items()}

    def _cut(
        self, text: str, spelled: dict[int, str], trained: bool
    ) -> list[tuple[str | int, bool]]:
        parts = self._border.split(text) if self._border else [text]
        return [
            (self._special[part] if part in self._special else part.translate(spelled), trained)
            for part in parts
            if part
        ]


def load_chat_template(path: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a file; None: the tokenizer's own.

    Raises:
      UserError: no such file, not a template, or the tokenizer has none.
    """
    if path is None:
        if tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer {tokenizer.name} has no chat template: set data.chat_template to a "
                "Jinja file"
            )
        return ChatTemplate(tokenizer.chat_template, tokenizer, f"{tokenizer.name}'s chat template")
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read data.chat_template={path} ({error}): name a Jinja file"
        ) from error
    return ChatTemplate(source, tokenizer, path)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
