import json

from fp4zoo.training.metrics import (
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    MetricsWriter,
    keep_rows,
    read_rows,
    write_atomically,
)


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write({"step": 1, "loss": 2.5})
        assert read_rows(tmp_path / METRICS_FILE) == [{"step": 1, "loss": 2.5}]
    assert list((tmp_path / TENSORBOARD_FOLDER).iterdir())


def test_what_is_not_finite_is_null(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write({"step": 1, "loss": float("nan"), "gradient_norm": float("inf")})
    assert "NaN" not in (tmp_path / METRICS_FILE).read_text()
    assert read_rows(tmp_path / METRICS_FILE) == [{"step": 1, "loss": None, "gradient_norm": None}]


def test_resuming_drops_the_rows_that_will_be_written_again(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        for step in (10, 20, 30):
            writer.write({"step": step, "loss": 1.0})
    with MetricsWriter(tmp_path, resume_step=20) as writer:
        writer.write({"step": 30, "loss": 2.0})
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [(row["step"], row["loss"]) for row in rows] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    keep_rows(path, 10)
    assert path.read_text() == '{"step": 1}\n'


def test_a_new_run_starts_an_empty_file(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n')
    with MetricsWriter(tmp_path, resume_step=0):
        assert path.read_text() == ""


def test_atomic_writing_leaves_nothing_else(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomically(path, "a: 1\n")
    write_atomically(path, "a: 2\n")
    assert path.read_text() == "a: 2\n"
    assert list(tmp_path.iterdir()) == [path]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write({"step": 7, "loss": 2.5, "mfu": None})
        writer.write({"step": 7, "validation_loss": 3.5})
    (events,) = (tmp_path / TENSORBOARD_FOLDER).iterdir()
    content = events.read_bytes()
    assert b"training/loss" in content and b"validation/validation_loss" in content
    assert b"mfu" not in content
    assert json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[0])["loss"] == 2.5
