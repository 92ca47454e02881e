import types

import pytest

from fp4zoo.data.progress import byte_progress, note


@pytest.mark.parametrize(
    ("initialized", "index", "shown"), [(False, 5, True), (True, 0, True), (True, 3, False)]
)
def test_only_the_first_process_speaks(monkeypatch, capfd, initialized, index, shown):
    jax = types.SimpleNamespace(
        distributed=types.SimpleNamespace(is_initialized=lambda: initialized),
        process_index=lambda: index,
    )
    monkeypatch.setitem(__import__("sys").modules, "jax", jax)
    note("data: said [bold]")
    assert capfd.readouterr().err == ("data: said [bold]\n" if shown else "")


def test_no_bar_where_there_is_no_terminal(capfd):
    with byte_progress("Reading", 10) as advance:
        advance(5)
    assert capfd.readouterr().err.strip() == ""
