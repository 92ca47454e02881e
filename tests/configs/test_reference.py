"""docs/configuration.md is what the schema says."""

from pathlib import Path

import pytest

from fp4zoo.configs.fields import keys
from fp4zoo.configs.reference import reference
from fp4zoo.configs.schema import TrainConfig

KEYS = keys(TrainConfig)


def test_reference_is_up_to_date():
    written = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    assert written.read_text(encoding="utf-8") == reference(), (
        "run python -m fp4zoo.configs.reference docs/configuration.md"
    )


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_a_meaning(path: str):
    assert KEYS[path].meaning, f"describe {path} in its class's docstring"
