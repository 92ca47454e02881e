"""Tokenizers written into GGUF files as llama.cpp's converter writes them, and read back."""

import inspect
import io
import json
import textwrap

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from fp4zoo import generate
from fp4zoo.data import load_tokenizer_file
from fp4zoo.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from fp4zoo.errors import UserError
from fp4zoo.interop import from_gguf, to_hugging_face

from .checkpoints import CONFIGS, tensors
from .gguf_checkpoints import write_gguf

CORPUS = [inspect.getsource(inspect), inspect.getsource(textwrap)]
TEXTS = [
    *(text[start : start + 400] for text in CORPUS for start in range(0, 8000, 400)),
    "", " ", "  a   b    c\t\td \n\n\n  e\r\n", "Grüße, Jürgen! naïve café e\u0301 ﬁn Å",
    "日本語のテキスト и русский عربى हिन्दी", "🙂👩‍👩‍👧‍👦🇩🇪 \U0001f9d1\U0001f3fd‍🚀",
    "x = 12345678.9e-10  # 1,000", "I'm you're WE'LL camelCaseHTTPServer ALLCAPS",
    "</s><s> <|eos|> <|im_start|>user\n",
    "▁▁ ▁", "\0\x01\x7f\u200b\ufeff", "<tool> x<tool>",
]  # fmt: skip
FRAGMENTS = ["def f(", "    ", "\t", "\n", " ", "'ll", "123", "é", "e\u0301", "🙂", "日本", "</s>",
             "▁", "==", "<tool>", "\r\n", "A", "bc"]  # fmt: skip
ANY_TEXT = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join))


def sentencepiece_fields(processor, *, settings=True, extra=lambda writer: None):
    """As the converter's `_create_vocab_sentencepiece` and `SpecialVocab`."""

    def add(writer):
        tokens, scores, types = [], [], []
        kinds = ((processor.is_unknown, 2), (processor.is_control, 3), (processor.is_unused, 5),
                 (processor.is_byte, 6))  # fmt: skip
        for token in range(processor.vocab_size()):
            tokens.append(processor.id_to_piece(token).encode())
            scores.append(processor.get_score(token))
            types.append(next((kind for is_kind, kind in kinds if is_kind(token)), 1))
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(processor.bos_id())
        writer.add_eos_token_id(processor.eos_id())
        writer.add_unk_token_id(processor.unk_id())
        extra(writer)

    return add


def byte_level_fields(tokenizer, pre, *, bos, eos, padding=0, extra=lambda writer: None):
    """As the converter's `get_vocab_base`."""

    def add(writer):
        added = tokenizer.get_added_tokens_decoder()
        spelled = {token: text for text, token in tokenizer.get_vocab().items()}
        tokens, types = [], []
        for token in range(max(spelled) + 1 + padding):
            if token not in spelled:
                tokens.append(f"[PAD{token}]")
                types.append(5)
            else:
                tokens.append(spelled[token])
                special = token in added and added[token].special
                types.append(3 if special else 4 if token in added else 1)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in merges])
        if bos is not None:
            writer.add_bos_token_id(tokenizer.token_to_id(bos))
        writer.add_eos_token_id(tokenizer.token_to_id(eos))
        extra(writer)

    return add


def convert(folder, fields, vocab_size=1024, **options):
    arrays = tensors({**CONFIGS["qwen2.5"], "vocab_size": vocab_size})
    path = write_gguf(folder / "x.gguf", "qwen2.5", arrays, fields=fields)
    return from_gguf(path, folder / "ours", **options)


def train(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(CORPUS).splitlines()), model_writer=model, minloglevel=2,
        vocab_size=800, model_type="bpe", byte_fallback=True, **options,
    )  # fmt: skip
    return model.getvalue()


def llama_2():
    """Trained as Llama 2's: a space in front, digits on their own, no normalisation."""
    return train(normalization_rule_name="identity", remove_extra_whitespaces=False,
                 split_digits=True, allow_whitespace_only_pieces=True)  # fmt: skip


def no_prefix(writer):
    writer.add_add_space_prefix(False)


SENTENCEPIECE = {
    "llama-2": (llama_2, lambda writer: None),
    "ours": (lambda: train_sentencepiece(CORPUS, 800), no_prefix),
}


@pytest.fixture(scope="module", params=SENTENCEPIECE)
def sentencepiece_pair(request, tmp_path_factory):
    """(the tokenizer as trained, as it comes back)."""
    make, extra = SENTENCEPIECE[request.param]
    content = make()
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    fields = sentencepiece_fields(processor, extra=extra)
    ours = convert(tmp_path_factory.mktemp("sentencepiece"), fields)
    return SentencePieceTokenizer(content, "trained"), load_tokenizer_file(ours / "tokenizer")


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(expression):
    return pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")


# (normaliser, pre-tokenizer, whether words are looked up whole, special tokens in front) of the
# published tokenizer.json of Llama 3, Qwen 2.5, SmolLM2, GPT-2 and Mistral NeMo.
PUBLISHED = {
    "llama-bpe": (None, pre_tokenizers.Sequence([split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), BYTES]), True, False),
    "qwen2": (normalizers.NFC(), pre_tokenizers.Sequence([split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"), BYTES]), False, False),
    "smollm": (None, pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), GPT2]), False, True),
    "gpt-2": (None, GPT2, False, False),
    "tekken": (None, pre_tokenizers.Sequence([split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"), BYTES]), True, True),
}  # fmt: skip


def published(name):
    """A tokenizer trained on the corpus that splits words as a published one."""
    normalizer, words, whole, in_front = PUBLISHED[name]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=whole))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special if in_front else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module", params=PUBLISHED)
def byte_level_pair(request, tmp_path_factory):
    """(the tokenizer as published, as it comes back)."""
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer = published(request.param)
    (folder / "original").mkdir()
    tokenizer.save(str(folder / "original" / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (folder / "original" / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = byte_level_fields(tokenizer, request.param, bos="<|bos|>", eos="<|eos|>", padding=4)
    ours = convert(folder, fields)
    return load_tokenizer_file(folder / "original"), load_tokenizer_file(ours / "tokenizer")


def check_equal(first, second, text):
    ids = first.encode(text)
    assert second.encode(text) == ids
    assert second.decode(ids) == first.decode(ids)


def check_same_tokens(first, second):
    assert (second.vocab_size, second.eos_id) == (first.vocab_size, first.eos_id)
    assert second.special_tokens == first.special_tokens
    assert np.array_equal(second.token_byte_lengths(), first.token_byte_lengths())
    assert np.array_equal(second.fallback_tokens(), first.fallback_tokens())
    assert second.lossless == first.lossless
    for text in TEXTS:
        check_equal(first, second, text)


def test_sentencepiece_on_a_corpus(sentencepiece_pair):
    first, second = sentencepiece_pair
    assert second.bos_id == first.bos_id
    check_same_tokens(first, second)


@hypothesis.given(text=ANY_TEXT)
@hypothesis.settings(max_examples=200, deadline=None)
def test_sentencepiece_on_any_text(sentencepiece_pair, text):
    check_equal(*sentencepiece_pair, text)


def test_byte_level_on_a_corpus(byte_level_pair):
    check_same_tokens(*byte_level_pair)


@hypothesis.given(text=ANY_TEXT)
@hypothesis.settings(max_examples=100, deadline=None)
def test_byte_level_on_any_text(byte_level_pair, text):
    check_equal(*byte_level_pair, text)


def test_a_file_without_an_expression_is_split_as_llama_cpp_does(tmp_path):
    fields = byte_level_fields(published("gpt-2"), "default", bos=None, eos="<|eos|>")
    convert(tmp_path, fields)
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "ours/tokenizer/tokenizer.json"))
    words = found.pre_tokenizer.pre_tokenize_str("ab==12345  x it's, 6")
    assert [word for word, _ in words] == ["ab", "==", "123", "45", "Ġ", "Ġx", "Ġit", "'", "s",
                                           ",", "Ġ", "6"]  # fmt: skip


def chat(writer):
    writer.add_chat_template("{{ messages }}")


@pytest.mark.parametrize(
    ("pre", "extra", "starts"),
    [
        ("llama-bpe", lambda writer: None, True),
        ("llama-bpe", lambda writer: writer.add_add_bos_token(False), False),
        ("qwen2", lambda writer: None, False),
        ("qwen2", lambda writer: writer.add_add_bos_token(True), True),
    ],
)
def test_whether_a_text_has_a_beginning(pre, extra, starts, tmp_path):
    tokenizer = published(pre)
    fields = byte_level_fields(tokenizer, pre, bos="<|bos|>", eos="<|eos|>", extra=extra)
    found = load_tokenizer_file(convert(tmp_path, fields) / "tokenizer")
    assert (found.bos_id is not None) == starts
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "ours/tokenizer/tokenizer.json"))
    bos = tokenizer.token_to_id("<|bos|>")
    assert (file.encode("a").ids[0] == bos) == starts  # what transformers does with the file


def test_sentencepiece_without_a_beginning(tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_proto=llama_2())
    fields = sentencepiece_fields(processor, extra=lambda writer: writer.add_add_bos_token(False))
    found = load_tokenizer_file(convert(tmp_path, fields) / "tokenizer")
    assert found.bos_id is None and found.eos_id == processor.eos_id()


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_generation_and_export_need_nothing_else(kind, tmp_path, capfd):
    if kind == "sentencepiece":
        processor = sentencepiece.SentencePieceProcessor(model_proto=llama_2())
        fields = sentencepiece_fields(processor, extra=chat)
    else:
        fields = byte_level_fields(
            published("llama-bpe"), "llama-bpe", bos="<|bos|>", eos="<|eos|>", extra=chat
        )
    ours = convert(tmp_path, fields)
    assert load_tokenizer_file(ours / "tokenizer").chat_template == "{{ messages }}"
    arguments = [f"checkpoint={ours}", "prompt=def f(", "max_tokens=3", "temperature=0"]
    assert generate.main(arguments) == 0
    assert capfd.readouterr().out.startswith("def f(")
    to_hugging_face(ours, tmp_path / "back")
    for file in (ours / "tokenizer").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_a_folder_takes_the_place_of_the_files_own(tmp_path):
    other = published("gpt-2")
    (tmp_path / "other").mkdir()
    other.save(str(tmp_path / "other" / "tokenizer.json"))
    settings = '{"eos_token": "<|eos|>"}'
    (tmp_path / "other" / "tokenizer_config.json").write_text(settings)

    def unknown(writer):
        writer.add_tokenizer_model("rwkv")

    with pytest.raises(UserError, match="of the kind 'rwkv', which is not known: .*: give --token"):
        convert(tmp_path, unknown)
    ours = convert(tmp_path, unknown, tokenizer=tmp_path / "other")
    assert (ours / "tokenizer/tokenizer_config.json").read_text() == settings
    (tmp_path / "small").mkdir()
    with pytest.raises(UserError, match="the model has 100 tokens, the tokenizer .* 703: give"):
        convert(tmp_path / "small", unknown, vocab_size=100, tokenizer=tmp_path / "other")


def with_field(name, value, kind):
    """A byte-level tokenizer of which one field is something else."""

    def add(writer):
        byte_level_fields(published("gpt-2"), "gpt-2", bos=None, eos="<|eos|>")(writer)
        fields = writer.kv_data[-1]
        fields.pop(name, None)
        if value is not None:
            getattr(writer, f"add_{kind}")(name, value)

    return add


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("pre", "qwen3", "string", "splits words by 'qwen3', which is not known: did you mean"),
        ("tokens", None, "", "has no list of tokens"),
        ("tokens", "all of them", "string", "has no list of tokens"),
        ("tokens", [1, 2, 3], "array", "has no list of tokens"),
        ("token_type", [1, 1], "array", "tokens but 2 types"),
        ("token_type", [9] * 703, "array", "has a token of an unknown type"),
        ("eos_token_id", 5000, "uint32", "has eos_token_id=5000 among 703 tokens"),
        ("eos_token_id", None, "", "names no end-of-document token"),
        ("merges", None, "", "has no list of merges"),
        ("merges", ["a b c"], "array", "has the merge 'a b c', which is not of two tokens"),
        ("merges", ["a qqqq"], "array", "cannot be used"),
        ("add_bos_token", "yes", "string", "has add_bos_token='yes', which is not true or false"),
        ("model", "llama", "string", "does not have a score for each token"),
        ("model", "bert", "string", "of the kind 'bert', which is not known"),
    ],
)
def test_damaged_tokenizers_are_refused(key, value, kind, message, tmp_path):
    fields = with_field(f"tokenizer.ggml.{key}", value, kind)
    with pytest.raises(UserError, match=message) as error:
        convert(tmp_path, fields)
    assert "--tokenizer DIR" in str(error.value) and "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"x.gguf"}
