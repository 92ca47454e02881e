"""Runs, sweeps and Hydra's own commands."""

import logging
from pathlib import Path

import pytest

from fp4zoo import configs
from fp4zoo.configs.cli import run
from fp4zoo.errors import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Program:
    """Keeps the configurations it was run with; fails for seed 13."""

    def __init__(self):
        self.configs: list[configs.TrainConfig] = []

    def __call__(self, config: configs.TrainConfig) -> int:
        self.configs.append(config)
        return 3 if config.seed == 13 else 0


def test_plain_run_passes_the_dataclass_and_leaves_nothing_behind(here: Path, capsys):
    program = Program()
    handlers = list(logging.getLogger().handlers)
    arguments = ["model=mixtral-tiny", "precision=bf16", "optimizer.learning_rate=1e-3", "seed=5"]
    assert run(program, arguments) == 0
    (config,) = program.configs
    assert config == configs.load(arguments)
    assert config.model.architecture == "mixtral" and config.model.moe is not None
    assert (config.precision.recipe, config.optimizer.learning_rate, config.seed) == (
        "bf16",
        1e-3,
        5,
    )
    assert config.output_dir is None
    assert list(here.iterdir()) == [] and Path.cwd() == here
    assert logging.getLogger().handlers == handlers
    assert capsys.readouterr() == ("", "")


def test_exit_status_of_the_program_is_that_of_the_run():
    assert run(Program(), ["seed=13"]) == 3


def test_mistake_found_by_the_program_is_one_line(capsys):
    def main(config) -> int:
        raise UserError("mesh.fsdp=3 does not divide 8 devices: choose 1, 2, 4 or 8")

    assert run(main, []) == 2
    assert capsys.readouterr().err == (
        "error: mesh.fsdp=3 does not divide 8 devices: choose 1, 2, 4 or 8\n"
    )


def test_fault_of_the_program_keeps_its_traceback():
    def main(config) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run(main, [])


def test_full_error_raises_for_developers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError):
        run(Program(), ["seed=banana"])


def test_sweep_runs_every_combination_in_a_folder_of_its_own(here: Path):
    program = Program()
    assert run(program, ["-m", "seed=1,2", "precision=nvfp4,bf16", "max_steps=7"]) == 0
    seen = {(config.seed, config.precision.recipe) for config in program.configs}
    assert seen == {(1, "nvfp4"), (1, "bf16"), (2, "nvfp4"), (2, "bf16")}
    assert {config.max_steps for config in program.configs} == {7}
    folders = {config.output_dir for config in program.configs}
    assert len(folders) == 4
    assert any(str(folder).endswith("precision=bf16,seed=2") for folder in folders)
    assert [path.name for path in here.iterdir()] == ["runs"]


def test_sweep_puts_its_folders_under_the_output_dir_given(here: Path):
    program = Program()
    assert run(program, ["seed=range(1,3)", "-m", "output_dir=mine"]) == 0
    assert [config.output_dir for config in program.configs] == [
        str(here / "mine" / "seed=1"),
        str(here / "mine" / "seed=2"),
    ]


def test_sweep_over_output_dirs_uses_them(here: Path):
    program = Program()
    assert run(program, ["output_dir=a,b", "-m"]) == 0
    assert [config.output_dir for config in program.configs] == ["a", "b"]


def test_sweep_with_a_failed_job_runs_the_others_and_fails(here: Path, capsys):
    program = Program()
    assert run(program, ["-m", "seed=13,2"]) == 1
    assert [config.seed for config in program.configs] == [13, 2]
    assert "a job of the sweep failed: " in capsys.readouterr().err


def test_help_lists_groups_and_keys(here: Path, capsys):
    assert run(Program(), ["--help"]) == 0
    out = capsys.readouterr().out
    assert "precision: bf16, fp16, fp32, nvfp4" in out
    assert "learning_rate:" in out
    assert list(here.iterdir()) == []


def test_cfg_prints_the_configuration_instead_of_running(here: Path, capsys):
    program = Program()
    assert run(program, ["max_steps=3", "--cfg", "job", "seed=5"]) == 0
    assert "\nseed: 5\n" in capsys.readouterr().out
    assert program.configs == [] and list(here.iterdir()) == []


def test_info_shows_the_defaults(here: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra adds one to this stdout
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    assert run(Program(), ["--info", "defaults"]) == 0
    assert "model/llama-tiny" in capsys.readouterr().out
    assert list(here.iterdir()) == []


def test_version_is_ours(capsys):
    with pytest.raises(SystemExit) as stop:
        run(Program(), ["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("fp4zoo ")


def test_files_of_the_user_come_before_ours(here: Path, capsys):
    (here / "model").mkdir()
    ours = (Path(configs.__file__).parent / "model" / "llama-tiny.yaml").read_text()
    mine = ours.replace("norm_epsilon: 1.0e-5", "norm_epsilon: 0.25")
    (here / "model" / "mine.yaml").write_text(mine)
    (here / "night.yaml").write_text("defaults: [train, override model: mine, _self_]\nseed: 9\n")
    program = Program()
    assert run(program, ["--config-dir", ".", "model=mine"]) == 0
    assert run(program, ["--config-dir", ".", "--config-name", "night", "max_steps=3"]) == 0
    assert run(program, ["--config-dir", ".", "-m", "model=mine,llama-tiny"]) == 0
    assert [config.model.norm_epsilon for config in program.configs] == [0.25, 0.25, 0.25, 1e-5]
    assert (program.configs[1].seed, program.configs[1].max_steps) == (9, 3)
