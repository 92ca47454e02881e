"""Parquet, Arrow, saved datasets and ArrayRecord, whole and in parts, good and damaged."""

import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from fp4zoo.data.documents import ReadReport
from fp4zoo.data.files import FileSource
from fp4zoo.errors import UserError

TEXTS = [f"text {number} öü" * (number % 7 + 1) for number in range(3000)]


def read(path, **options):
    report = ReadReport()
    return list(FileSource(str(path), **options).documents(report)), report


def table(texts, field="text"):
    return pyarrow.table({"id": list(range(len(texts))), field: texts})


def write_parquet(path, texts=TEXTS, **options):
    pyarrow.parquet.write_table(table(texts), path, row_group_size=500, **options)


def write_arrow_stream(path, texts=TEXTS):
    with pyarrow.OSFile(str(path), "wb") as sink:
        content = table(texts)
        with pyarrow.ipc.new_stream(sink, content.schema) as writer:
            writer.write_table(content, max_chunksize=500)


def write_arrow_file(path, texts=TEXTS):
    with pyarrow.OSFile(str(path), "wb") as sink:
        content = table(texts)
        with pyarrow.ipc.new_file(sink, content.schema) as writer:
            writer.write_table(content, max_chunksize=500)


def write_array_record(path, texts=TEXTS, encode=str.encode):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:16")
    for text in texts:
        writer.write(encode(text))
    writer.close()


WRITERS = {
    "x.parquet": write_parquet,
    "stream.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
    "x.array_record": write_array_record,
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_documents_named_by_their_number(tmp_path, name):
    WRITERS[name](tmp_path / name)
    documents, report = read(tmp_path / name)
    assert [document.text for document in documents] == TEXTS
    assert documents[1234].name == f"{tmp_path / name}:1235"
    assert not report.dropped


@pytest.mark.parametrize("unit_bytes", [1, 20_000, 1 << 40])
@pytest.mark.parametrize("name", WRITERS)
def test_units_together_are_the_file(tmp_path, cache_home, name, unit_bytes):
    WRITERS[name](tmp_path / name)
    source = FileSource(str(tmp_path / name))
    units = source.units(unit_bytes)
    assert (len(units) == 1) == (unit_bytes == 1 << 40)
    read = [
        (document.name, document.text)
        for unit in units
        for document in source.read(unit, ReadReport())
    ]
    whole = source.documents(ReadReport())
    assert read == [(document.name, document.text) for document in whole]


def test_array_records_may_be_json(tmp_path):
    path = tmp_path / "x.array_record"
    write_array_record(path, TEXTS[:5], lambda text: json.dumps({"body": text}).encode())
    documents, _ = read(path, field="body")
    assert [document.text for document in documents] == TEXTS[:5]


def test_bad_rows_are_errors_or_counted(tmp_path):
    good = pyarrow.array([b"good", b"caf\xe9", None, b"", b"also good"], pyarrow.binary())
    as_text = pyarrow.StringArray.from_buffers(5, *good.buffers()[1:], good.buffers()[0])
    for column, name in ((good, "bytes.parquet"), (as_text, "text.parquet")):
        path = tmp_path / name
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(UserError, match=rf"{name}:2: byte 3 of 'text' is not UTF-8.*=skip"):
            read(path)
        documents, report = read(path, on_bad_record="skip")
        assert [document.text for document in documents] == ["good", "", "also good"]
        assert report.dropped == {"not UTF-8": 1, "no text field": 1}


def test_bad_array_records_are_named(tmp_path):
    write_array_record(tmp_path / "x.array_record", ["fine", "bad"], lambda t: t.encode("utf-16"))
    with pytest.raises(UserError, match=r"x\.array_record:1: byte 0 of 'text' is not UTF-8"):
        read(tmp_path / "x.array_record")
    write_array_record(tmp_path / "y.array_record", ['{"text": "a"}', "no"])
    with pytest.raises(UserError, match=r"y\.array_record:2: the record is not JSON"):
        read(tmp_path / "y.array_record")


@pytest.mark.parametrize("name", ["x.parquet", "stream.arrow", "file.arrow"])
def test_a_missing_column_is_named_with_those_there(tmp_path, name):
    WRITERS[name](tmp_path / name)
    with pytest.raises(UserError, match=r"no column 'body' \(it has 'id', 'text'\): set"):
        read(tmp_path / name, field="body", on_bad_record="skip")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_truncated_file_is_named(tmp_path, name, share):
    path = tmp_path / name
    WRITERS[name](path, [os.urandom(50).hex() for _ in range(3000)])
    os.truncate(path, int(path.stat().st_size * share))
    kind = {"parquet": "Parquet", "arrow": "Arrow", "array_record": "ArrayRecord"}
    expected = kind[name.rpartition(".")[2]]
    with pytest.raises(UserError, match=rf"{name} is a damaged {expected} file.*restore") as caught:
        read(path, on_bad_record="skip")
    assert "\n" not in str(caught.value)


def test_a_damaged_page_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[40:1000] = os.urandom(960)
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"x\.parquet is a damaged Parquet file"):
        read(path)


def test_a_library_that_is_not_installed(tmp_path, monkeypatch):
    write_parquet(tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'x\.parquet needs pyarrow: pip install "fp4zoo\[data\]"'):
        read(tmp_path / "x.parquet")


def save_dataset(directory, parts):
    """The layout of `Dataset.save_to_disk`."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        write_arrow_stream(directory / name, texts)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


def test_a_saved_dataset(tmp_path):
    save_dataset(tmp_path / "saved", [TEXTS[:10], TEXTS[10:30]])
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"left by datasets")
    assert [document.text for document in read(tmp_path / "saved")[0]] == TEXTS[:30]
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow is missing from the saved"):
        read(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json is not what `datasets` writes"):
        read(tmp_path / "saved")


def test_a_saved_dictionary_of_datasets_gives_its_training_split(tmp_path):
    save_dataset(tmp_path / "saved" / "test", [TEXTS[:10]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UserError, match=r"the splits test but no train: name one.*saved/test"):
        read(tmp_path / "saved")
    save_dataset(tmp_path / "saved" / "train", [TEXTS[10:30]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [document.text for document in read(tmp_path / "saved")[0]] == TEXTS[10:30]


def test_an_arrow_stream_cut_between_two_batches_is_damaged(tmp_path):
    path = tmp_path / "x.arrow"
    write_arrow_stream(path)
    with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as reader:
        for _ in range(3):
            reader.read_next_batch()
        border = mapped.tell()
    whole = path.read_bytes()
    for size in (border, len(whole) - 8):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"x\.arrow .*its end is missing"):
            read(path)


def test_numbers_too_long_for_json_are_bad_records(tmp_path):
    path = tmp_path / "x.array_record"
    records = [json.dumps({"text": "a", "n": 1}), '{"text": "b", "n": 1' + "0" * 5000 + "}"]
    write_array_record(path, records)
    documents, report = read(path, on_bad_record="skip")
    assert [document.text for document in documents] == ["a"]
    assert report.dropped == {"not JSON": 1}


@pytest.mark.parametrize("content", ["{bad", "[]", '{"splits": []}', "{}"])
def test_a_damaged_list_of_splits_is_named(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(UserError, match=r"dataset_dict\.json is not what `datasets` writes"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_two_columns_of_one_name_are_named(tmp_path, name):
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    write_table(tmp_path / name, twice)
    with pytest.raises(UserError, match=r"has 2 columns 'text': rename all but one, or set data"):
        read(tmp_path / name)


def test_values_that_python_cannot_hold_are_bad_rows(tmp_path):
    late = pyarrow.array([2**62], pyarrow.timestamp("s"))
    write_table(tmp_path / "late.arrow", pyarrow.table({"text": late}))
    offsets = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"a\xff")]
    )
    messages = pyarrow.StructArray.from_arrays([text, text], ["role", "content"])
    chats = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1], messages)})
    write_table(tmp_path / "chat.parquet", chats)
    for name, options, reason in (
        ("late.arrow", {}, "unreadable"),
        ("chat.parquet", {"record_format": "chat"}, "not UTF-8"),
    ):
        _, report = read(tmp_path / name, on_bad_record="skip", **options)
        assert report.dropped == {reason: 1}


def write_table(path, content):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(content, path)
        return
    with pyarrow.OSFile(str(path), "wb") as sink:
        with pyarrow.ipc.new_stream(sink, content.schema) as writer:
            writer.write_table(content)


def test_a_field_of_plain_array_records_is_a_mistake(tmp_path):
    write_array_record(tmp_path / "x.array_record", ["plain"])
    with pytest.raises(UserError, match=r"data\.field=body, but .* holds plain text"):
        read(tmp_path / "x.array_record", field="body")


def test_flipped_bytes_end_in_rows_or_one_line(tmp_path):
    """In a process of its own, which the library may not crash."""
    for name, write in WRITERS.items():
        write(tmp_path / name, TEXTS[:300])
    code = (
        "import pathlib, random, sys\n"
        "from fp4zoo.data.documents import ReadReport\n"
        "from fp4zoo.data.files import FileSource\n"
        "from fp4zoo.errors import UserError\n"
        "generator = random.Random(0)\n"
        "for path in map(pathlib.Path, sys.argv[1:]):\n"
        "    content, refused = path.read_bytes(), 0\n"
        "    for _ in range(200):\n"
        "        damaged = bytearray(content)\n"
        "        place = generator.randrange(len(content.rstrip(b'\\0')))\n"
        "        damaged[place] ^= generator.randrange(1, 256)\n"
        "        path.write_bytes(damaged)\n"
        "        try:\n"
        "            list(FileSource(str(path)).documents(ReadReport()))\n"
        "        except UserError as error:\n"
        "            refused += 1\n"
        "            assert '\\n' not in str(error)\n"
        "    assert refused > 10, path\n"
    )
    paths = [str(tmp_path / name) for name in WRITERS]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)
