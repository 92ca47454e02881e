"""The README's commands and programs do what it says.

Every fenced block in sh or python has a comment on the line above its fence:

    <!-- test: quick -->                                    run with every test
    <!-- test: quick; train with max_steps=3 log_every=1 --> run, with these overrides at the end of
                                                            each training run
    <!-- test: slow -->                                     run with pytest -m slow
    <!-- test: no, it installs the package -->              not run, and why

The blocks run in order in one folder that holds the root's programs and examples/, so that a block
can use what an earlier one has left. A shell block ends at the first command that fails.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = ("sh", "bash", "shell", "console")
# A training run: environment variables, the program, arguments and continued lines, no comment.
TRAINING = re.compile(
    r"^(?:[A-Z_0-9]+=\S+ )*(?:python train\.py|fp4zoo-train)\b(?:\\\n|(?! +#)[^\n])*", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the mark above it and the line of its fence."""

    language: str
    text: str
    mark: str
    line: int


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks in shell or Python."""
    pattern = r"^(?:<!-- test: ([^\n]*?) -->\n)?```(\w+)\n(.*?)^```$"
    found = []
    for match in re.finditer(pattern, markdown, re.MULTILINE | re.DOTALL):
        if match[2] in (*SHELL, "python"):
            line = markdown[: match.start(2)].count("\n") + 1
            found.append(Block(match[2], match[3], match[1] or "", line))
    return found


def program(block: Block) -> str:
    """The block's text with the mark's overrides at the end of its training runs."""
    overrides = block.mark.partition("; train with ")[2]
    return (
        TRAINING.sub(lambda run: f"{run[0]} {overrides}", block.text) if overrides else block.text
    )


def chosen() -> list:
    """The blocks to run as test parameters, slow ones marked."""
    parameters = []
    for block in blocks(README):
        kind = re.split(r"[;,]", block.mark)[0]
        if kind in ("quick", "slow"):
            marks = [pytest.mark.slow] if kind == "slow" else []
            parameters.append(pytest.param(block, marks=marks, id=f"line{block.line}"))
    return parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a fresh clone as far as the README's commands can tell."""
    folder = tmp_path_factory.mktemp("readme")
    for path in ROOT.glob("*.py"):
        if path.name != "__init__.py":
            shutil.copy(path, folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def test_every_block_says_whether_it_is_tested():
    assert blocks(README)
    for block in blocks(README):
        assert re.match(r"(quick|slow)(;|$)|no, ", block.mark), (
            f"README.md:{block.line} has no mark"
        )


@pytest.mark.parametrize("block", chosen())
def test_block_runs(block: Block, folder: Path):
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = (
        ["bash", "-euo", "pipefail", "-c"] if block.language in SHELL else [sys.executable, "-c"]
    )
    result = subprocess.run(
        [*command, program(block)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"README.md:{block.line}\n{result.stdout}\n{result.stderr}"


def test_marks_are_read_and_overrides_reach_training_runs_only():
    markdown = """text
<!-- test: quick; train with max_steps=3 -->
```sh
python train.py model=llama-tiny
ls
fp4zoo-train \\
  -m seed=1,2  # both
```
```python
x = 1
```
```yaml
a: 1
```
"""
    shell, python = blocks(markdown)
    assert (shell.language, shell.line) == ("sh", 3)
    assert program(shell) == (
        "python train.py model=llama-tiny max_steps=3\n"
        "ls\nfp4zoo-train \\\n  -m seed=1,2 max_steps=3  # both\n"
    )
    assert (python.language, python.text, python.mark) == ("python", "x = 1\n", "")
