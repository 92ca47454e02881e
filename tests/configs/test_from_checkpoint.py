"""`checkpoint=` brings the model and the tokenizer along."""

import dataclasses
import json

import pytest

from fp4zoo import configs
from fp4zoo.errors import UserError


@pytest.fixture
def run(tmp_path):
    """A folder with a checkpoint's configuration; what it holds else is not looked at here."""
    step = tmp_path / "run/checkpoints/3"
    (step / "parameters").mkdir(parents=True)
    (step / "config").mkdir()
    model = configs.load(["model=mixtral-tiny", "model.num_layers=3"]).model
    (step / "config/metadata").write_text(json.dumps({"model": dataclasses.asdict(model)}))
    (tmp_path / "run/tokenizer").mkdir()
    return tmp_path / "run"


def test_model_and_tokenizer_come_from_the_checkpoint(run):
    config = configs.load([f"checkpoint={run}", "precision=bf16"])
    assert (config.model.architecture, config.model.num_layers) == ("mixtral", 3)
    assert config.model.moe is not None and config.model.moe.num_experts == 8
    assert config.data.tokenizer == str(run / "tokenizer")
    assert config.precision.recipe == "bf16"


def test_overrides_win(run):
    config = configs.load([f"checkpoint={run}", "model.max_positions=512", "data.tokenizer=bytes"])
    assert (config.model.num_layers, config.model.max_positions) == (3, 512)
    assert config.data.tokenizer == "bytes"
    assert configs.load([f"checkpoint={run}", "model=llama-tiny"]).model.architecture == "llama"


def test_checkpoint_without_a_configuration_is_refused(run):
    (run / "checkpoints/3/config/metadata").unlink()
    with pytest.raises(UserError, match="does not say which model it is of") as error:
        configs.load([f"checkpoint={run}"])
    assert "\n" not in str(error.value)


def test_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        configs.load([f"checkpoint={tmp_path / 'none'}"])
