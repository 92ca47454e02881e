import pytest

from fp4zoo.data.documents import Document, ReadReport, all_kept, split_threshold
from fp4zoo.errors import UserError


class Texts:
    """A source of the given texts."""

    description = "the texts"
    total_bytes = 0

    def __init__(self, texts):
        self.texts = list(texts)

    def fingerprint(self):
        return "texts"

    def documents(self, report):
        for number, text in enumerate(self.texts):
            yield Document(str(number), text)


def validation(texts, fraction):
    threshold = split_threshold(Texts(texts), fraction)
    return {text for text in texts if Document("", text).split_hash < threshold}


def test_read_is_kept_plus_dropped():
    report = ReadReport()
    texts = [document.text for document in all_kept(Texts(["a", "", "b", "a", ""]), report)]
    assert texts == ["a", "b", "a"]
    assert (report.read, report.kept) == (5, 3)
    assert report.read == report.kept + report.dropped.total()
    assert report.examples == {"empty": "1"}


def test_split_takes_the_fraction_of_many_documents():
    texts = [str(number) for number in range(5000)]
    assert 0.08 < len(validation(texts, 0.1)) / len(texts) < 0.12


def test_a_document_does_not_move_when_others_are_added():
    texts = [str(number) for number in range(1000)]
    assert validation(texts[:500], 0.1) == validation(texts, 0.1) & set(texts[:500])


@pytest.mark.parametrize("fraction", [1e-12, 0.3, 1 - 1e-12])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_both_sides_get_a_document_when_there_are_two(fraction, number):
    texts = [str(index) for index in range(number)]
    assert 0 < len(validation(texts, fraction)) < number


def test_no_split_is_asked_for():
    assert validation(["one"], 0.0) == set()


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text_is_an_error(texts):
    with pytest.raises(UserError, match=r"the texts holds no text: set data\.path"):
        split_threshold(Texts(texts), 0.1)


def test_one_distinct_document_cannot_be_split():
    with pytest.raises(UserError, match=r"one distinct document.*validation_fraction=0"):
        split_threshold(Texts(["same", "same"]), 0.1)
