from pathlib import Path

import pytest

from fp4zoo.configs.model_table import table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made():
    return table()


def test_docs_are_up_to_date(made):
    """After a change: python -m fp4zoo.configs.model_table docs/models.md"""
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == made


def test_a_row_says_what_is_published(made):
    (row,) = (line for line in made.splitlines() if line.startswith("| `mixtral-8x7b`"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:5] == ["mixtral", "46.70 B", "12.88 B"]  # arXiv 2401.04088: 47B, 13B active
    assert 16 * 46.7e9 / 2**30 < float(cells[5].replace(",", "")) < 20 * 46.7e9 / 2**30
