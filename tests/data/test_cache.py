import os
import threading

import pytest

from fp4zoo.data.cache import cache_directory, hash_of, publish
from fp4zoo.errors import UserError


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FP4ZOO_CACHE", str(tmp_path / "environment"))
    assert cache_directory() == tmp_path / "environment"
    assert cache_directory(str(tmp_path / "configured")) == tmp_path / "configured"
    monkeypatch.delenv("FP4ZOO_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "fp4zoo"


def test_hash_depends_on_names_and_values_not_on_order():
    assert hash_of(a=1, b=2) == hash_of(b=2, a=1)
    assert len({hash_of(a=1), hash_of(a=2), hash_of(b=1), hash_of(a="1")}) == 4


def test_an_entry_appears_whole_or_not_at_all(tmp_path):
    entry = tmp_path / "cache" / "entry"
    with pytest.raises(KeyError), publish(entry) as directory:
        (directory / "file").write_text("half")
        raise KeyError
    assert list(entry.parent.iterdir()) == []
    with publish(entry) as directory:
        (directory / "file").write_text("whole")
        assert not entry.exists()
    assert (entry / "file").read_text() == "whole"
    assert list(entry.parent.iterdir()) == [entry]


def test_the_first_of_two_writers_wins_and_both_succeed(tmp_path):
    entry = tmp_path / "entry"
    barrier = threading.Barrier(4)

    def write(number):
        with publish(entry) as directory:
            (directory / "file").write_text(str(number))
            barrier.wait()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (entry / "file").read_text() in "0123"
    assert list(tmp_path.iterdir()) == [entry]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path):
    old, new = tmp_path / "x.partial-old", tmp_path / "x.partial-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (1, 1))
    with publish(tmp_path / "entry"):
        pass
    assert not old.exists() and new.exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*file/tokens .*set FP4ZOO_CACHE"):
        with publish(tmp_path / "file" / "tokens" / "entry"):
            pass


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(UserError, match=r"No space left on device.*directory with room"):
        with publish(tmp_path / "entry"):
            raise OSError(28, "No space left on device")


def test_errors_about_other_files_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), publish(tmp_path / "cache" / "entry"):
        (tmp_path / "elsewhere").read_text()
