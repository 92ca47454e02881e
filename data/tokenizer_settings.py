"""The small files beside a tokenizer: which tokens are special, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError

CONFIG_FILE = "tokenizer_config.json"
_JSON_FILES = (CONFIG_FILE, "special_tokens_map.json")
_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class TokenizerSettings:
    """The contents of these files by name; as many of them as there are."""

    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def beside(cls, path: Path) -> TokenizerSettings:
        """Those in the folder of a tokenizer's file."""
        found = (path.parent / name for name in (*_JSON_FILES, _TEMPLATE_FILE))
        return cls({file.name: file.read_bytes() for file in found if file.is_file()})

    def names(self, key: str) -> bool:
        """Whether a file says anything of `key`, such as "bos_token", be it null."""
        return any(key in values for values in self._values())

    def token(self, key: str) -> str | None:
        """The spelling of a special token, from the first file that names it."""
        for values in self._values():
            if key in values:
                token = values[key]
                spelled = token.get("content") if isinstance(token, dict) else token
                if spelled is not None and not isinstance(spelled, str):
                    raise UserError(f"{key}={token!r} beside the tokenizer should be a text")
                return spelled
        return None

    def chat_template(self) -> str | None:
        """The chat template of its own file, else of the settings (of several, "default")."""
        if _TEMPLATE_FILE in self.files:
            try:
                return self.files[_TEMPLATE_FILE].decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{_TEMPLATE_FILE} beside the tokenizer is no text ({error}): download it again"
                ) from error
        for values in self._values():
            template = values.get("chat_template")
            if isinstance(template, list):
                entries = [entry for entry in template if isinstance(entry, dict)]
                default = [entry for entry in entries if entry.get("name") == "default"]
                template = default[-1].get("template") if default else None
            if isinstance(template, str):
                return template
        return None

    def save(self, directory: str | Path) -> None:
        """Writes the files again."""
        for name, content in self.files.items():
            Path(directory, name).write_bytes(content)

    def _values(self) -> list[dict[str, Any]]:
        found = []
        for name in _JSON_FILES:
            if name in self.files:
                try:
                    values = json.loads(self.files[name])
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{name} is not JSON ({error}): download it again") from error
                if not isinstance(values, dict):
                    raise UserError(f"{name} holds no JSON object: download it again")
                found.append(values)
        return found
