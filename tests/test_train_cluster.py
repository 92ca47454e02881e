"""One run in several processes, connected over loopback as they would be over a network."""

import os
import shutil
import signal
import socket

import numpy as np
import pytest

from fp4zoo.training.metrics import read_rows

from . import runs
from .runs import SLOWER, wait_for_step

OPTIONS = ["max_steps=6", "evaluate_every=3", "save_every=3", "sample_tokens=4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Beside it are the caches that every run here shares."""
    return runs.write_text(tmp_path_factory.mktemp("cluster") / "text.jsonl")


@pytest.fixture(scope="module")
def launch(text):
    """launch(count, *overrides, devices=1, each=...) -> the processes of one run, started.

    each: a process's own overrides, by its number. prelude: code that runs before the program.
    """
    started = []
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles twice as fast
    }

    def go(count, *overrides, devices=1, each=None, prelude=""):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        processes = []
        for index in range(count):
            arguments = [*OPTIONS, *overrides, *(each or {}).get(index, [])]
            if count > 1:
                arguments += [f"cluster.coordinator=127.0.0.1:{port}"]
                arguments += [f"cluster.num_processes={count}", f"cluster.process_id={index}"]
            process = runs.start(text, *arguments, devices=devices, prelude=prelude, **environment)
            processes.append(process)
        started.extend(processes)
        return processes

    yield go
    runs.end(started)


def finish(processes, status=0):
    """(output, error) of each process, without what gloo prints."""
    results = [process.communicate(timeout=250) for process in processes]
    assert [process.returncode for process in processes] == [status] * len(processes), results
    return [
        tuple(
            "".join(line for line in said.splitlines(True) if "[Gloo]" not in line) for said in pair
        )
        for pair in results
    ]


def rows(directory):
    found = read_rows(directory / "metrics.jsonl")
    for row in found:
        row.pop("tokens_per_second", None)
        row.pop("data_wait", None)
    return found


def losses(directory):
    return [row["loss"] for row in rows(directory) if "loss" in row]


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory):
    """A run in two processes: its folder, and what the processes said."""
    directory = tmp_path_factory.mktemp("two") / "run"
    return directory, finish(launch(2, f"output_dir={directory}"))


def test_two_processes_train_as_one_run(two):
    directory, ((output, _), (other_output, other_error)) = two
    assert "2 x cpu in 2 processes, fsdp 2" in output
    for said in ("compiled the step in", "step 6/6", "validation loss", "sample:", "metrics: "):
        assert output.count(said) >= 1
    assert not other_output and not other_error
    assert sorted(os.listdir(directory)) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "tokenizer",
    ]
    assert len(os.listdir(directory / "tensorboard")) == 1
    assert [row["step"] for row in rows(directory)] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert sorted(os.listdir(directory / "checkpoints")) == ["3", "6"]


def test_two_processes_go_on_bit_for_bit(two, launch, tmp_path):
    directory, _ = two
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    ((output, _), _) = finish(launch(2, f"output_dir={tmp_path / 'run'}"))
    assert "going on after step 3" in output
    assert rows(tmp_path / "run") == rows(directory)


@pytest.mark.slow
def test_processes_lose_like_one(two, launch, tmp_path):
    finish(launch(1, f"output_dir={tmp_path / 'one'}", devices=4))
    expected = rows(tmp_path / "one")
    accumulated = ["gradient_accumulation=2", "evaluation_batches=4"]  # of half as many rows
    runs = {
        "two of two": (2, 2, []),
        "four": (4, 1, []),
        "four, accumulated": (4, 1, accumulated),
        "four, tensor": (4, 1, ["mesh.fsdp=2", "mesh.tensor=2", *accumulated]),
        "four, context": (4, 1, ["mesh.fsdp=1", "mesh.data=2", "mesh.context=2"]),
    }
    for name, (count, devices, options) in runs.items():
        directory = tmp_path / name.replace(",", "").replace(" ", "-")
        finish(launch(count, f"output_dir={directory}", *options, devices=devices))
        for row, like in zip(rows(directory), expected, strict=True):
            for key in like.keys() & {"loss", "validation_loss", "gradient_norm"}:
                np.testing.assert_allclose(row[key], like[key], rtol=1e-5, err_msg=(name, key))
    np.testing.assert_allclose(losses(two[0]), losses(tmp_path / "one"), rtol=1e-5)
    # Saved by four processes, read by one.
    shutil.rmtree(tmp_path / "four" / "checkpoints" / "6")
    finish(launch(1, f"output_dir={tmp_path / 'four'}", devices=2))
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
def test_four_processes_go_on_bit_for_bit(launch, tmp_path):
    """In NVFP4: the stochastic rounding too."""
    options = ["precision=nvfp4", "precision.rules.first_blocks=0", "precision.rules.last_blocks=0"]
    options += ["mesh.fsdp=2", "mesh.tensor=2", "gradient_accumulation=2", "evaluation_batches=4"]
    finish(launch(4, f"output_dir={tmp_path / 'whole'}", *options))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    ((output, _), *_) = finish(launch(4, f"output_dir={tmp_path / 'run'}", *options))
    assert "4 x cpu in 4 processes" in output and "going on after step 3" in output
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_processes_that_were_given_different_configurations_are_told_the_key(launch, tmp_path):
    each = {0: ["seed=1"], 1: ["seed=2"]}
    (_, error), (_, other) = finish(
        launch(2, f"output_dir={tmp_path / 'run'}", each=each), status=2
    )
    assert error == (
        "error: process 1: the configuration differs between processes: seed=2 here and seed=1 in "
        "process 0; start all with the same command\n"
    )
    assert not other and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_in_several_processes_is_one_line(launch, tmp_path):
    (_, error), (_, other) = finish(
        launch(2, f"output_dir={tmp_path / 'run'}", "mesh.fsdp=3"), status=2
    )
    assert error.startswith("error: mesh (fsdp=3) needs 3 device(s)") and error.count("\n") == 1
    assert not other and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_process_stops_all_at_the_same_step(launch, tmp_path, asked):
    options = ["max_steps=40", "save_every=0", "evaluate_every=0", "sample_tokens=0"]
    finish(launch(2, f"output_dir={tmp_path / 'whole'}", *options))
    directory = tmp_path / "run"
    processes = launch(2, f"output_dir={directory}", *options, prelude=SLOWER)
    wait_for_step(directory, 3, *processes)
    processes[asked].send_signal(signal.SIGTERM)
    (output, _), _ = finish(processes)
    last = len(losses(directory))
    assert f"stopped by SIGTERM after step {last} of 40" in output and last < 40
    assert os.listdir(directory / "checkpoints") == [str(last)]
    finish(launch(2, f"output_dir={directory}", *options))
    assert rows(directory) == rows(tmp_path / "whole")


@pytest.mark.slow
def test_batches_that_are_not_finite_end_all_processes_alike(launch, tmp_path):
    poison = """
import numpy as np
from fp4zoo.data.pipeline import TrainIterator
read = TrainIterator.__next__
def poisoned(self):
    batch = read(self)
    if self.get_state()["rows_read"] >= 4 * 8 and 0 in self._rows:
        batch = {**batch, "tokens": np.full_like(batch["tokens"], 300)}
    return batch
TrainIterator.__next__ = poisoned
"""
    options = ["precision.loss_scale.max_consecutive_skips=2", "save_every=1", "evaluate_every=0"]
    directory = tmp_path / "run"
    (_, error), (_, other) = finish(
        launch(2, f"output_dir={directory}", *options, prelude=poison), status=1
    )
    assert "error: 2 steps in a row were not finite, up to step 5" in error
    assert "not finite" not in other
    assert max(map(int, os.listdir(directory / "checkpoints"))) == 3


@pytest.mark.slow
def test_the_first_run_tokenises_once(launch, tmp_path):
    folder = [f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=null", "model.vocab_size=512"]
    results = finish(launch(2, f"output_dir={tmp_path / 'run'}", *folder, "max_steps=1"))
    assert results[0][1].count("data: tokenised") == 1
    assert results[0][1].count("data: trained SentencePiece") == 1
    assert len(os.listdir(tmp_path / "cache" / "corpora")) == 1
