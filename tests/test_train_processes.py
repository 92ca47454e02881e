"""The program in processes of its own: killed, stopped, out of disk, on several devices."""

import os
import signal
import time

import numpy as np
import pytest

from fp4zoo.training.metrics import read_rows

from . import runs
from .runs import SLOWER, wait_for_step

OPTIONS = ["max_steps=20", "evaluate_every=0", "save_every=5", "sample_tokens=0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Beside it are the caches that every run here shares."""
    return runs.write_text(tmp_path_factory.mktemp("processes") / "text.jsonl")


@pytest.fixture
def start(text, tmp_path):
    """start(*overrides, devices=1, prelude="") -> the running process, writing to tmp_path/run."""
    processes = []

    def go(*overrides, devices=1, prelude=""):
        arguments = [f"output_dir={tmp_path / 'run'}", *OPTIONS, *overrides]
        processes.append(runs.start(text, *arguments, devices=devices, prelude=prelude))
        return processes[-1]

    yield go
    runs.end(processes)


def finish(process, status=0):
    output, error = process.communicate(timeout=240)
    assert process.returncode == status, error
    return output, error


def losses(directory):
    path = directory / "metrics.jsonl"
    return {row["step"]: row["loss"] for row in read_rows(path) if "loss" in row}


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(start, tmp_path):
    finish(start(f"output_dir={tmp_path / 'whole'}"))
    process = start(prelude=SLOWER)
    wait_for_step(tmp_path / "run", 8, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert max(losses(tmp_path / "run")) < 20
    output, _ = finish(start())
    assert "going on after step 5" in output
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    steps = [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == sorted(steps) and steps.count(8) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_status_0(start, tmp_path, number):
    process = start("save_every=0", prelude=SLOWER)
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(number)
    output, error = finish(process)
    assert f"stopped by {number.name} after step" in output
    assert not error.count("Traceback")
    last = max(losses(tmp_path / "run"))
    assert last < 20
    assert os.listdir(tmp_path / "run" / "checkpoints") == [str(last)]


@pytest.mark.parametrize("where", ["imports", "callback", "tokenising", "compiling"])
def test_a_first_ctrl_c_ends_it_at_once(start, tmp_path, where):
    """Before there is anything to save: during the imports, in a callback whose exceptions nobody
    sees, in Python, and in a compiler that does not look at signals."""
    if where == "imports":
        prelude = "import sys; sys.stdout.write('here\\n'); sys.stdout.flush()"
        process = start(prelude=prelude)
        time.sleep(0.5)
    else:
        wait = "print('here', flush=True); time.sleep(60)"
        prelude = f"""
import time, weakref
from fp4zoo import data
from fp4zoo.training.program import Program
class Watched: pass
def callback(reference): {wait}
def in_a_callback(*arguments, **options):
    watched = Watched()
    reference = weakref.ref(watched, callback)
    del watched
def in_python(*arguments, **options): {wait}
def in_a_library(*arguments, **options):
    import ctypes
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    print("here", flush=True)
    for _ in range(2):  # the second waits for ever; a sleep would return at the signal
        library.pthread_mutex_lock(mutex)
where = {where!r}
if where == "callback": data.load_tokenizer = in_a_callback
if where == "tokenising": data.load_tokenizer = in_python
if where == "compiling": Program.compile_train_step = in_a_library
"""
        process = start(prelude=prelude)
    for line in process.stdout:
        if line == "here\n":
            break
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = finish(process, status=130)
    assert time.monotonic() - begin < 5
    assert error.splitlines()[-1] == "aborted" and "Traceback" not in error


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep(start, tmp_path):
    process = start("seed=1,2", "save_every=0", "-m", prelude=SLOWER)
    wait_for_step(tmp_path / "run" / "seed=1", 2, process)
    process.send_signal(signal.SIGINT)
    output, error = finish(process, status=130)
    assert "stopped by SIGINT after step" in output
    assert error.splitlines()[-1] == (
        "error: the sweep was stopped by SIGINT: no other job was started"
    )
    assert not (tmp_path / "run" / "seed=2").exists()


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_status_1(start, tmp_path):
    """A limit on the size of files, set when the first checkpoint is complete."""
    prelude = """
import resource, signal
from fp4zoo.training.checkpoints import Checkpoints
save = Checkpoints.save
def limited(self, state, **items):
    if int(state.step) > 5:
        self.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    save(self, state, **items)
Checkpoints.save = limited
"""
    begin = time.monotonic()
    _, error = finish(
        start(prelude=prelude),
        status=1,
    )
    assert time.monotonic() - begin < 200
    # tensorstore's other threads may print to standard error before it; the reason comes last.
    last = error.splitlines()[-1]
    assert last.startswith("error: cannot write a checkpoint to")
    assert "File too large" in last and "the newest complete one is of step 5" in last


@pytest.mark.slow
def test_eight_devices_lose_like_one(start, tmp_path):
    runs = {
        "one": ([], 1),
        "fsdp": (["mesh.fsdp=8"], 8),
        "data": (["mesh.data=8", "mesh.fsdp=1"], 8),
        "mixed": (["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "gradient_accumulation=2"], 8),
    }
    results = {}
    for name, (options, devices) in runs.items():
        directory = tmp_path / name
        options = [*options, f"output_dir={directory}", "max_steps=10", "save_every=0"]
        output, _ = finish(start(*options, devices=devices))
        assert f"{devices} x cpu" in output
        results[name] = list(losses(directory).values())
    for name, values in results.items():
        np.testing.assert_allclose(values, results["one"], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(start, tmp_path):
    finish(start(f"output_dir={tmp_path / 'whole'}"))
    process = start("mesh.fsdp=4", "mesh.data=2", devices=8, prelude=SLOWER)
    wait_for_step(tmp_path / "run", 6, process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    finish(start("mesh.fsdp=2", "mesh.tensor=2", devices=4))
    whole, pieces = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert list(pieces) == list(whole)
    np.testing.assert_allclose(list(pieces.values()), list(whole.values()), rtol=1e-4)
