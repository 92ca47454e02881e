"""Input made to break: one line, exit status 2, nothing written but the output, no half of it."""

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fp4zoo import convert, generate
from fp4zoo.errors import UserError
from fp4zoo.interop import from_gguf, from_hugging_face, to_hugging_face, to_nvfp4
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.inspection import describe

from .checkpoints import CONFIGS, tensors, write
from .gguf_checkpoints import gguf, write_gguf

QWEN = CONFIGS["qwen2.5"]


@pytest.fixture(scope="module")
def arrays():
    return tensors(QWEN)


@pytest.fixture(scope="module")
def gguf_bytes(arrays, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("g") / "x.gguf", "qwen2.5", arrays).read_bytes()


@pytest.fixture
def folder(arrays, tmp_path):
    return write(tmp_path / "hf", QWEN, arrays)


@pytest.fixture
def ours(folder, tmp_path):
    return from_hugging_face(folder, tmp_path / "ours")


def refused(function, source, output, message=""):
    before = sorted(os.listdir(output.parent))
    with pytest.raises(UserError, match=message) as error:
        function(source, output)
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(output.parent)) == before


def test_gguf_cut_anywhere(gguf_bytes, tmp_path):
    choose = random.Random(0)
    path = tmp_path / "x.gguf"
    for cut in (0, 4, 8, 24, *(choose.randrange(len(gguf_bytes)) for _ in range(40))):
        path.write_bytes(gguf_bytes[:cut])
        refused(from_gguf, path, tmp_path / "out", "cannot be read as GGUF")


def test_gguf_with_bytes_changed_anywhere_in_its_header(gguf_bytes, tmp_path):
    choose = random.Random(1)
    path = tmp_path / "x.gguf"
    for _ in range(150):
        content = bytearray(gguf_bytes)
        content[choose.randrange(1500)] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        try:
            describe(path)
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("count", [2**20, 2**40, 2**64 - 1])
@pytest.mark.parametrize("place", [8, 16])  # numbers of tensors and of fields
def test_gguf_that_promises_more_than_it_has(count, place, gguf_bytes, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes[:place] + struct.pack("<Q", count) + gguf_bytes[place + 8 :])
    refused(from_gguf, path, tmp_path / "out", "cannot be read as GGUF")


@pytest.mark.parametrize("count", [0, 2**31, 2**62])
def test_gguf_array_of_an_absurd_length(count, arrays, tmp_path):
    path = tmp_path / "x.gguf"
    fields = ["a", "b"]
    write_gguf(path, "qwen2.5", arrays, fields=lambda writer: writer.add_array("letters", fields))
    content = path.read_bytes()
    place = content.index(b"letters") + len("letters") + 8
    path.write_bytes(content[:place] + struct.pack("<Q", count) + content[place + 8 :])
    refused(from_gguf, path, tmp_path / "out", "cannot be read as GGUF")


@pytest.mark.parametrize("value", ["x", 0, -5, True, float("nan"), [1, 2]])
@pytest.mark.parametrize(
    "key", ["block_count", "attention.head_count", "embedding_length", "rope.freq_base"]
)
def test_gguf_fields_of_another_kind(key, value, arrays, tmp_path):
    def fields(writer):
        kind = gguf.GGUFValueType.INT64 if type(value) is int else None
        writer.kv_data[-1].pop(f"qwen2.{key}")
        writer.add_key_value(f"qwen2.{key}", value, kind or gguf.GGUFValueType.get_type(value))

    path = write_gguf(tmp_path / "x.gguf", "qwen2.5", arrays, fields=fields)
    refused(from_gguf, path, tmp_path / "out", f"qwen2: {key}=")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers, 0 experts, but only .* tensors"),
        ({"num_hidden_layers": 2**70}, "should be a positive whole number"),
        ({"num_attention_heads": 0}, "should be a positive whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' should be a positive number"),
        ({"rms_norm_eps": float("nan")}, "should be a positive number"),
        ({"rope_theta": [1]}, r"rope_theta=\[1\] should be a positive number"),
        ({"layer_types": 5}, "layer_types=5 should be a list of names"),
        ({"quantization_config": ["x"]}, "quantization_config=.* should be an object"),
    ],
)
def test_config_values_of_another_kind(changes, message, folder, tmp_path):
    values = {**QWEN, **changes}
    if "rope_theta" in changes:
        values.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(values))
    refused(from_hugging_face, folder, tmp_path / "out", message)


def test_header_that_names_a_tensor_twice(folder, tmp_path):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)[:-1] + "," + json.dumps({name: header[name]})[1:]
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + length :])
    refused(from_hugging_face, folder, tmp_path / "out", f"names '{name}' twice")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_json_that_is_nested_without_end(name, folder, tmp_path):
    text = b"[" * 100_000
    start = struct.pack("<Q", len(text)) if name != "config.json" else b""
    (folder / name).write_bytes(start + text)
    refused(from_hugging_face, folder, tmp_path / "out", "JSON")


@pytest.mark.parametrize("name", ["\0.safetensors", "n" * 300 + ".safetensors"])
def test_index_of_impossible_names(name, folder, tmp_path):
    index = json.dumps({"weight_map": {"a": name}})
    (folder / "model.safetensors.index.json").write_text(index)
    refused(from_hugging_face, folder, tmp_path / "out", "is missing or cannot be opened")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", "link to itself"),
        ("config.json", "folder"),
        ("model.safetensors", "link to itself"),
        ("model.safetensors", "folder"),
        ("model.safetensors", "pipe"),
    ],
)
def test_files_that_are_none(name, kind, folder, tmp_path):
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(name)
    refused(from_hugging_face, folder, tmp_path / "out", name)


@pytest.mark.parametrize("place", [".", "sub", "deep/er"])
def test_output_in_the_source(place, folder, ours):
    for function, source in ((from_hugging_face, folder), (to_hugging_face, ours)):
        (source / place).mkdir(parents=True, exist_ok=True)
        refused(function, source, source / place / "out", "lies inside its source")


@pytest.mark.parametrize("output", ["a\0b", "", "~nobody-of-that-name/x", "n" * 300, "/proc/x"])
def test_impossible_outputs(output, folder, capsys):
    assert convert.main(["from-hf", str(folder), output]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_may_not_grow(folder, ours, tmp_path):
    """As on a full disk, in the middle of a file and in a thread."""
    (tmp_path / "w").mkdir()
    for command in (["from-hf", folder], ["to-hf", ours, "--format", "nvfp4"]):
        limited = ["sh", "-c", 'ulimit -f 20 && exec "$@"', "sh"]  # about 20 kB
        program = [sys.executable, "-m", "fp4zoo.convert", *map(str, command), tmp_path / "w/out"]
        done = subprocess.run([*limited, *program], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "could not be written (File too large)" in done.stderr
        assert not os.listdir(tmp_path / "w")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "vocab_size"), "x"),
        (("model", "extra"), 1),
        (("model", "moe"), {"a": 1}),
        (("conversion",), "x"),
        (("conversion", "vocab_size"), -1),
        (("conversion", "vocab_size"), 10**9),
        (("conversion", "dtype"), ["float32"]),
        (("conversion", "other_dtypes"), None),
        (("conversion", "config"), [1]),
        (("precision",), {"recipe": "nvfp4"}),
    ],
)
def test_damaged_configuration_of_our_own(path, value, ours, tmp_path):
    file = ours / "checkpoints/0/config/metadata"
    settings = json.loads(file.read_text())
    inner = settings
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(settings))
    for function in (to_hugging_face, to_nvfp4):
        refused(function, ours, tmp_path / "out", "configuration of the checkpoint is damaged")


def test_parameter_that_is_cut_off(ours, tmp_path):
    chunk = next(iter(sorted((ours / "checkpoints/0/parameters").glob("*/c.*"))))
    chunk.write_bytes(chunk.read_bytes()[:5])
    refused(
        to_hugging_face, ours, tmp_path / "out", f"parameter {chunk.parent.name} cannot be read"
    )


def test_a_path_through_the_parent_folder(ours, monkeypatch):
    (ours.parent / "beside").mkdir()
    monkeypatch.chdir(ours.parent / "beside")
    assert open_checkpoint(Path("../ours")).folder == ours


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("temperature=nan", "temperature=nan must be 0 or more, and finite"),
        ("temperature=inf", "temperature=inf must be 0 or more, and finite"),
        ("top_p=nan", "top_p=nan must be above 0"),
        ("prompt=\udcff", "prompt is not valid UTF-8"),
        ("checkpoint=~nobody-of-that-name/x", "checkpoint=~nobody-of-that-name/x"),
    ],
)
def test_impossible_requests_for_text(argument, message, capsys):
    assert generate.main(["checkpoint=x", argument]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_output_that_cannot_be_printed(folder):
    program = [sys.executable, "-m", "fp4zoo.convert", "inspect", str(folder)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr
