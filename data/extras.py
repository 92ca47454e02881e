"""Libraries that only some files need; they come with `pip install "fp4zoo[data]"`."""

import importlib
from pathlib import Path
from typing import Any

from ..errors import UserError


def needs(module: str, what: str | Path) -> Any:
    """Imports `module`, which reading `what` needs.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f'{what} needs {package}: pip install "fp4zoo[data]"') from error
