"""Weights of GGUF files."""

import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.interop import from_gguf, to_hugging_face
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.hub_config import model_config
from fp4zoo.interop.inspection import describe

from .checkpoints import CONFIGS, read_folder, same, tensors
from .gguf_checkpoints import ARCHITECTURES, write_gguf


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_the_hugging_face_checkpoint(name, tmp_path):
    arrays = tensors(CONFIGS[name])
    from_gguf(write_gguf(tmp_path / "x.gguf", name, arrays), tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    same(read_folder(tmp_path / "back"), arrays)
    found, expected = open_checkpoint(tmp_path / "ours").model, model_config(CONFIGS[name], "")
    if name == "llama3.1":
        assert found.rope_scaling.original_max_positions == 8192  # of the published models
        assert found.rope_scaling.factor == 8
    else:
        assert found == expected


def test_half_precision_stays_and_quantised_tensors_become_float32(tmp_path):
    arrays = {n: a.astype(np.float16) for n, a in tensors(CONFIGS["qwen2.5"]).items()}
    wide = {n: a.astype(np.float32) if "up_proj" in n else a for n, a in arrays.items()}
    path = write_gguf(tmp_path / "x.gguf", "qwen2.5", wide, quantise=("ffn_up",))
    from_gguf(path, tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    found = read_folder(tmp_path / "back")
    for name, array in arrays.items():
        if "up_proj" in name:
            blocks = wide[name].reshape(len(array), -1, 32)
            step = np.abs(blocks).max(-1, keepdims=True) / 127
            error = np.abs(found[name].reshape(blocks.shape) - blocks)
            assert found[name].dtype == np.float32 and (error <= 0.6 * step).all()
        else:
            assert found[name].dtype == np.float16 and (found[name] == array).all()


def test_description(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "mixtral", tensors(CONFIGS["mixtral"]))
    text = describe(path)
    assert "a GGUF file" in text and "mixtral, 2 layers of 64" in text and "4 experts of 48" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(architecture="bert"), "architecture 'bert' cannot be converted"),
        (dict(scaling=3.0), "rope_freqs.weight is of no published Llama model"),
    ],
)
def test_what_is_not_known_is_refused(options, message, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "llama3.1", tensors(CONFIGS["llama3.1"]), **options)
    with pytest.raises(UserError, match=message):
        from_gguf(path, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_unknown_tensors_and_other_files_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a GGUF file")
    with pytest.raises(UserError, match="cannot be read as GGUF") as error:
        from_gguf(path, tmp_path / "ours")
    assert "\n" not in str(error.value)
    arrays = tensors(CONFIGS["qwen3"])
    arrays["model.layers.0.self_attn.gate.weight"] = np.ones((2, 32), np.float32)
    write_gguf(path, "qwen3", arrays)
    with pytest.raises(UserError, match=r"has unknown tensors model.layers.0.mlp.gate.weight"):
        from_gguf(path, tmp_path / "ours")
