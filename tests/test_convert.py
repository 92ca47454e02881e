"""The program; what it calls is tested in tests/interop."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import pytest

from fp4zoo import convert
from fp4zoo.data import ByteTokenizer

CHECKPOINTS = Path(__file__).parent / "interop" / "checkpoints.py"
spec = importlib.util.spec_from_file_location("tiny_checkpoints", CHECKPOINTS)
checkpoints = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checkpoints)

# A vocabulary that bytes fit into.
VALUES = {**checkpoints.CONFIGS["llama3.1"], "vocab_size": 259, "dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path):
    arrays = checkpoints.tensors(VALUES, ml_dtypes.bfloat16)
    return checkpoints.write(tmp_path / "hf", VALUES, arrays, files=2)


@pytest.fixture
def converted(folder, tmp_path):
    """A converted checkpoint with a tokenizer."""
    assert convert.main(["from-hf", str(folder), str(tmp_path / "ours")]) == 0
    (tmp_path / "ours/tokenizer").mkdir()
    ByteTokenizer().save(tmp_path / "ours/tokenizer")
    return tmp_path / "ours"


def refused(arguments, capsys) -> str:
    capsys.readouterr()
    assert convert.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err


def test_there_and_back(folder, tmp_path, capsys):
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert convert.main(["from-hf", str(folder), ours, "--pad-vocabulary", "32"]) == 0
    assert f"python generate.py checkpoint={ours}" in capsys.readouterr().out
    assert convert.main(["to-hf", ours, back, "--shard-gb", "0.0001"]) == 0
    found, expected = (checkpoints.read_folder(Path(path)) for path in (back, folder))
    checkpoints.same(found, expected)
    assert len(list(Path(back).glob("*.safetensors"))) > 1


def test_inspect_ours_and_theirs(folder, converted, capsys):
    capsys.readouterr()
    assert convert.main(["inspect", str(converted)]) == 0
    ours = capsys.readouterr().out
    assert "a checkpoint of fp4zoo" in ours and "layers stacked per segment: middle 0-1" in ours
    assert "blocks.middle.mlp.gate_up.kernel" in ours and "[2, 64, 2, 48]" in ours
    assert convert.main(["inspect", str(folder)]) == 0
    theirs = capsys.readouterr().out
    assert "a Hugging Face folder, plain" in theirs and "2 safetensors files" in theirs
    assert "model.layers.*.mlp.up_proj.weight" in theirs and "2 x bfloat16" in theirs
    size = next(line for line in ours.splitlines() if line.startswith("size")).split(" in ")[0]
    assert size in theirs


@pytest.mark.slow
def test_verify_finds_what_differs(folder, converted, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("the quick brown fox " * 5)
    arguments = ["verify", str(converted), str(folder), "--text", str(text)]
    capsys.readouterr()
    assert convert.main(arguments) == 0
    assert "21 tensors, 21 identical" in (out := capsys.readouterr().out)
    assert "KL divergence on 64 tokens: 0 nats" in out
    arrays = checkpoints.tensors(VALUES, ml_dtypes.bfloat16)
    arrays["model.layers.1.mlp.up_proj.weight"][3, 4] += 8
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    checkpoints.write_file(folder / "model.safetensors", arrays)
    assert convert.main(arguments) == 1
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.up_proj.weight: largest 8, " in out
    assert "more than rounding explains" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rms_norm_eps=0.01), "model.norm_epsilon=0.01, the checkpoint has 1e-05"),
        (dict(max_position_embeddings=32), "model.max_positions=32, the checkpoint has "),
        (dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8), "model.num_heads=8"),
    ],
)
def test_verify_refuses_a_folder_that_computes_something_else(
    changes, message, folder, converted, capsys
):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    assert message in refused(["verify", converted, folder], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nvfp4", "modelopt-nvfp4"])
def test_calibrated_export_is_verified(format, converted, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("the quick brown fox " * 5)
    arguments = ["to-hf", converted, tmp_path / "fp4", "--format", format, "--text", text]
    arguments += ["--activations", "calibrated"]
    if format == "modelopt-nvfp4":
        arguments += ["--kv-cache", "nvfp4"]
    assert convert.main([str(argument) for argument in arguments]) == 0
    capsys.readouterr()
    status = convert.main(["verify", str(converted), str(tmp_path / "fp4"), "--text", str(text)])
    assert status == 0
    assert "21 tensors, 7 identical" in capsys.readouterr().out


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert "--help shows the usage" in refused([], capsys)
    assert "invalid choice: 'frm-hf'" in refused(["frm-hf", "a", "b"], capsys)
    assert "is not a folder" in refused(["from-hf", tmp_path / "none", out], capsys)
    assert "pad_vocabulary=0" in refused(["from-hf", folder, out, "--pad-vocabulary", 0], capsys)
    assert "does not exist" in refused(["to-hf", tmp_path / "none", out], capsys)
    assert "does not exist" in refused(["inspect", tmp_path / "none"], capsys)
    assert "neither a checkpoint of ours" in refused(["inspect", tmp_path], capsys)
    bad = ["to-hf", folder, out, "--kv-cache", "fp8"]
    assert "--kv-cache is for --format nvfp4" in refused(bad, capsys)
    bad = ["to-hf", folder, out, "--format", "nvfp4", "--dtype", "float16"]
    assert "--dtype=float16: NVFP4 folders are bfloat16" in refused(bad, capsys)
    assert not out.exists()


def test_missing_tokenizer_is_said(folder, tmp_path, capsys):
    convert.main(["from-hf", str(folder), str(tmp_path / "ours")])
    bad = ["to-hf", tmp_path / "ours", tmp_path / "out", "--format", "nvfp4"]
    message = refused([*bad, "--activations", "calibrated"], capsys)
    assert "has no tokenizer/: copy the model's tokenizer.json" in message


def test_interrupt_ends_with_130(folder, tmp_path, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert.interop, "from_hugging_face", interrupt)
    assert convert.main(["from-hf", str(folder), str(tmp_path / "ours")]) == 130
    assert "nothing was written" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_conversion_can_be_repeated(folder, tmp_path):
    """kill -9 as soon as something of the output is there; the next run completes."""
    program = Path(convert.__file__)
    command = [sys.executable, str(program), "from-hf", str(folder), str(tmp_path / "ours")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / ".ours.incomplete/checkpoints").exists():
        pass
    process.kill()
    process.wait()
    assert not (tmp_path / "ours").exists() or process.returncode == 0
    if not (tmp_path / "ours").exists():
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert sorted(os.listdir(tmp_path)) == ["hf", "ours"]
