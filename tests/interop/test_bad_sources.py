"""Damaged and hostile folders: one clear line, and nothing is written."""

import errno
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.interop import from_hugging_face, to_hugging_face
from fp4zoo.interop import hugging_face as module

from .checkpoints import CONFIGS, tensors, write, write_file

LLAMA = CONFIGS["llama2"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "hf", LLAMA, tensors(LLAMA))


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "hf", LLAMA, tensors(LLAMA), files=3)


def refused(folder, message):
    """Converting raises one line, and leaves everything around the folder as it was."""
    parent = folder.parent
    before = sorted(path.name for path in parent.iterdir())
    with pytest.raises(UserError, match=message) as error:
        from_hugging_face(folder, parent / "out")
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in parent.iterdir()) == before


def rewrite(folder, **changes):
    arrays = {**tensors(LLAMA), **changes}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    write_file(folder / "model.safetensors", arrays)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    refused(folder, "is not a whole safetensors file, it is truncated: .* download it again")


def test_file_of_a_few_bytes(folder):
    (folder / "model.safetensors").write_bytes(b"abc")
    refused(folder, "it has 3 bytes, too few")


def test_trailing_bytes(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refused(folder, "it is too long")


@pytest.mark.parametrize("length", [0, 17, 2**40, 2**63])
def test_wrong_header_length(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refused(folder, "its header (claims|is not JSON)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(shape=[64, 63]), r"is \(64, 63\) of F32 but has 16384 bytes"),
        (dict(dtype="F13"), "has dtype F13, not one we read"),
        (dict(data_offsets=[4, 16388]), "gap or overlap"),
        (dict(data_offsets="x"), "describes 'lm_head.weight' wrongly"),
        (dict(shape=[-64, -64]), r"is \(-64, -64\)"),
    ],
)
def test_header_that_lies(folder, change, message):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["lm_head.weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    refused(folder, message)


def test_shape_that_does_not_match(folder):
    rewrite(folder, **{"model.norm.weight": np.ones(16, np.float32)})
    refused(folder, r"'model.norm.weight' is \[16\], its config.json means \[64\]")


def test_missing_tensors_are_named(folder):
    rewrite(folder, **{"model.norm.weight": None, "lm_head.weight": None})
    refused(folder, "lacks tensors lm_head.weight, model.norm.weight: ")


def test_extra_tensors_are_named(folder):
    rewrite(folder, **{"model.layers.2.extra": np.ones(3, np.float32)})
    refused(folder, "has unknown tensors model.layers.2.extra: ")


@pytest.mark.parametrize("value, kind", [(np.nan, "NaN"), (np.inf, "an infinite value")])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_value_that_is_not_finite(folder, value, kind, name):
    array = tensors(LLAMA)[name]
    array[1, 2] = value
    rewrite(folder, **{name: array})
    refused(folder, f"{name}.* holds {kind}")


def test_unknown_architecture(folder):
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mamba"}))
    refused(folder, "model_type='mamba' is not an architecture that can be converted")


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_config_that_is_not_json(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, "config.json (is not a JSON object)")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json cannot be read")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickle_files(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, f"{name}, a pickle file, which can run code.*safetensors release")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no model.safetensors and no model.safetensors.index.json")


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "model-00002-of-00003.safetensors is missing")


def test_missing_index(sharded):
    (sharded / INDEX).unlink()
    refused(sharded, "has model-00001-of-00003.safetensors but no model.safetensors.index.json")


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", "x.bin", 3],
)
def test_index_that_points_elsewhere(sharded, name):
    (sharded.parent / "secret.safetensors").write_bytes(b"")
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    refused(sharded, "file names there must be plain")


def test_index_that_disagrees_with_the_files(sharded):
    edit_index(sharded, lambda weight_map: weight_map.pop("lm_head.weight"))
    refused(sharded, "'lm_head.weight' is in .* says nothing of it")


def test_index_that_promises_more(sharded):
    name = "model-00001-of-00003.safetensors"
    edit_index(sharded, lambda weight_map: weight_map.update({"more.weight": name}))
    refused(sharded, "lacks tensor 'more.weight'")


def test_links_out_of_the_folder(folder):
    path = folder / "model.safetensors"
    path.rename(folder.parent / "elsewhere.safetensors")
    path.symlink_to("../elsewhere.safetensors")
    refused(folder, "is a link to .*elsewhere.safetensors, outside")


def test_links_of_the_hub_cache_are_followed(tmp_path):
    folder = write(tmp_path / "models--x" / "snapshots" / "abc", LLAMA, tensors(LLAMA))
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "1234")
    (folder / "model.safetensors").symlink_to("../../blobs/1234")
    from_hugging_face(folder, tmp_path / "out")
    assert (tmp_path / "out/checkpoints/0/parameters").is_dir()


def test_head_that_contradicts_tied_embeddings(tmp_path):
    values = {**LLAMA, "tie_word_embeddings": True}
    arrays = tensors(values)
    head = arrays["model.embed_tokens.weight"].copy()
    folder = write(tmp_path / "a", values, {**arrays, "lm_head.weight": head})
    from_hugging_face(folder, tmp_path / "same")
    head[0, 0] += 1
    write_file(folder / "model.safetensors", {**arrays, "lm_head.weight": head})
    refused(folder, "lm_head.weight is not the embedding")


def test_other_quantisation(folder):
    values = {**LLAMA, "quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(values))
    refused(folder, "quant_method='gptq' cannot be read")


# Writing


def test_output_that_exists(folder, tmp_path):
    (tmp_path / "out").mkdir()
    refused(folder, "out exists already: remove it")


def test_full_disk_before_it_begins(folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 10})())
    refused(folder, "its disk has 0.0 GB free: make room")


def test_full_disk_in_the_middle(folder, monkeypatch):
    write = module.ParameterWriter.write

    def fill(self, parameter, *arguments, **options):
        if parameter.kind == "down":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, parameter, *arguments, **options)

    monkeypatch.setattr(module.ParameterWriter, "write", fill)
    refused(folder, r"could not be written \(No space left on device\), nothing is left of it")


def test_interrupted_conversion_leaves_nothing(folder, tmp_path, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.ParameterWriter, "finish", interrupt)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        from_hugging_face(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_run_after_a_kill_starts_clean(folder, tmp_path):
    left = tmp_path / ".out.incomplete"
    left.mkdir()
    (left / "half").write_text("written")
    from_hugging_face(folder, tmp_path / "out")
    assert not left.exists() and not (tmp_path / "out/half").exists()


def test_two_at_once_do_not_mix(folder, tmp_path):
    program = (
        "import fcntl, sys, os\n"
        "lock = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / ".out.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="being written by another process"):
            from_hugging_face(folder, tmp_path / "out")
        other.stdin.close()
    from_hugging_face(folder, tmp_path / "out")


def test_damaged_checkpoint_is_not_exported(folder, tmp_path):
    from_hugging_face(folder, tmp_path / "ours")
    step = tmp_path / "ours/checkpoints/0"
    (step / "config/metadata").write_text("{}")
    with pytest.raises(UserError, match="does not say which model it is of"):
        to_hugging_face(tmp_path / "ours", tmp_path / "back")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        to_hugging_face(tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()
