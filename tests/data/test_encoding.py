"""Where documents begin and end, and which tokens are trained on."""

import dataclasses
import json

import numpy as np
import pytest

from fp4zoo.data import ByteTokenizer, DataConfig, load_corpus, make_train_iterator
from fp4zoo.data.documents import BadRecord, Document
from fp4zoo.data.encoding import DocumentEncoder, start_id
from fp4zoo.errors import UserError

BOS, EOS = 256, 257


def encode(text, **options):
    (encoded,) = DocumentEncoder(DataConfig(**options), ByteTokenizer()).encode(
        [Document("x:1", text)]
    )
    return encoded


@pytest.mark.parametrize("start", ["auto", "bos", "eos"])
@pytest.mark.parametrize(("end", "expected"), [("eos", [97, 98, EOS]), ("none", [97, 98])])
def test_what_is_predicted(start, end, expected):
    encoded = encode("ab", document_start=start, document_end=end)
    assert encoded.ids.tolist() == expected
    assert encoded.first is None and encoded.mask is None


@pytest.mark.parametrize(("end", "expected"), [("eos", [98, EOS]), ("none", [98])])
def test_without_a_start_the_first_token_is_only_an_input(end, expected):
    encoded = encode("ab", document_start="none", document_end=end)
    assert encoded.first == 97 and encoded.ids.tolist() == expected
    one = encode("a", document_start="none", document_end=end)
    assert isinstance(one, BadRecord) == (end == "none")


def test_start_ids():
    tokenizer = ByteTokenizer()
    assert start_id(DataConfig(), tokenizer) == start_id(
        DataConfig(document_start="bos"), tokenizer
    )
    assert start_id(DataConfig(document_start="eos"), tokenizer) == EOS
    tokenizer.bos_id = None
    assert start_id(DataConfig(), tokenizer) == EOS
    with pytest.raises(UserError, match=r"bytes has no beginning-of-document.*document_start=eos"):
        start_id(DataConfig(document_start="bos"), tokenizer)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize(
    ("start", "end", "inputs"),
    [
        ("bos", "eos", [[BOS, 97, 98], [BOS, 99]]),
        ("eos", "none", [[EOS, 97], [EOS]]),
        ("none", "eos", [[97, 98], [99]]),
    ],
)
def test_policies_reach_the_batches(tmp_path, cache_home, packing, start, end, inputs):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "c"}\n')
    config = DataConfig(
        path=str(path),
        tokenizer="bytes",
        validation_fraction=0,
        packing=packing,
        document_start=start,
        document_end=end,
        shuffle=False,
    )
    iterator = make_train_iterator(config, ByteTokenizer(), batch_size=1, sequence_length=6, seed=0)
    batch = next(iterator)
    got = [
        batch["tokens"][batch["segment_ids"] == segment].tolist()
        for segment in range(1, batch["segment_ids"].max() + 1)
    ]
    assert sorted(got) == sorted(inputs)


def test_a_document_without_a_token_to_predict_is_dropped_and_counted(tmp_path, cache_home):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "c"}\n')
    config = DataConfig(
        path=str(path),
        validation_fraction=0,
        document_start="none",
        document_end="none",
        on_bad_record="skip",
    )
    read = load_corpus(config, ByteTokenizer()).manifest["read"]
    assert read["read"] == 2 and read["kept"] == 1 and read["dropped"] == {"no tokens": 1}
    with pytest.raises(UserError, match=r"x\.jsonl:2: it has no token to predict.*=skip"):
        load_corpus(dataclasses.replace(config, on_bad_record="error"), ByteTokenizer())


@pytest.fixture
def pairs(tmp_path, cache_home):
    """Twenty records of a prompt and a completion."""
    path = tmp_path / "pairs.jsonl"
    records = [{"prompt": f"q{number}?", "completion": f"A{number}."} for number in range(20)]
    path.write_text("\n".join(map(json.dumps, records)))
    return DataConfig(
        path=str(path), format="prompt_completion", validation_fraction=0.1, packing="best_fit"
    )


def test_only_completions_and_ends_are_trained_on(pairs):
    iterator = make_train_iterator(pairs, ByteTokenizer(), batch_size=2, sequence_length=16, seed=0)
    assert iterator.corpus.manifest["train"]["trained_tokens"] < len(iterator.corpus.train.tokens)
    seen = set()
    for _ in range(20):
        batch = next(iterator)
        for row, ids in enumerate(batch["segment_ids"]):
            for segment in range(1, ids.max() + 1):
                here = ids == segment
                targets, mask = (batch[key][row][here] for key in ("targets", "loss_mask"))
                trained = targets[mask > 0].tolist()
                assert trained[-1] == EOS and bytes(trained[:-1]).startswith(b"A")
                rest = bytes(targets[mask == 0].tolist())
                assert rest == b"q" + bytes(trained[1:-2]) + b"?"
                seen.add(rest)
    assert len(seen) > 12


def test_bad_pairs_are_named_or_counted(tmp_path, cache_home):
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n{"prompt": "a", "completion": ""}\n'
    )
    config = DataConfig(path=str(path), format="prompt_completion", validation_fraction=0)
    with pytest.raises(UserError, match=r"x\.jsonl:2: no text under 'completion' \(it has 'pr"):
        load_corpus(config, ByteTokenizer())
    config = dataclasses.replace(config, on_bad_record="skip")
    manifest = load_corpus(config, ByteTokenizer()).manifest
    assert manifest["read"]["dropped"] == {"no text field": 1, "no completion": 1}


def test_pairs_and_texts_in_one_mixture(pairs, text_directory):
    config = dataclasses.replace(
        pairs,
        path=None,
        format="text",
        sources=(
            {"path": pairs.path, "weight": 1, "format": "prompt_completion"},
            {"path": str(text_directory), "weight": 1},
        ),
    )
    corpus = load_corpus(config, ByteTokenizer())
    mask = np.concatenate([corpus.train.mask[:60], corpus.train.mask[-1000:]])
    assert 0 < mask[:60].mean() < 1 and mask[60:].all()
    assert len(corpus.train.mask) == len(corpus.train.tokens)
