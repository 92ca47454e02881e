"""Training runs in processes of their own, for the tests that kill, stop and connect them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from fp4zoo import train

# A model that trains in milliseconds a step; a test file adds how long, and what is saved when.
OPTIONS = [
    "precision=fp32",
    "model.vocab_size=272",
    "model.num_layers=2",
    "model.embed_dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.mlp_dim=64",
    "model.max_positions=64",
    "data.tokenizer=bytes",
    "data.validation_fraction=0.2",
    "batch_size=8",
    "sequence_length=32",
    "evaluation_batches=2",
    "log_every=1",
    "optimizer.warmup_steps=2",
]

# A prelude that makes a run slow enough to be caught in the middle.
SLOWER = """
import time
from fp4zoo import data
make = data.make_train_iterator
def slow(*arguments, **options):
    iterator = make(*arguments, **options)
    kind = type(iterator)
    read = kind.__next__
    kind.__next__ = lambda self: (time.sleep(0.2), read(self))[1]
    return iterator
data.make_train_iterator = slow
"""


def write_text(path: Path) -> Path:
    """Sixty documents of random words; `start` keeps its caches beside them."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(60):
            words = [chr(97 + letter) * 3 for letter in random.integers(0, 26, 150)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def start(text: Path, *arguments, devices=1, prelude="", **environment) -> subprocess.Popen:
    """train.py on `text` with so many fake devices. prelude: code that runs before the program."""
    code = f"{prelude}\nimport sys, runpy; sys.argv[0] = {train.__file__!r}\n"
    code += f"runpy.run_path({train.__file__!r}, run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", code, f"data.path={text}", *OPTIONS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "FP4ZOO_CACHE": str(text.parent / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(text.parent / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **environment,
        },
    )


def end(processes) -> None:
    """Those that still run."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for_step(directory: Path, step: int, *processes) -> None:
    """Until the metrics hold a row of this step."""
    for _ in range(2400):
        path = directory / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in time")
