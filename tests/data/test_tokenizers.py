import inspect
import io
import json
import os
import textwrap

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4zoo.data import ByteTokenizer, check_vocabulary, load_tokenizer_file
from fp4zoo.data.hugging_face_tokenizer import HuggingFaceTokenizer
from fp4zoo.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from fp4zoo.errors import UserError

AWKWARD = [
    "",
    " ",
    "\n",
    "  leading and trailing  \n\n\n",
    "\tif x:\r\n\t\treturn\r",
    "▁ and ▁▁ and ▅",
    "</s><s><unk><pad><0x0A><|endoftext|>",
    "\0null\x7f",
    "日本語 😀 \u200b\ufeff\u2028\x85\U0010ffff é e\u0301 Ａ ﬁ",
    "x" * 5000,
]


@pytest.fixture(scope="session")
def model():
    return train_sentencepiece([inspect.getsource(inspect), inspect.getsource(textwrap)], 800)


@pytest.fixture(scope="session")
def byte_level_file(tmp_path_factory):
    """A byte-level BPE tokenizer.json as Llama 3's, with the settings file beside it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<start>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([inspect.getsource(textwrap)], trainer)
    tokenizer.add_tokens(["    \N{SNOWMAN}"])
    directory = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": {"content": "<start>"}, "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory / "tokenizer.json"


@pytest.fixture(scope="session")
def piece_file(tmp_path_factory):
    """A BPE tokenizer.json with byte fallback and ▁ for a space, as Mistral's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def all_tokenizers(model, byte_level_file):
    return {
        "bytes": ByteTokenizer(),
        "sentencepiece": SentencePieceTokenizer(model, "trained"),
        "hugging_face": load_tokenizer_file(byte_level_file),
    }


KINDS = ("bytes", "sentencepiece", "hugging_face")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", AWKWARD)
def test_round_trip_and_byte_lengths_are_exact(all_tokenizers, kind, text):
    tokenizer = all_tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_round_trip_of_any_text(all_tokenizers, kind, text):
    tokenizer = all_tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_batch_is_encoded_as_its_texts_are(all_tokenizers, kind, num_threads):
    tokenizer = all_tokenizers[kind]
    encoded = tokenizer.encode_batch(AWKWARD, num_threads=num_threads)
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(text) for text in AWKWARD]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_no_text(all_tokenizers, kind):
    tokenizer = all_tokenizers[kind]
    special = [tokenizer.start_id, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode([special[0], *tokenizer.encode("a b"), *special[1:]]) == "a b"
    assert tokenizer.token_byte_lengths()[special].tolist() == [0, 0, 0]
    assert tokenizer.token_byte_lengths().shape == (tokenizer.vocab_size,)
    assert tokenizer.token_byte_lengths().dtype == np.int32


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_decode(all_tokenizers, kind):
    tokenizer = all_tokenizers[kind]
    beyond = tokenizer.vocab_size
    ids = [*tokenizer.encode("a"), beyond, *tokenizer.encode("b"), beyond + 9]
    assert tokenizer.decode(ids) == "a\ufffdb\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(all_tokenizers, kind, tmp_path):
    tokenizer = all_tokenizers[kind]
    file = tokenizer.save(tmp_path)
    for path in (file, tmp_path, str(tmp_path)):
        loaded = load_tokenizer_file(path)
        assert loaded.encode("def f(x):\n") == tokenizer.encode("def f(x):\n")
        for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "fingerprint"):
            assert getattr(loaded, name) == getattr(tokenizer, name)


def test_trained_model_is_lossless_and_packs_text(model):
    tokenizer = SentencePieceTokenizer(model, "trained")
    text = inspect.getsource(textwrap)
    assert tokenizer.lossless
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (800, 1, 2)
    assert len(text) / len(tokenizer.encode(text)) > 2.2


def test_unigram_models_are_lossless_too():
    source = inspect.getsource(textwrap)
    tokenizer = SentencePieceTokenizer(train_sentencepiece([source], 600, "unigram"), "unigram")
    assert tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode(source)) == source


def test_training_is_deterministic(model):
    texts = [inspect.getsource(inspect), inspect.getsource(textwrap)]
    assert train_sentencepiece(texts, 800) == model


def test_little_text_gives_a_smaller_vocabulary():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(["hello world"], 4096), "little")
    assert tokenizer.vocab_size < 300
    assert tokenizer.decode(tokenizer.encode("bye 語\n")) == "bye 語\n"


def test_thousands_of_characters_leave_room_for_pieces():
    text = "".join(chr(0x4E00 + index % 5000) for index in range(20_000)) + "hello world " * 2000
    tokenizer = SentencePieceTokenizer(train_sentencepiece([text], 600), "han")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("hello world ")) <= 4


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["text"], 511, r"511 is too small.*at least 512\): raise data\.tok"),
        ([], 4096, r"no text to train"),
        ([" \n"], 4096, r"no text to train"),
    ],
)
def test_untrainable(texts, vocab_size, message):
    with pytest.raises(UserError, match=message):
        train_sentencepiece(texts, vocab_size)


def test_a_long_text_is_encoded_in_parts_at_line_ends(model, monkeypatch):
    tokenizer = SentencePieceTokenizer(model, "trained")
    text = inspect.getsource(textwrap) + "x" * 5000 + "▁\n"
    whole = tokenizer.encode(text)
    monkeypatch.setattr("fp4zoo.data.sentencepiece_tokenizer._PART_CHARACTERS", 1000)
    parts = tokenizer.encode(text)
    assert tokenizer.decode(parts) == text
    assert tokenizer.encode_batch([text])[0].tolist() == parts
    assert len(whole) <= len(parts) < 1.05 * len(whole)


def test_published_sentencepiece_models_keep_their_prefix():
    """As Llama 2's: a space is put before the text, which the byte lengths count."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([inspect.getsource(textwrap)]),
        model_writer=file,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=1 << 24,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(file.getvalue(), "prefixed")
    assert not tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode("a  b\n")) == "a  b\n"
    assert tokenizer.token_byte_lengths()[tokenizer.encode("a  b\n")].sum() == 6
    assert tokenizer.pad_id == tokenizer.eos_id == 2


def test_hugging_face_special_tokens_come_from_the_settings(byte_level_file):
    tokenizer = load_tokenizer_file(byte_level_file)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)
    ids = tokenizer.encode("x    \N{SNOWMAN}")
    assert ids[-1] == tokenizer.vocab_size - 1  # the added token, which is text
    assert tokenizer.token_byte_lengths()[ids[-1]] == 7


def test_lossless_is_found_out(byte_level_file, tmp_path):
    assert load_tokenizer_file(byte_level_file).lossless
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_level_file))
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert not load_tokenizer_file(tmp_path / "tokenizer.json").lossless


def test_hugging_face_with_byte_fallback(piece_file):
    tokenizer = load_tokenizer_file(piece_file)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    text = "a a\n語a"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_byte_lengths()[ids].tolist() == [1, 2, 1, 1, 1, 1, 1]


def test_hugging_face_without_an_end_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    with pytest.raises(UserError, match=r"names no end-of-document token: put a tokenizer_config"):
        load_tokenizer_file(path)


def test_hugging_face_of_unknown_bytes_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}, unk_token="</s>"))
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    with pytest.raises(UserError, match=r"its bytes cannot be counted"):
        HuggingFaceTokenizer(path.read_bytes(), str(path))


def test_encoding_leaves_the_environment(byte_level_file, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "kept")
    load_tokenizer_file(byte_level_file).encode_batch(["a"], num_threads=2)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "kept"


def test_vocabulary_check_gives_both_numbers_and_the_remedy():
    check_vocabulary(ByteTokenizer(), 259)
    with pytest.raises(
        UserError, match=r"bytes has 259 tokens.*only 256: set model.vocab_size=259"
    ):
        check_vocabulary(ByteTokenizer(), 256)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.model", None, r"missing\.model does not exist: name a \.model"),
        ("broken.model", b"nonsense", r"broken\.model is not a SentencePiece model"),
        ("empty.model", b"", r"empty\.model is not a SentencePiece model"),
        ("tokenizer.json", b"{}", r"tokenizer\.json is not a tokenizer\.json"),
        ("broken.json", b"\xff", r"broken\.json is not a tokenizer\.json"),
    ],
)
def test_bad_tokenizer_files_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer_file(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer in .*tokenizer\.json or tokenizer\.model"):
        load_tokenizer_file(tmp_path)


@pytest.mark.parametrize(
    ("change", "beside", "message"),
    [
        ({"zzz": 2**32 - 1}, {}, r"has ids up to 4,294,967,295 \(0 to 16,777,215 can be used\)"),
        ({}, {"bos_token": "<nope>"}, r"no token '<nope>', which the settings beside it name as b"),
        ({}, {"eos_token": "<nope>"}, r"name as eos_token: correct eos_token in them"),
        ({}, {"bos_token": "\ud800"}, r"has no token '.ud800', which the settings"),
    ],
)
def test_odd_hugging_face_files_are_named(byte_level_file, tmp_path, change, beside, message):
    specification = json.loads(byte_level_file.read_text())
    specification["model"]["vocab"] |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(specification))
    if beside:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    with pytest.raises(UserError, match=message):
        load_tokenizer_file(tmp_path)


def test_a_vocabulary_without_tokens_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has ids up to -1"):
        load_tokenizer_file(tmp_path)


def test_other_special_tokens_are_another_tokenizer(byte_level_file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(byte_level_file.read_bytes())
    names = [
        token["content"]
        for token in json.loads(byte_level_file.read_text())["added_tokens"]
        if token["special"]
    ]
    found = set()
    for bos, eos in ((names[0], names[1]), (names[1], names[0]), (None, names[0])):
        beside = {"bos_token": bos, "eos_token": eos}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
        found.add(load_tokenizer_file(tmp_path).fingerprint)
    assert len(found) == 3


def test_sentencepiece_pieces_that_are_no_text_are_refused(model):
    tokenizer = SentencePieceTokenizer(model, "x")
    piece = max(map(tokenizer._processor.id_to_piece, range(300, tokenizer.vocab_size)), key=len)
    content = piece.encode()
    damaged = model.replace(content, b"\xff" * len(content), 1)
    with pytest.raises(UserError, match=r"x is not a SentencePiece model \(.*utf-8"):
        SentencePieceTokenizer(damaged, "x")
