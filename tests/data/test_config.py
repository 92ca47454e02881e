import pytest

from fp4zoo.data import DataConfig, SourceConfig
from fp4zoo.data.arguments import config_from_arguments
from fp4zoo.errors import UserError


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"path": "a"}], r"sources\[0\] \(a\) has neither weight nor epochs: give it one"),
        ([{"path": "a", "weight": 1, "epochs": 1}], r"\(a\) has both weight and epochs"),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "weight": 0}],
            r"sources\[1\] \(b\) has weight=0: give a",
        ),
        (
            [{"path": "a", "weight": -1}],
            r"has weight=-1: give a positive number up to 1,000,000, or remove the source",
        ),
        ([{"path": "a", "weight": float("nan")}], r"has weight=nan: give a positive"),
        ([{"path": "a", "epochs": float("inf")}], r"has epochs=inf: give a positive"),
        ([{"path": "a", "weight": "much"}], r"has weight=much: give a positive"),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "epochs": 1}],
            r"has epochs but others have a weight: use one kind",
        ),
        ([{"wieght": 1}], r"unknown key data\.sources\[0\]\.wieght: did you mean 'weight'\?"),
        (
            [{"path": "a", "weight": 1, "format": "chats"}],
            r"sources\[0\]\.format=chats: .* 'chat'\?",
        ),
        ([{"weight": 1, "path": 3}], r"data\.sources\[0\]\.path=3: expected text"),
        ([{"weight": 1}], r"data\.sources\[0\] has no path: give it one"),
        ([{"path": None, "weight": 1}], r"data\.sources\[0\] has no path"),
        ([{"path": "a", "weight": 1, "field": ""}], r"sources\[0\]\.field is empty: name the key"),
        (
            [{"path": "a", "weight": 1, "format": "prompt_completion", "field": "x"}],
            r"data\.sources\[0\]\.field=x is not used by prompt_completion records",
        ),
        (["a.txt"], r"data\.sources\[0\]=a\.txt: write \{path: \.\.\., weight: \.\.\.\}"),
    ],
)
def test_a_bad_source_is_named(sources, message):
    with pytest.raises(UserError, match=message):
        DataConfig(sources=tuple(sources))


def test_path_and_sources_exclude_each_other():
    with pytest.raises(UserError, match=r"data\.path=x and data\.sources are both given"):
        DataConfig(path="x", sources=(SourceConfig("a", weight=1),))


def test_a_vocabulary_for_a_given_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"tokenizer_vocab_size=512 is for a tokenizer that is tr"):
        DataConfig(tokenizer="bytes", tokenizer_vocab_size=512)


def test_a_source_takes_what_it_does_not_say_from_the_whole():
    sources = (
        {"path": "a", "weight": 1, "format": "prompt_completion"},
        {"path": "b", "weight": 2, "field": "body", "format": "chat"},
        {"path": "c", "weight": 2},
    )
    config = DataConfig(sources=sources, field="said", chat_template="t", packing="best_fit")
    found = [
        (one.path, one.field, one.format, one.chat_template, one.packing, one.sources)
        for one in config.single()
    ]
    assert found == [
        ("a", "text", "prompt_completion", None, "best_fit", None),
        ("b", "body", "chat", "t", "best_fit", None),
        ("c", "said", "text", None, "best_fit", None),
    ]
    assert DataConfig(path="x").single() == [DataConfig(path="x")]


def test_arguments_are_those_of_train():
    config = config_from_arguments(
        [
            "data.path=null",
            "data.sources=[{path: a, weight: 1}, {path: b, weight: 2.5}]",
            "data.validation_fraction=0",
            "data.tokenizer_vocab_size=600",
            "data.shuffle=false",
            "data.field=7",
            "data.tokenizer_type='unigram'",
        ]
    )
    assert config == DataConfig(
        sources=(SourceConfig("a", 1), SourceConfig("b", 2.5)),
        validation_fraction=0.0,
        tokenizer_vocab_size=600,
        shuffle=False,
        field="7",
        tokenizer_type="unigram",
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.paht=x", r"unknown key 'data\.paht': did you mean 'data\.path'\?"),
        ("data=chat", r"data=chat: this command takes no groups: write data\.format=chat"),
        ("path", r"path: write key=value, such as data\.path=FILE"),
        ("data.shuffle=7", r"data\.shuffle=7: expected true or false"),
        ("data.num_workers=true", r"data\.num_workers=true: expected a whole number"),
        ("data.validation_fraction=x", r"fraction=x: expected a number"),
        ("data.sources=x", r"data\.sources=x: expected a list"),
        ("data.sources=[", r"data\.sources=\[: expected a value as YAML writes it"),
    ],
)
def test_a_bad_argument_is_named(argument, message):
    with pytest.raises(UserError, match=message):
        config_from_arguments([argument])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "data.path='' is empty"),
        ({"path": 5}, "data.path=5: expected text or null"),
        ({"path": "\ud800.txt"}, r"data.path=\\ud800.txt is no name that a file can have"),
        ({"validation_fraction": "a"}, "data.validation_fraction=a: expected a number"),
        ({"num_workers": 1.5}, "data.num_workers=1.5: expected a whole number"),
        ({"shuffle": "no"}, "data.shuffle=no: expected true or false"),
        ({"cache_dir": "~nosuchuser/x"}, "data.cache_dir=~nosuchuser/x: there is no such user"),
        ({"sources": []}, r"data.sources=\[\]: expected a list, .* or null for data.path alone"),
        ({"sources": "ab"}, "data.sources=ab: expected a list"),
        ({"field": ""}, "data.field is empty: name the key"),
        ({"format": "prompt_completion", "field": "x"}, "data.field=x is not used by prompt_comp"),
        ({"chat_template": "t"}, "data.chat_template=t is for chats: set data.format=chat"),
        (
            {"tokenizer": "bytes", "tokenizer_type": "unigram"},
            "data.tokenizer_type=unigram is for a tokenizer that is trained",
        ),
        ({"tokenizer": " "}, "data.tokenizer=' ' is empty"),
        ({"path": "~nosuchuser/x"}, "data.path=~nosuchuser/x: there is no such user"),
        ({"path": "x" * 256}, "data.path=x{40}... has a name of more than 255 bytes"),
        ({"num_workers": 5000}, "data.num_workers=5000 must be 0 to 256"),
        ({"tokenizer_vocab_size": 0}, "data.tokenizer_vocab_size=0 must be positive"),
        ({"sources": [{"path": "", "weight": 1}]}, r"data.sources\[0\].path='' is empty"),
        (
            {"sources": [{"path": "a", "weight": True}]},
            "has weight=True: give a positive number up to",
        ),
        (
            {"sources": [{"path": "a", "weight": 10**400}]},
            "has weight=10{39}: give a positive number",
        ),
        (
            {"sources": [{"path": "a", "epochs": 1e300}]},
            "has epochs=1e.300: give a positive number",
        ),
    ],
)
def test_values_that_no_run_can_mean(settings, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**settings)
