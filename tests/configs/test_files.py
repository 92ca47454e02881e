"""The YAML files, against the schema."""

import itertools
from importlib import resources

import pytest
import yaml

from fp4zoo import configs
from fp4zoo.configs.fields import keys
from fp4zoo.errors import UserError

GROUPS = ("model", "precision", "data", "optimizer", "mesh")
FOLDER = resources.files("fp4zoo.configs")
FILES = [
    (group, file.name.removesuffix(".yaml"))
    for group in GROUPS
    for file in sorted((FOLDER / group).iterdir(), key=lambda file: file.name)
]
CHOICES = {group: [name for other, name in FILES if other == group] for group in GROUPS}
NEEDED = {
    ("data", "text"): ["data.path=/corpus"],
    ("data", "chat"): ["data.path=/chats"],
    ("data", "prompt_completion"): ["data.path=/pairs"],
    ("data", "mixture"): ["data.sources=[{path: /a, weight: 1}, {path: /b, weight: 2}]"],
}


def paths(values: dict, prefix: str) -> list[str]:
    """The dotted paths of all keys in a YAML file."""
    found = []
    for name, value in values.items():
        found.append(prefix + name)
        if isinstance(value, dict):
            found += paths(value, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("group, name", FILES)
def test_file_says_what_it_is_and_has_only_known_keys(group: str, name: str):
    text = (FOLDER / group / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    values = yaml.safe_load(text) or {}
    assert set(paths(values, f"{group}.")) <= set(keys(configs.TrainConfig))


@pytest.mark.parametrize("group, name", FILES)
def test_file_makes_its_dataclass(group: str, name: str):
    needed = NEEDED.get((group, name), [])
    config = configs.load([f"{group}={name}", *needed])
    assert configs.from_dict(yaml.safe_load(configs.to_yaml(config))) == config


@pytest.mark.parametrize(
    "model, precision", zip(CHOICES["model"], itertools.cycle(CHOICES["precision"]), strict=False)
)
def test_models_compose_with_precisions(model: str, precision: str):
    config = configs.load([f"model={model}", f"precision={precision}"])
    assert config.precision.recipe == precision


def test_recipes_have_the_dtype_and_loss_scale_that_they_need():
    def chosen(precision: str) -> tuple[str, bool]:
        config = configs.load([f"precision={precision}"]).precision
        return config.activation_dtype, config.loss_scale.enabled

    assert {name: chosen(name) for name in CHOICES["precision"]} == {
        "nvfp4": ("bfloat16", True),
        "bf16": ("bfloat16", False),
        "fp16": ("float16", True),
        "fp32": ("float32", False),
    }


def test_saved_configuration_with_an_unknown_key_is_refused():
    values = yaml.safe_load(configs.to_yaml(configs.load()))
    values["optimizer"]["momentum"] = 0.9
    with pytest.raises(UserError, match="^unknown key 'optimizer.momentum'"):
        configs.from_dict(values)


def test_configuration_is_checked_as_a_whole():
    with pytest.raises(UserError, match="^gradient_accumulation=3 does not divide batch_size=8"):
        configs.load(["gradient_accumulation=3"])
    with pytest.raises(UserError, match="^sequence_length=4096 is longer than model.max_positions"):
        configs.load(["model=llama-tiny", "sequence_length=4096"])
    with pytest.raises(UserError, match="^precision.forward_finish=1 is not a share of the run"):
        configs.load(["precision.forward_finish=1"])
