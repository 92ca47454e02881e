"""Compressed files, lines of any length, and reading in parts."""

import gzip
import json
import os
import time
import tracemalloc

import pytest
import zstandard

from fp4zoo.data.documents import ReadReport
from fp4zoo.data.files import FileSource
from fp4zoo.errors import UserError

LINES = [json.dumps({"text": f"line {number} é" * (number % 5 + 1)}) for number in range(5000)]


def read(path, **options):
    report = ReadReport()
    return list(FileSource(str(path), **options).documents(report)), report


def compress(path, content):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(zstandard.compress(content))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("frames", [1, 3])
def test_compressed_jsonl_is_the_plain_one(tmp_path, suffix, frames):
    content = "\n".join(LINES).encode()
    third = len(content) // frames
    parts = [content[third * index : third * (index + 1)] for index in range(frames)]
    parts[-1] += content[third * frames :]
    path = tmp_path / f"x.jsonl{suffix}"
    whole = b""
    for part in parts:
        compress(path, part)
        whole += path.read_bytes()
    path.write_bytes(whole)
    texts = [document.text for document in read(path)[0]]
    assert texts == [json.loads(line)["text"] for line in LINES]


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "Zstandard")])
def test_a_truncated_compressed_file_is_named_with_the_last_good_line(tmp_path, suffix, kind):
    path = tmp_path / f"x.jsonl{suffix}"
    lines = [json.dumps({"text": os.urandom(50).hex()}) for _ in range(20_000)]
    compress(path, "\n".join(lines).encode())
    os.truncate(path, path.stat().st_size // 2)
    message = (
        rf"x\.jsonl{suffix} is a damaged {kind} file behind .*x\.jsonl{suffix}:\d{{3,}} \(.*\)"
    )
    with pytest.raises(UserError, match=message) as caught:
        read(path, on_bad_record="skip")
    assert str(caught.value).endswith("restore or remove it")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("content", [b"plain, not compressed", b"\x28\xb5\x2f\xfd\xff\xff" * 9])
def test_what_is_not_compressed_is_named(tmp_path, suffix, content):
    (tmp_path / f"x.txt{suffix}").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.txt\S+ is a damaged \w+ file.*restore or remove it"):
        read(tmp_path / f"x.txt{suffix}")


@pytest.mark.parametrize("unit_bytes", [1, 5_000, 50_000, 1 << 40])
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_units_together_are_the_file(tmp_path, cache_home, name, unit_bytes):
    lines = [*LINES, json.dumps({"text": "long" * 30_000}), "", *LINES]
    (tmp_path / name).write_text("\n".join(lines))
    source = FileSource(str(tmp_path / name))
    whole = [(document.name, document.text) for document in source.documents(ReadReport())]
    units = source.units(unit_bytes)
    assert [unit.begin for unit in units] == sorted({unit.begin for unit in units})
    assert len(units) == 1 or unit_bytes < 1 << 40
    assert len(units) > 1 or unit_bytes > 50_000 or name == "x.jsonl"
    parts = [
        (document.name, document.text)
        for unit in units
        for document in source.read(unit, ReadReport())
    ]
    assert parts == whole


def test_the_index_is_kept_and_made_again_when_the_file_changes(tmp_path, cache_home, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(LINES * 10))
    first = FileSource(str(path)).units(1 << 20)
    assert len(first) > 1 and len(list((cache_home / "indexes").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fp4zoo.data.text_files.line_checkpoints", None)
        assert FileSource(str(path)).units(1 << 20) == first
    os.utime(path, ns=(1, 1))  # another time
    assert FileSource(str(path)).units(1 << 20) == first
    path.write_text("\n".join(LINES * 20))  # another size
    assert len(FileSource(str(path)).units(1 << 20)) > len(first)
    assert len(list((cache_home / "indexes").iterdir())) == 3


def test_a_line_of_200_megabytes_is_named_and_costs_no_more_than_its_limit(tmp_path):
    path = tmp_path / "x.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "last"}\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2: the line is longer than 64 MiB.*=skip"):
        read(path)
    tracemalloc.start()
    began = time.perf_counter()
    documents, report = read(path, on_bad_record="skip")
    assert time.perf_counter() - began < 10
    assert tracemalloc.get_traced_memory()[1] < 150 << 20
    tracemalloc.stop()
    assert [document.text for document in documents] == ["first", "last"]
    assert documents[1].name == f"{path}:3" and report.dropped == {"too long": 1}


def test_a_text_line_of_200_megabytes_is_cut(tmp_path):
    path = tmp_path / "x.txt"
    with open(path, "wb") as file:
        for _ in range(200):
            file.write("é".encode() * (1 << 19))
    size = number = 0
    for document in FileSource(str(path)).documents(ReadReport()):
        size += len(document.content)
        number += 1
        assert len(document.content) <= 512 * 1024 + 4
    assert size == 200 << 20 and number > 300


@pytest.mark.parametrize("record_format", ["chat", "prompt_completion"])
def test_text_files_hold_no_records(tmp_path, record_format):
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(UserError, match=rf"x\.txt is read as text.*data\.format={record_format}"):
        read(tmp_path / "x.txt", record_format=record_format)
