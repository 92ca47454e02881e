import io
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fp4zoo.training.display import Display
from fp4zoo.training.errors import TrainingFailure
from fp4zoo.training.metrics import METRICS_FILE, MetricsWriter, read_rows
from fp4zoo.training.recorder import Recorder, RecorderConfig

NAMES = [f"blocks.middle.mlp.down.kernel[{layer}]" for layer in range(8)] + ["final_norm.scale"]


@pytest.fixture
def recorded(tmp_path):
    """recorded(**config) -> (Recorder, its output, a function that reads the rows)."""
    writers = []

    def make(**changes):
        settings = {
            "log_every": 2,
            "max_steps": 5,
            "max_consecutive_skips": 3,
            "gradient_names": NAMES,
            "tokens_per_step": 1000,
            "flops_per_step": 1e9,
            "peak_flops": None,
        }
        output = io.StringIO()
        writer = MetricsWriter(tmp_path, resume_step=0)
        writers.append(writer)
        display = Display(5, console=Console(file=output, width=400, highlight=False, markup=False))
        recorder = Recorder(RecorderConfig(**{**settings, **changes}), writer, display)
        return recorder, output, lambda: read_rows(tmp_path / METRICS_FILE)

    yield make
    for writer in writers:
        writer.__exit__()


def metrics(*, loss=2.0, squares=None, skips=0, **changes):
    values = {
        "loss": loss,
        "gradient_norm": 1.5,
        "learning_rate": 1e-3,
        "loss_scale": 32768.0,
        "tokens": 1000.0,
        "skipped_steps": skips,
        "consecutive_skips": skips,
        "finite": skips == 0,
        "gradient_squares": np.ones(len(NAMES), np.float32) if squares is None else squares,
        **changes,
    }
    return {name: jnp.asarray(value) for name, value in values.items()}


def squares(**changes):
    values = np.ones(len(NAMES), np.float32)
    for name, value in changes.items():
        values[int(name[1:])] = value
    return values


def test_rows_come_every_so_often_and_at_the_end(recorded):
    recorder, _, rows = recorded()
    for step in range(1, 6):
        assert recorder.record(step, metrics(loss=float(step)), 0.0) == 0
    assert [(row["step"], row["loss"]) for row in rows()] == [(2, 2.0), (4, 4.0), (5, 5.0)]
    assert "mfu" not in rows()[0]


def test_speed_leaves_out_pauses(recorded):
    recorder, _, rows = recorded(log_every=1, peak_flops=1e12)
    with recorder.pause():
        time.sleep(0.3)
    time.sleep(0.02)
    recorder.record(1, metrics(), 0.01)
    (row,) = rows()
    assert row["tokens_per_second"] > 1000 / 0.3
    assert 0.03 < row["data_wait"] < 0.6
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 1e6 / 1e12)


def test_further_metrics_of_the_model_are_kept(recorded):
    recorder, _, rows = recorded(log_every=1)
    recorder.record(1, metrics(load_balance_loss=1.25), 0.0)
    assert rows()[0]["load_balance_loss"] == 1.25


def test_what_was_not_finite_is_named(recorded):
    recorder, output, _ = recorded()
    assert recorder.record(1, metrics(squares=squares(_3=np.nan, _8=np.inf), skips=1), 0.0) == 1
    assert (
        "step 1 skipped (1 in a row): not finite were the gradients of "
        "blocks.middle.mlp.down.kernel[3], final_norm.scale (2 of 9); loss scale was 32768"
    ) in output.getvalue()


def test_many_names_are_cut_short(recorded):
    recorder, output, _ = recorded()
    everything = np.full(len(NAMES), np.nan, np.float32)
    recorder.record(1, metrics(loss=np.nan, squares=everything, skips=1), 0.0)
    assert "the loss and the gradients of" in output.getvalue()
    assert "kernel[5] and 3 more (9 of 9)" in output.getvalue()


def test_too_many_in_a_row_end_the_run_after_their_row_is_written(recorded):
    recorder, _, rows = recorded()
    recorder.record(1, metrics(skips=1, loss=np.nan), 0.0)
    with pytest.raises(TrainingFailure, match="3 steps in a row were not finite, up to step 2"):
        recorder.record(2, metrics(skips=3, loss=np.nan), 0.0)
    assert rows()[-1]["step"] == 2


def test_the_alarm_for_all_zero_gradients_sounds_once_per_parameter(recorded):
    recorder, output, _ = recorded()
    recorder.record(1, metrics(squares=squares(_2=0.0)), 0.0)
    recorder.record(2, metrics(squares=squares(_2=0.0)), 0.0)
    recorder.record(3, metrics(squares=squares(_2=0.0, _4=0.0)), 0.0)
    lines = [line for line in output.getvalue().splitlines() if line.startswith("alarm")]
    assert len(lines) == 2
    assert "at step 1 the gradients of blocks.middle.mlp.down.kernel[2] are all zero" in lines[0]
    assert "at step 3 the gradients of blocks.middle.mlp.down.kernel[4] are all zero" in lines[1]


def test_steps_without_targets_are_told_once_and_blame_no_parameter(recorded):
    recorder, output, _ = recorded()
    for step in (1, 2):
        recorder.record(step, metrics(squares=np.zeros(len(NAMES), np.float32), tokens=0.0), 0.0)
    lines = [line for line in output.getvalue().splitlines() if line.startswith("alarm")]
    assert len(lines) == 1 and "no token of step 1 is trained on" in lines[0]
