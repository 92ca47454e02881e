"""Backend `transformer_engine`, in a process of its own: see te_light/checks.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4zoo.numerics.backends.transformer_engine_recipe import TESTED_VERSION

CHECKS = Path(__file__).parent / "te_light" / "checks.py"


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None
    or importlib.util.find_spec("pydantic") is None,
    reason="Transformer Engine is not installed: pip install pydantic && "
    f"pip install --no-deps transformer_engine=={TESTED_VERSION}",
)
def test_what_transformer_engine_is_given_and_what_it_computes():
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("NVTE_")
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
