"""Every mistake on the command line: one line that names the key, exit status 2, no traceback."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4zoo.configs.cli import run
from fp4zoo.configs.fields import Key, leaves
from fp4zoo.configs.schema import TrainConfig
from fp4zoo.errors import UserError

LEAVES = leaves(TrainConfig)
# Models in which the groups that may be null are set.
BASE = {"model.moe": ["model=mixtral-tiny"], "model.rope_scaling": ["model=llama-3.1-8b"]}


def base(path: str) -> list[str]:
    return next((line for group, line in BASE.items() if path.startswith(group + ".")), [])


def never(config) -> int:
    raise AssertionError(f"trained with {config}")


def complaint(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What is said about the overrides, checked to be one line with exit status 2."""
    assert run(never, overrides) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip("\n")


def wrong_value(key: Key) -> str:
    if get_origin(key.annotation) in (Literal, tuple) or key.annotation in (int, float, bool):
        return "banana"
    return "[1,{a: 2}]"


@pytest.mark.parametrize("path", LEAVES)
def test_misspelt_key_names_the_near_match(path: str, capsys):
    parent, _, name = path.rpartition(".")
    misspelt = f"{parent}.{name}x".lstrip(".")
    match = complaint(capsys, *base(path), f"{misspelt}=1").partition("did you mean ")[2]
    assert match.startswith("'") and match.endswith("'?")
    suggested = match[1:-2]
    assert suggested in LEAVES
    if len(name) > 3:  # b1x is as near to b1 as to b2
        assert suggested == path


@pytest.mark.parametrize("path", LEAVES)
def test_value_of_another_type_names_the_key(path: str, capsys):
    text = complaint(capsys, *base(path), f"{path}={wrong_value(LEAVES[path])}")
    assert text.startswith(f"{path}=")
    assert "expected " in text or "unknown choice" in text


@pytest.mark.parametrize("path", [path for path, key in LEAVES.items() if not key.optional])
def test_null_where_a_value_is_needed_names_the_key(path: str, capsys):
    assert complaint(capsys, *base(path), f"{path}=null").startswith(f"{path}=null: expected ")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)
@given(path=st.sampled_from(sorted(LEAVES)), data=st.data())
def test_any_slip_of_the_finger_is_one_line(path: str, data: st.DataObject, capsys):
    position = data.draw(st.integers(0, len(path) - 1))
    letter = data.draw(st.sampled_from("abcxyz_"))
    slip = data.draw(
        st.sampled_from(
            [
                path[:position] + path[position + 1 :],
                path[:position] + letter + path[position:],
                path[:position] + letter + path[position + 1 :],
            ]
        )
    )
    if slip not in LEAVES:
        complaint(capsys, f"{slip}=1")


@pytest.mark.parametrize(
    "override, text",
    [
        (
            "optimizer.learning_rat=1",
            "unknown key 'optimizer.learning_rat': did you mean 'optimizer.learning_rate'?",
        ),
        ("learning_rate=1", "unknown key 'learning_rate': did you mean 'optimizer.learning_rate'?"),
        ("optimiser.b1=1", "unknown key 'optimiser.b1': did you mean 'optimizer.b1'?"),
        ("modle=llama-tiny", "unknown key 'modle': did you mean 'model'?"),
        ("zzz=1", "unknown key 'zzz': --help lists the keys"),
        ("seed.x=1", "unknown key 'seed.x': seed is an integer, not a group of keys"),
        ("+seed=1", "+seed=1: seed exists: write seed=1"),
        ("~seed", "~seed: keys cannot be removed: give seed another value"),
        ("seed=1.5", "seed=1.5: expected an integer"),
        ("resume=7", "resume=7: expected true or false"),
        ("seed=1,2", "seed=1,2: several values are a sweep: add -m"),
        ("remat=non", "remat=non: unknown choice: did you mean 'none'?"),
        ("model=lama-tiny", "model=lama-tiny: unknown choice: did you mean 'llama-tiny'?"),
        ("precision=int8", "precision=int8: unknown choice: choose from bf16, fp16, fp32, nvfp4"),
        ("precision=null", "precision=null: precision takes one of bf16, fp16, fp32, nvfp4"),
        ("seed", "malformed override 'seed': write key=value"),
        ("=3", "malformed override '=3': write key=value"),
        ("--sed", "unrecognized arguments: --sed: --help shows the usage"),
        ("--resolve", "--resolve and --package go with --cfg: --help shows the usage"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("data=text", "missing value: set data.path (text)"),
        ("hydra.nope=1", "unknown key 'hydra.nope': --cfg hydra lists Hydra's own keys"),
        ("batch_size=0", "batch_size=0 is too small: at least 1"),
        (
            "--config-name=nope",
            "Cannot find primary config 'nope'. Check that it's in your config search path.",
        ),
        ("--config-dir=/nope", "--config-dir=/nope: there is no such folder"),
        (
            "output_dir=a=b",
            "malformed override 'output_dir=a=b': write key=value, "
            "quoted as \"output_dir='a=b'\" if the value is text",
        ),
        (
            "model.moe.num_experts=4",
            "model.moe.num_experts=4: model.moe is null here: "
            "choose a model that has it, or write one in a YAML file",
        ),
    ],
)
def test_message(override: str, text: str, capsys):
    assert complaint(capsys, override) == text


def test_unknown_key_without_a_near_match_lists_those_beside_it(capsys):
    text = complaint(capsys, "optimizer.zzzzzzzz=1")
    assert text.startswith("unknown key 'optimizer.zzzzzzzz': optimizer has learning_rate, ")


@pytest.mark.parametrize(
    "yaml, text",
    [
        (
            "embed_dimm: 3",
            "in model/mine.yaml: unknown key 'model.embed_dimm': did you mean 'model.embed_dim'?",
        ),
        ("embed_dim: wide", "in model/mine.yaml: model.embed_dim=wide: expected an integer"),
        ("embed_dim: 64", "missing value: set model."),
        ("embed_dim: 64\nembed_dim: 32", "mine.yaml:2: found duplicate key embed_dim"),
        ("embed_dim: [", "mine.yaml:2: expected the node content"),
        ("- embed_dim", "in model/mine.yaml: Invalid type assigned: list"),
    ],
)
def test_mistake_in_a_file_of_the_user(yaml: str, text: str, tmp_path: Path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(yaml + "\n")
    assert (
        complaint(capsys, f"--config-dir={tmp_path}", "model=mine")
        .replace(f"{tmp_path}/model/", "")
        .startswith(text)
    )


def test_sweep_with_one_bad_job_starts_none(capsys):
    assert complaint(capsys, "-m", "seed=1,banana") == "seed=banana: expected an integer"
    assert complaint(capsys, "-m", "model=llama-tiny,lama").startswith("model=lama: unknown choice")


def test_flags_that_exclude_each_other(capsys):
    assert "not allowed with argument" in complaint(capsys, "-m", "--cfg", "job", "seed=1,2")
    assert "unrecognized arguments: --experimental-rerun" in complaint(
        capsys, "--experimental-rerun=x"
    )


def test_cfg_of_a_package_that_does_not_exist(capsys):
    text = complaint(capsys, "--cfg", "job", "--package", "optimiser")
    assert text == "unknown key 'optimiser': did you mean 'optimizer'?"


def test_cfg_and_help_complain_alike(capsys):
    for flag in (["--cfg", "job"], ["--help"], ["--info=defaults"]):
        assert complaint(capsys, *flag, "seed=banana") == "seed=banana: expected an integer"


def test_the_program_itself_complains_in_one_line():
    command = [sys.executable, "-m", "fp4zoo.train", "optimizer.learning_rat=1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: unknown key 'optimizer.learning_rat': did you mean 'optimizer.learning_rate'?\n"
    )


def test_a_message_is_one_line_and_acts_on_no_terminal():
    error = UserError("no file a\nb\x1b[31m\ud800 é", lines=["a table", "of lines"])
    assert str(error) == "no file a\\nb\\x1b[31m\\ud800 é\na table\nof lines"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
