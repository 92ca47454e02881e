"""From overrides to a checked dataclass: Hydra composes, the schema decides what is right."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from ..errors import UserError, did_you_mean
from . import mistakes
from .fields import Key, build, keys, mutable_twin
from .from_checkpoint import with_checkpoint
from .generation import GenerateConfig
from .planning import PlanConfig
from .schema import TrainConfig

CONFIG_MODULE = "fp4zoo.configs"
VERSION_BASE = "1.3"
# By the name of the primary YAML file.
SCHEMAS: dict[str, type] = {"train": TrainConfig, "generate": GenerateConfig, "plan": PlanConfig}


def load(
    overrides: Sequence[str] = (), config_name: str = "train", config_dir: str | None = None
) -> TrainConfig:
    """Returns the configuration that `python train.py` would run with.

    Args:
      overrides: as on the command line: `["model=llama-tiny", "optimizer.learning_rate=1e-3"]`.
      config_name: the primary file; ours is train.yaml.
      config_dir: a folder with more YAML files, searched before ours.

    Raises:
      UserError: one line that names the key and, where there is one, the near match.
    """
    schema = schema_of(config_name)
    return to_dataclass(compose(overrides, config_name, config_dir), schema)


def from_dict(values: Mapping[str, Any], schema: type = TrainConfig) -> Any:
    """Returns the configuration that plain values describe, such as a run's config.yaml's."""
    return to_dataclass(OmegaConf.create(dict(values)), schema)


def to_yaml(config: Any) -> str:
    """Returns a configuration as YAML that `from_dict` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def schema_of(config_name: str) -> type:
    """Returns the dataclass of a primary file; a user's own is taken to be based on train.yaml."""
    return SCHEMAS.get(config_name, TrainConfig)


def to_dataclass(composed: DictConfig, schema: type) -> Any:
    """Returns a composed configuration's dataclass; `UserError` for missing or unfit values."""
    known = keys(schema)
    with mistakes.in_one_line(schema):
        checked = OmegaConf.merge(OmegaConf.structured(mutable_twin(schema)), composed)
        # A ??? in a file over a default leaves the default in `checked`, so both are asked.
        missing = sorted(OmegaConf.missing_keys(composed) | OmegaConf.missing_keys(checked))
        if missing:
            wanted = [f"{path} ({known[path].expected})" for path in missing]
            raise UserError(f"missing value: set {', '.join(wanted)}")
        return build(schema, OmegaConf.to_container(checked, resolve=True))  # pyright: ignore


def compose(
    overrides: Sequence[str], config_name: str = "train", config_dir: str | None = None
) -> DictConfig:
    """Returns the composed configuration, each override checked against the schema first."""
    schema = schema_of(config_name)
    with initialized(config_dir), mistakes.in_one_line(schema):
        for override in parse(overrides):
            check(override, schema)
        below = _below_optional_groups(overrides, keys(schema))
        if below:
            rest = hydra.compose(config_name, [line for line in overrides if line not in below])
            for line, group in below.items():
                if OmegaConf.select(rest, group) is None:
                    raise UserError(
                        f"{line}: {group} is null here: choose a model that has it, "
                        "or write one in a YAML file"
                    )
        return with_checkpoint(hydra.compose(config_name, list(overrides)), parse(overrides))


def _below_optional_groups(overrides: Sequence[str], known: Mapping[str, Key]) -> dict[str, str]:
    """The overrides of keys in groups that may be null, with the group: OmegaConf asserts there."""
    groups = [path for path, key in known.items() if key.group is not None and key.optional]
    return {
        str(override.input_line): group
        for override in parse(overrides)
        for group in groups
        if override.key_or_group.startswith(group + ".")
        or (override.key_or_group == group and isinstance(override.value(), dict))
    }


@contextmanager
def initialized(config_dir: str | None) -> Iterator[None]:
    """Hydra with our files on its search path and, before them, the user's folder if any."""
    with (
        prepared(config_dir),
        hydra.initialize_config_module(CONFIG_MODULE, version_base=VERSION_BASE),
    ):
        yield


@contextmanager
def prepared(config_dir: str | None) -> Iterator[None]:
    """Schemas in Hydra's store, and `config_dir` on the search path of a Hydra started inside."""
    if config_dir is not None and not os.path.isdir(config_dir):
        raise UserError(f"--config-dir={config_dir}: there is no such folder")
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(f"{name}_schema", node=mutable_twin(schema))
    Plugins.instance().register(_UserFolder)
    _UserFolder.path = None if config_dir is None else os.path.abspath(config_dir)
    try:
        yield
    finally:
        _UserFolder.path = None


def _required() -> None:
    raise mistakes.MissingValue


OmegaConf.register_new_resolver("required", _required)


class _UserFolder(SearchPathPlugin):
    """Puts the user's folder before ours: compose() has no argument for it."""

    path: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.path is not None:
            search_path.prepend(
                "command-line", f"file://{self.path}", SearchPathQuery(provider="main")
            )


def parse(overrides: Sequence[str]) -> list[Override]:
    """Returns the parsed overrides; raises `UserError` for one that is not `key=value`."""
    parsed = []
    for line in overrides:
        try:
            (override,) = OverridesParser.create(_config_loader()).parse_overrides([line])
        except OverrideParseException as error:
            raise UserError(
                f"malformed override {line!r}: write key=value{_quoting(line)}"
            ) from error
        if not override.key_or_group:
            raise UserError(f"malformed override {line!r}: write key=value")
        parsed.append(override)
    return parsed


def _quoting(line: str) -> str:
    """How to quote a value for both the shell and Hydra, when the value is what does not parse."""
    key, _, value = line.partition("=")
    return f", quoted as \"{key}='{value}'\" if the value is text" if key and value else ""


def group_choices(group: str) -> list[str]:
    """Returns the choices of a config group, empty when there is none. Needs `initialized`."""
    return _config_loader().get_group_options(group)


def _config_loader() -> Any:
    return GlobalHydra.instance().config_loader()


def check(override: Override, schema: type) -> None:
    """Raises `UserError` for an override of an unknown key, or to an unknown choice of a group."""
    path, known = override.key_or_group, keys(schema)
    assert override.input_line is not None
    if override.is_sweep_override():
        raise UserError(f"{override.input_line}: several values are a sweep: add -m")
    if override.is_delete():
        raise UserError(f"{override.input_line}: keys cannot be removed: give {path} another value")
    if override.is_add() and path in known:
        raise UserError(f"{override.input_line}: {path} exists: write {override.input_line[1:]}")
    choices, value = group_choices(path), override.value()
    if choices:
        if not isinstance(value, str):
            raise UserError(f"{override.input_line}: {path} takes one of {', '.join(choices)}")
        if value not in choices:
            raise UserError(f"{path}={value}: unknown choice{did_you_mean(value, choices)}")
    elif override.is_hydra_override():
        pass
    elif path not in known:
        raise UserError(mistakes.unknown_key(path, known))
    elif not known[path].accepts(value):  # OmegaConf is laxer: it takes 7 for true
        raise UserError(mistakes.wrong_type(path, value, known))
