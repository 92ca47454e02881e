import gzip
import json
import os

import pytest

from fp4zoo.data import DataConfig, text_files
from fp4zoo.data.documents import ReadReport
from fp4zoo.data.files import FileSource
from fp4zoo.data.sources import open_source
from fp4zoo.errors import UserError


def read(path, **options):
    report = ReadReport()
    return list(FileSource(str(path), **options).documents(report)), report


@pytest.fixture
def mixed(tmp_path):
    """JSONL with a bad line of every kind among good ones."""
    lines = [
        json.dumps({"text": "good one"}).encode(),
        b"{not json",
        b"",
        json.dumps({"body": "no text"}).encode(),
        json.dumps({"text": 7}).encode(),
        b"[1, 2]",
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        json.dumps({"text": "good two"}).encode(),
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def test_jsonl_skips_and_counts_bad_lines(mixed):
    documents, report = read(mixed, on_bad_record="skip")
    assert [document.text for document in documents] == ["good one", "good two"]
    assert documents[1].name == f"{mixed}:9"
    assert report.dropped == {"not JSON": 1, "no text field": 3, "not UTF-8": 2}
    assert report.examples["not JSON"] == f"{mixed}:2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", r":2: the line is not JSON"),
        (
            b'{"body": "x"}',
            r":2: no text under 'text' \(it has 'body'; data\.field, or the so",
        ),
        (b'{"text": "\xff"}', r":2: byte 10 of the line is not UTF-8"),
        (b'{"text": "\\ud800"}', r":2: 'text' holds half a surrogate pair"),
    ],
)
def test_jsonl_error_names_file_line_and_remedy(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message + r".*data\.on_bad_record=skip") as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_jsonl_field(tmp_path):
    path = tmp_path / "x.ndjson"
    path.write_text('{"body": "here", "text": 1}\n')
    assert [document.text for document in read(path, field="body")[0]] == ["here"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_one_text_file_comes_in_pieces_that_are_the_file(tmp_path, newline):
    text = newline.join(f"line {number} öäü 語" for number in range(40_000)) + "end"
    path = tmp_path / "x.txt"
    path.write_bytes(text.encode())
    documents, _ = read(path)
    assert "".join(document.text for document in documents) == text
    assert 32 <= len(documents) <= 66
    assert all(document.text.endswith("\n") for document in documents[:-1])
    number = documents[5].name.rpartition(":")[2]
    assert documents[5].text.startswith(text.split("\n")[int(number) - 1])


@pytest.mark.parametrize("shift", range(4))
def test_a_line_longer_than_a_piece_is_cut_between_characters(tmp_path, shift):
    text = "a" * shift + "😀語é" * 20_000
    for name, opened in (("x.txt", open), ("y.txt.gz", gzip.open)):
        path = tmp_path / name
        with opened(path, "wb") as file:
            file.write(text.encode())
        documents, _ = read(path)
        assert "".join(document.text for document in documents) == text
        assert len(documents) > 10


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"fine\n" * 10_000 + b"caf\xe9 au lait\n")
    with pytest.raises(UserError, match=r"x\.txt:\d+: byte 50003 is not UTF-8.*on_bad_record=skip"):
        read(path)
    documents, report = read(path, on_bad_record="skip")
    assert len(documents) > 0 and report.dropped == {"not UTF-8": 1}


def test_directory_takes_all_but_hidden_files_in_order(tmp_path):
    for name in ("b.txt", "a/deep/c.md", ".hidden", ".git/config", "a.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    documents, _ = read(tmp_path)
    assert [document.text for document in documents] == ["a/deep/c.md", "a.jsonl", "b.txt"]


def test_a_file_among_many_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("line\n" * 100_000)
    (tmp_path / "b.txt").write_text("other")
    assert len(read(tmp_path)[0]) == 2


def test_pattern(tmp_path):
    for name in ("a.txt", "b.md", "c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    documents, _ = read(tmp_path / "**" / "*.txt")
    assert sorted(document.text for document in documents) == ["a.txt", "c/d.txt"]


def test_gzip(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    assert [document.text for document in read(path)[0]] == ["one", "two"]


def test_truncated_gzip_is_named(tmp_path):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(50_000))[:20_000])
    with pytest.raises(UserError, match=r"x\.txt\.gz is a damaged gzip file"):
        read(path, on_bad_record="skip")


def test_gzip_that_is_none_is_named(tmp_path):
    path = tmp_path / "x.txt.gz"
    path.write_text("plain")
    with pytest.raises(UserError, match=r"x\.txt\.gz is a damaged gzip file"):
        read(path)


@pytest.mark.parametrize(
    ("make", "path", "message"),
    [
        (lambda root: None, "nowhere.txt", "does not exist: name a file"),
        (lambda root: None, "*.nothing", "matches no file: correct the pattern"),
        (lambda root: (root / "dir").mkdir(), "dir", "directory without files"),
    ],
)
def test_nothing_there(tmp_path, make, path, message):
    make(tmp_path)
    with pytest.raises(UserError, match=message):
        FileSource(str(tmp_path / path))


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("x")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("fp4zoo.data.text_files.open_text", refuse)  # root may read every file
    with pytest.raises(UserError, match=r"cannot read .*secret\.txt \(Permission denied\)"):
        read(path)


def test_fingerprint_follows_the_file(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("one")
    first = FileSource(str(path)).fingerprint()
    assert FileSource(str(path)).fingerprint() == first
    assert FileSource(str(path), field="body").fingerprint() != first
    os.utime(path, ns=(1, 1))
    assert FileSource(str(path)).fingerprint() != first


def test_a_field_of_plain_text_is_a_mistake(tmp_path):
    (tmp_path / "x.txt").write_text("one")
    for path in (tmp_path, tmp_path / "x.txt"):
        with pytest.raises(
            UserError, match=r"data\.field=body, but .* is plain text, which has no"
        ):
            FileSource(str(path), field="body")
    (tmp_path / "y.jsonl").write_text('{"body": "two"}')
    documents, _ = read(tmp_path, field="body")
    assert [document.text for document in documents] == ["one", "two"]
    for key, value in (("field", "body"), ("format", "chat")):
        with pytest.raises(UserError, match=rf"data\.{key}={value} without data\.path: the stand"):
            open_source(DataConfig(**{key: value}))


def test_names_cannot_act_on_the_terminal_or_break_the_line(tmp_path):
    path = tmp_path / "a\n\x1b[31m.jsonl"
    path.write_text("nonsense")
    with pytest.raises(UserError) as caught:
        read(path)
    assert r"a\n\x1b[31m.jsonl:1: the line is not JSON" in str(caught.value)


def test_devices_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(UserError, match="is no regular file"):
            FileSource(str(path))


def test_a_number_too_long_for_json_is_a_bad_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": 1' + "0" * 5000 + '}\n{"text": "a"}\n')
    report = ReadReport()
    documents = list(FileSource(str(path), on_bad_record="skip").documents(report))
    assert [document.text for document in documents] == ["a"]
    assert report.dropped == {"not JSON": 1}


def test_suffixes_in_capitals_and_wide_zstandard_windows(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)
    content = b'{"text": "a"}\n' * 3
    path = tmp_path / "X.JSONL.ZST"
    path.write_bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(content))
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # no size
    (tmp_path / "y.jsonl.zst").write_bytes(compressor.compress(content) + compressor.flush())
    documents = list(FileSource(str(tmp_path)).documents(ReadReport()))
    assert [document.text for document in documents] == ["a"] * 6


@pytest.mark.parametrize("content", ["{", "[]", '{"borders": [[0, 1], [7, 2]], "check": "x"}'])
def test_a_damaged_index_is_made_again(tmp_path, cache_home, monkeypatch, content):
    monkeypatch.setattr(text_files, "_BLOCK", 256)
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(500)))
    units = FileSource(str(path)).units(1000)
    [index] = (cache_home / "indexes").glob("*/borders.json")
    index.write_text(content)
    assert FileSource(str(path)).units(1000) == units and len(units) > 3
