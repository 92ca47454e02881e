"""The whole program, in this process, on a model that trains in milliseconds per step."""

import dataclasses
import hashlib
import json
import os
import signal

import jax
import numpy as np
import pytest

from fp4zoo import data, train
from fp4zoo.errors import UserError
from fp4zoo.training.checkpoints import find_checkpoint
from fp4zoo.training.metrics import read_rows

MODEL = [
    "model.vocab_size=272",
    "model.num_layers=2",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.mlp_dim=48",
    "model.max_positions=64",
]
FP32 = ["precision=fp32"]
NVFP4 = ["precision=nvfp4", "precision.rules.last_blocks=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sixty documents of a small language: each word decides which words may follow."""
    directory = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    words = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "sings", "runs"]
    lines = []
    for _ in range(60):
        chosen = [random.integers(10)]
        for _ in range(100):
            chosen.append((3 * chosen[-1] + random.integers(2)) % 10)
        lines.append(json.dumps({"text": " ".join(words[index] for index in chosen)}))
    path = directory / "text.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(text, tmp_path, monkeypatch):
    """run(*overrides) -> exit status, in tmp_path/run unless another output_dir is given."""
    monkeypatch.setenv("FP4ZOO_CACHE", str(text.parent / "cache"))

    def go(*overrides):
        return train.main(
            [
                *MODEL,
                f"data.path={text}",
                "data.tokenizer=bytes",
                "data.validation_fraction=0.2",
                f"output_dir={tmp_path / 'run'}",
                "batch_size=4",
                "sequence_length=32",
                "max_steps=12",
                "evaluate_every=0",
                "evaluation_batches=2",
                "save_every=0",
                "log_every=1",
                "sample_tokens=0",
                "optimizer.warmup_steps=2",
                *overrides,
            ]
        )

    return go


@pytest.fixture
def intervene(monkeypatch):
    """intervene(number, function): calls function(batch) on the batch of this number (from 1), and
    trains on what it returns. Returns the list of hashes of all batches from here on."""
    make = data.make_train_iterator
    functions, hashes = {}, []

    class Iterator:
        def __init__(self, iterator):
            self.iterator = iterator

        def __getattr__(self, name):
            return getattr(self.iterator, name)

        def __next__(self):
            batch = next(self.iterator)
            hashes.append(hashlib.sha256(batch["tokens"].tobytes()).hexdigest())
            number = self.iterator.get_state()["rows_read"] // len(batch["tokens"])
            return functions.get(number, lambda same: same)(batch)

    monkeypatch.setattr(data, "make_train_iterator", lambda *a, **k: Iterator(make(*a, **k)))

    def add(number, function):
        functions[number] = function
        return hashes

    return add


def poison(batch):
    """A token outside the vocabulary, whose embedding is NaN."""
    return {**batch, "tokens": np.full_like(batch["tokens"], 300)}


def terminate(batch):
    os.kill(os.getpid(), signal.SIGTERM)
    return batch


def training_rows(directory):
    return [row for row in read_rows(directory / "metrics.jsonl") if "loss" in row]


def losses(directory):
    return [(row["step"], row["loss"]) for row in training_rows(directory)]


def test_a_run_from_beginning_to_end(run, tmp_path, capsys):
    status = run(
        *NVFP4, "max_steps=60", "evaluate_every=30", "save_every=20", "sample_tokens=8",
        "log_every=10", "optimizer.learning_rate=1e-2",
    )  # fmt: skip
    output = capsys.readouterr()
    assert status == 0
    directory = tmp_path / "run"
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["40", "60"]
    assert (directory / "config.yaml").read_text().startswith("model:")
    assert data.load_tokenizer_file(directory / "tokenizer").vocab_size == 259

    rows = read_rows(directory / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    assert [row["step"] for row in training] == [10, 20, 30, 40, 50, 60]
    for name in (
        "gradient_norm", "learning_rate", "loss_scale", "skipped_steps", "tokens_per_second",
        "data_wait",
    ):  # fmt: skip
        assert all(np.isfinite(row[name]) for row in training), name
    assert all(0 <= row["data_wait"] <= 1 for row in training)
    evaluations = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in evaluations] == [30, 60]
    assert evaluations[1]["validation_loss"] < evaluations[0]["validation_loss"]

    for part in (
        "Precision plan for nvfp4", "Memory in GiB", "training tokens", "first step after",
        f"validation loss {evaluations[1]['validation_loss']:.4f} nats/token", "bits/byte",
        "unigram model:", "sample:", "checkpoints: ", "metrics: ",
    ):  # fmt: skip
        assert part in output.out
    assert output.out.count("step 60: validation loss") == 1
    unigram = float(output.out.rpartition("unigram model: ")[2].split()[0])
    assert evaluations[1]["validation_loss"] < 0.8 * unigram
    assert "Traceback" not in output.err and "absl" not in output.err


GOLDEN = {  # the same on jax 0.10 and 0.12
    "fp32": [5.590093, 5.529208, 5.397835, 5.264278, 5.101797, 4.981594, 4.931620, 4.892839],
    "nvfp4": [5.589806, 5.531110, 5.397107, 5.266085, 5.104707, 4.981498, 4.931485, 4.893594],
}


@pytest.mark.parametrize(("name", "precision"), [("fp32", FP32), ("nvfp4", NVFP4)])
def test_golden_losses(run, tmp_path, name, precision):
    """The first steps of a fixed run: a change of any part of it shows here."""
    assert run(*precision, "precision.activation_dtype=float32", "max_steps=8") == 0
    measured = [loss for _, loss in losses(tmp_path / "run")]
    np.testing.assert_allclose(measured, GOLDEN[name], rtol=5e-5)


@pytest.mark.parametrize(
    ("precision", "workers", "stop_at"),
    [
        (FP32, 0, 5),
        (NVFP4, 2, 5),
        # The forward pass becomes BF16 after step 6: stopped before, at and after the switch.
        ([*NVFP4, "precision.forward_finish=0.5"], 0, 4),
        ([*NVFP4, "precision.forward_finish=0.5"], 0, 6),
        ([*NVFP4, "precision.forward_finish=0.5"], 0, 9),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    run, intervene, tmp_path, capsys, precision, workers, stop_at
):
    options = [*precision, f"data.num_workers={workers}"]
    hashes = intervene(0, None)
    assert run(*options, f"output_dir={tmp_path / 'whole'}") == 0
    whole = list(hashes)
    hashes.clear()
    intervene(stop_at, terminate)
    assert run(*options) == 0
    assert f"stopped by SIGTERM after step {stop_at} of 12" in capsys.readouterr().out
    assert find_checkpoint(tmp_path / "run").name == str(stop_at)
    assert run(*options) == 0
    assert f"going on after step {stop_at}" in capsys.readouterr().out
    assert hashes == whole
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 13))


def test_a_signal_during_an_evaluation_loses_nothing(run, tmp_path, monkeypatch):
    evaluate = train.Validation.evaluate

    def interrupted(self, graphdef, parameters):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, graphdef, parameters)

    monkeypatch.setattr(train.Validation, "evaluate", interrupted)
    assert run(*FP32, "evaluate_every=4") == 0
    assert find_checkpoint(tmp_path / "run").name == "4"


def test_the_finish_changes_the_forward_pass(run, tmp_path):
    whole, finish = tmp_path / "whole", tmp_path / "finish"
    assert run(*NVFP4, f"output_dir={whole}") == 0
    assert run(*NVFP4, f"output_dir={finish}", "precision.forward_finish=0.5") == 0
    assert losses(whole)[:6] == losses(finish)[:6]
    assert losses(whole)[6] != losses(finish)[6]


def test_one_bad_batch_is_skipped_and_the_run_goes_on(run, intervene, tmp_path, capsys):
    intervene(5, poison)
    assert run(*FP32, "precision.loss_scale.enabled=true") == 0
    rows = training_rows(tmp_path / "run")
    assert [row["loss"] is None for row in rows] == [step == 5 for step in range(1, 13)]
    assert [row["skipped_steps"] for row in rows] == [0] * 4 + [1] * 8
    assert [row["loss_scale"] for row in rows] == [2.0**15] * 5 + [2.0**14] * 7
    output = capsys.readouterr().out
    assert "step 5 skipped (1 in a row): not finite were the loss and the gradients of" in output


def test_bad_batches_in_a_row_end_the_run_and_it_can_go_on(run, intervene, tmp_path, capsys):
    for number in range(5, 13):
        intervene(number, poison)
    options = [*FP32, "precision.loss_scale.max_consecutive_skips=3", "save_every=1"]
    assert run(*options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 3 steps in a row were not finite, up to step 7; not finite")
    assert "blocks.middle.attention.output.kernel[0]" in error
    assert error.count("\n") == 1
    # The skipped steps' saves have not pushed out the good ones.
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]

    for number in range(5, 13):
        intervene(number, lambda batch: batch)
    assert run(*options) == 0
    rows = training_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["loss"] is not None for row in rows)


def test_a_complete_run_is_not_repeated(run, tmp_path, capsys):
    assert run(*FP32, "max_steps=3") == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert run(*FP32, "max_steps=3") == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert "step 3: validation loss" in capsys.readouterr().out


def test_a_fresh_start_keeps_what_was_there(run, tmp_path):
    assert run(*FP32, "max_steps=3") == 0
    first = losses(tmp_path / "run")
    assert run(*FP32, "max_steps=3", "resume=false") == 0
    assert losses(tmp_path / "run") == first
    assert losses(tmp_path / "run" / "previous-1") == first
    assert find_checkpoint(tmp_path / "run" / "previous-1").name == "3"


def test_starting_from_another_run_s_parameters(run, tmp_path, capsys):
    assert run(*FP32, f"output_dir={tmp_path / 'first'}") == 0
    trained = losses(tmp_path / "first")[-1][1]
    assert run(*NVFP4, f"checkpoint={tmp_path / 'first'}", "max_steps=2", "seed=1") == 0
    assert f"starting from the parameters of {tmp_path / 'first'}" in capsys.readouterr().out
    (step, loss), _ = losses(tmp_path / "run")
    assert step == 1 and loss < trained + 0.2


def test_accumulation_trains_alike(run, tmp_path):
    results = []
    for parts in (1, 4):
        directory = tmp_path / str(parts)
        options = [f"output_dir={directory}", f"gradient_accumulation={parts}", "max_steps=4"]
        assert run(*FP32, *options) == 0
        results.append([loss for _, loss in losses(directory)])
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_experts_train(run, tmp_path):
    options = ["model=mixtral-tiny", "model.moe.num_experts=4", "max_steps=3"]
    assert run(*NVFP4, *options) == 0
    for row in training_rows(tmp_path / "run"):
        assert row["load_balance_loss"] > 0 and row["expert_load"] >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["checkpoint=nowhere"], "nowhere does not exist: looked for STEP/parameters"),
        (["data.path=nowhere.txt"], "nowhere.txt"),
        (["mesh.fsdp=3"], "mesh (fsdp=3) needs 3 device(s) and there are"),
        (["model=llama-tinny"], "llama-tiny"),
        (["optimizer.learning_rat=1"], "learning_rate"),
        (["max_steps=many"], "max_steps"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run, capsys, options, message):
    assert run(*FP32, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["data.path=nowhere.txt", "data.tokenizer=nowhere.model"])
def test_a_refused_run_leaves_no_folder(run, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    assert run(*FP32, option, "output_dir=null") == 2
    assert run(*FP32, option, f"output_dir={tmp_path / 'a' / 'b'}") == 2
    assert not os.listdir(tmp_path)


def test_a_run_refused_after_compiling_leaves_no_folder(run, tmp_path, monkeypatch, capsys):
    def too_large(*arguments):
        raise UserError("the compiled step needs 9 GiB")

    monkeypatch.setattr(train.memory, "check_compiled", too_large)
    assert run(*FP32) == 2
    assert "needs 9 GiB" in capsys.readouterr().err and not os.listdir(tmp_path)


def test_a_file_where_checkpoints_go_is_one_line(run, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert run(*FP32) == 2
    error = capsys.readouterr().err
    assert "checkpoints is a file, and checkpoints go into a folder" in error
    assert error.count("\n") == 1 and os.listdir(tmp_path / "run") == ["checkpoints"]


def test_a_folder_that_cannot_be_written_is_one_line_and_status_2(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(*FP32, f"output_dir={tmp_path / 'file' / 'run'}") == 2
    assert "cannot be written to (Not a directory)" in capsys.readouterr().err


def test_a_model_that_is_too_large_stops_before_anything_is_allocated(tmp_path, capsys):
    status = train.main(["model=mixtral-8x7b", "precision=nvfp4", f"output_dir={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: this run needs ")
    for part in ("parameters", "optimizer", "gradients", "activations", "available", "mesh.fsdp"):
        assert part in error
    assert not (tmp_path / "run").exists()


def test_all_zero_gradients_raise_the_alarm(run, intervene, tmp_path, capsys, monkeypatch):
    def without_targets(batch):
        return {**batch, "loss_mask": np.zeros_like(batch["loss_mask"])}

    intervene(2, without_targets)  # zero gradients too, but no layer is at fault
    create = train.Program.initial_state

    def dead(program):
        state = create(program)
        down = state.parameters["blocks"]["middle"]["mlp"]["down"]
        down["kernel"] = jax.device_put(down["kernel"] * 0, down["kernel"].sharding)
        return dataclasses.replace(state)

    monkeypatch.setattr(train.Program, "initial_state", dead)
    assert run(*FP32, "max_steps=2") == 0
    output = capsys.readouterr().out
    assert output.count("alarm: ") == 2
    assert "alarm: no token of step 2 is trained on" in output
    assert "at step 1 the gradients of blocks.middle.mlp.gate_up.kernel[0]" in output
