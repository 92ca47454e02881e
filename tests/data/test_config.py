import pytest

from fp4zoo.data import DataConfig, SourceConfig
from fp4zoo.data.arguments import config_from_arguments
from fp4zoo.errors import UserError


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"path": "a"}], r"sources\[0\] \(a\) has neither weight nor epochs: give it one"),
        ([{"weight": 1, "epochs": 1}], r"\(the standard library\) has both weight and epochs"),
        ([{"weight": 1}, {"path": "b", "weight": 0}], r"sources\[1\] \(b\) has weight=0: give a"),
        (
            [{"weight": -1}],
            r"has weight=-1: give a positive number up to 1,000,000, or remove the source",
        ),
        ([{"weight": float("nan")}], r"has weight=nan: give a positive"),
        ([{"epochs": float("inf")}], r"has epochs=inf: give a positive"),
        ([{"weight": "much"}], r"has weight=much: give a positive"),
        ([{"weight": 1}, {"epochs": 1}], r"has epochs but others have a weight: use one kind"),
        ([{"wieght": 1}], r"unknown key data\.sources\[0\]\.wieght: did you mean 'weight'\?"),
        ([{"weight": 1, "format": "chats"}], r"sources\[0\]\.format=chats: .* 'chat'\?"),
        ([{"weight": 1, "path": 3}], r"data\.sources\[0\]\.path=3: expected text"),
        (["a.txt"], r"data\.sources\[0\]=a\.txt: write \{path: \.\.\., weight: \.\.\.\}"),
    ],
)
def test_a_bad_source_is_named(sources, message):
    with pytest.raises(UserError, match=message):
        DataConfig(sources=tuple(sources))


def test_path_and_sources_exclude_each_other():
    with pytest.raises(UserError, match=r"data\.path=x and data\.sources are both given"):
        DataConfig(path="x", sources=(SourceConfig(weight=1),))


def test_a_vocabulary_for_a_given_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"tokenizer_vocab_size=512 is for a tokenizer that is tr"):
        DataConfig(tokenizer="bytes", tokenizer_vocab_size=512)


def test_a_source_takes_what_it_does_not_say_from_the_whole():
    sources = ({"path": "a", "weight": 1}, {"weight": 2, "field": "body", "format": "chat"})
    config = DataConfig(sources=sources, format="prompt_completion", packing="best_fit")
    first, second = config.single()
    assert (first.path, first.field, first.format) == ("a", "text", "prompt_completion")
    assert (second.path, second.field, second.format) == (None, "body", "chat")
    assert first.packing == second.packing == "best_fit" and not first.sources
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
        ]
    )
    assert config == DataConfig(
        sources=(SourceConfig("a", 1), SourceConfig("b", 2.5)),
        validation_fraction=0.0,
        tokenizer_vocab_size=600,
        shuffle=False,
        field="7",
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.paht=x", r"unknown key 'data\.paht': did you mean 'data\.path'\?"),
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
        ({"tokenizer": " "}, "data.tokenizer=' ' is empty"),
        ({"path": "~nosuchuser/x"}, "data.path=~nosuchuser/x: there is no such user"),
        ({"path": "x" * 256}, "data.path=x{40}... has a name of more than 255 bytes"),
        ({"num_workers": 5000}, "data.num_workers=5000 must be 0 to 256"),
        ({"tokenizer_vocab_size": 0}, "data.tokenizer_vocab_size=0 must be positive"),
        ({"sources": [{"path": "", "weight": 1}]}, r"data.sources\[0\].path='' is empty"),
        ({"sources": [{"weight": True}]}, "has weight=True: give a positive number up to"),
        ({"sources": [{"weight": 10**400}]}, "has weight=10{39}: give a positive number"),
        ({"sources": [{"epochs": 1e300}]}, "has epochs=1e.300: give a positive number"),
    ],
)
def test_values_that_no_run_can_mean(settings, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**settings)
