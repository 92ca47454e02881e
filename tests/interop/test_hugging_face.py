import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from fp4zoo import models
from fp4zoo.errors import UserError
from fp4zoo.interop import from_hugging_face, load_hugging_face, to_hugging_face
from fp4zoo.interop.checkpoint import open_checkpoint
from fp4zoo.interop.hub_config import hub_config, model_config
from fp4zoo.interop.layout import LayerSegment, Layout
from fp4zoo.interop.loading import load_model
from fp4zoo.models import PrecisionRules
from fp4zoo.training.state import path_name, split_model

from .checkpoints import CONFIGS, TOKENS, read_folder, same, shapes, tensors, write

EXPECTED = np.load(Path(__file__).parent / "transformers_logits.npz")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def test_every_architecture_has_a_checkpoint():
    found = {model_config(values, "config.json").architecture for values in CONFIGS.values()}
    assert found == set(models.ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"llama3.1-older"}))  # the same config
def test_logits_are_those_of_transformers(name, tmp_path):
    model = load_hugging_face(write(tmp_path / "hf", CONFIGS[name], tensors(CONFIGS[name])))
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS, jnp.int32))
    np.testing.assert_allclose(logits, EXPECTED[name], rtol=0, atol=1e-4)
    assert EXPECTED[name].std() > 1  # so that 1e-4 means something


@pytest.mark.parametrize("name", CONFIGS)
def test_stored_logits_are_what_transformers_computes_now(name, tmp_path):
    pytest.importorskip("transformers")
    from .make_transformers_logits import logits

    folder = write(tmp_path / "hf", CONFIGS[name], tensors(CONFIGS[name]))
    np.testing.assert_allclose(logits(folder, TOKENS), EXPECTED[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_our_export_of_a_model_of_ours(name, tmp_path):
    """With a config.json of our making, which both its versions' keys go into."""
    pytest.importorskip("transformers")
    from .make_transformers_logits import logits

    folder = write(tmp_path / "hf", CONFIGS[name], tensors(CONFIGS[name]))
    values = hub_config(model_config(CONFIGS[name], "config.json"), "float32")
    (folder / "config.json").write_text(json.dumps(values))
    np.testing.assert_allclose(logits(folder, TOKENS), EXPECTED[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_is_exact(name, dtype, tmp_path):
    values, arrays = CONFIGS[name], tensors(CONFIGS[name], dtype)
    source = write(tmp_path / "hf", values, arrays, files=3)
    from_hugging_face(source, tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    same(read_folder(tmp_path / "back"), arrays)
    assert json.loads((tmp_path / "back/config.json").read_text()) == values


def test_mixed_dtypes_come_back_as_they_were(tmp_path):
    values, arrays = CONFIGS["mixtral"], tensors(CONFIGS["mixtral"])
    for number, name in enumerate(sorted(arrays)):
        arrays[name] = arrays[name].astype(DTYPES[number % 3])
    from_hugging_face(write(tmp_path / "hf", values, arrays), tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    same(read_folder(tmp_path / "back"), arrays)


def test_shards_are_split_by_size_and_indexed(tmp_path):
    values, arrays = CONFIGS["mixtral"], tensors(CONFIGS["mixtral"])
    from_hugging_face(write(tmp_path / "hf", values, arrays), tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back", shard_bytes=60_000)
    same(read_folder(tmp_path / "back"), arrays)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 66_000 for file in files)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert index["weight_map"].keys() == arrays.keys()
    from_hugging_face(tmp_path / "back", tmp_path / "again")  # checks that index and files agree


@pytest.mark.parametrize("name", ["llama2", "smollm2"])
def test_padded_vocabulary_is_stripped_again(name, tmp_path):
    values = {**CONFIGS[name], "vocab_size": 61}
    arrays = tensors(values, ml_dtypes.bfloat16)
    from_hugging_face(write(tmp_path / "hf", values, arrays), tmp_path / "ours", pad_vocabulary=16)
    source = open_checkpoint(tmp_path / "ours")
    assert (source.model.vocab_size, source.vocab_size) == (64, 61)
    padding = source.reader.read(source.layout.parameters[0], (), (slice(61, None),))
    assert padding.shape == (3, 64) and not padding.any()
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    same(read_folder(tmp_path / "back"), arrays)


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_is_the_models_own(name):
    config = dataclasses.replace(model_config(CONFIGS[name], "config.json"), num_layers=9)
    rules = PrecisionRules(first_blocks=2, last_blocks=3)
    create = lambda: models.create(config, recipe="nvfp4", rules=rules, rngs=nnx.Rngs(0))  # noqa: E731
    _, parameters = split_model(nnx.eval_shape(create))
    segments = (LayerSegment("prefix", 0, 2), LayerSegment("middle", 2, 6),
                LayerSegment("suffix", 6, 9))  # fmt: skip
    layout = Layout(config, segments)
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    assert {p.name: p.shape for p in layout.parameters} == {
        path_name(path): leaf.shape for path, leaf in leaves
    }
    assert layout.tensor_shapes() == shapes({**CONFIGS[name], "num_hidden_layers": 9})


def test_checkpoint_of_training_with_segments_is_exported(tmp_path):
    """As training saves it: Orbax's own layout, BF16 prefix and suffix, float32."""
    values = {**CONFIGS["qwen3-moe"], "num_hidden_layers": 5}
    arrays = tensors(values)
    folder = write(tmp_path / "hf", values, arrays)
    rules = PrecisionRules(first_blocks=1, last_blocks=2)
    model = load_hugging_face(folder, recipe="nvfp4", rules=rules)
    assert [segment.name for segment in model.segments] == ["prefix", "middle", "suffix"]
    save_as_training_does(model, tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    same(read_folder(tmp_path / "back"), arrays)


def save_as_training_does(model, run: Path, **settings) -> None:
    step = run / "checkpoints" / "7"
    step.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(step / "parameters", split_model(model)[1])
    (step / "config").mkdir()
    settings["model"] = dataclasses.asdict(model.config)
    (step / "config" / "metadata").write_text(json.dumps(settings))


def test_orbax_restores_a_converted_checkpoint(tmp_path):
    values, arrays = CONFIGS["mixtral"], tensors(CONFIGS["mixtral"], ml_dtypes.bfloat16)
    folder = write(tmp_path / "hf", values, arrays)
    from_hugging_face(folder, tmp_path / "ours")
    rules = PrecisionRules(first_blocks=0, last_blocks=1)  # other segments than it is stored in
    restored = load_model(open_checkpoint(tmp_path / "ours"), recipe="nvfp4", rules=rules)
    direct = load_hugging_face(folder, recipe="nvfp4", rules=rules)
    assert [segment.name for segment in restored.segments] == ["middle", "suffix"]
    expected = nnx.to_pure_dict(nnx.state(direct))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(restored)), expected)


def test_companions_travel_both_ways(tmp_path):
    names = ("tokenizer__json", "tokenizer_config__json", "generation_config__json", "notes__txt")
    extra = {**dict.fromkeys(names, "{}"), "LICENSE": "free"}
    arrays = tensors(CONFIGS["llama2"])
    source = write(tmp_path / "hf", CONFIGS["llama2"], arrays, **extra)
    from_hugging_face(source, tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {path.name for path in source.iterdir()} - {"notes.txt"}
    assert (tmp_path / "back/LICENSE").read_text() == "free"


def test_export_in_another_dtype_rounds_once_and_says_so(tmp_path):
    arrays = tensors(CONFIGS["llama2"])
    values = CONFIGS["llama2"]
    from_hugging_face(write(tmp_path / "hf", values, arrays), tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back", dtype="bfloat16")
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    same(read_folder(tmp_path / "back"), rounded)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_overflow_of_float16_is_refused(tmp_path):
    arrays = tensors(CONFIGS["llama2"])
    arrays["lm_head.weight"][3, 4] = 70_000
    from_hugging_face(write(tmp_path / "hf", CONFIGS["llama2"], arrays), tmp_path / "ours")
    with pytest.raises(UserError, match="'lm_head.weight' has a value of 70000, too large"):
        to_hugging_face(tmp_path / "ours", tmp_path / "back", dtype="float16")
    assert not (tmp_path / "back").exists()
