import io

import pytest
from rich.console import Console

from fp4zoo.training.display import Display, duration


def row(step, **changes):
    numbers = {"loss": 3.25, "tokens_per_second": 1234.5, "loss_scale": 32768.0}
    return {"step": step, **numbers, **changes}


def show(*, terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, highlight=False, markup=False)
    with Display(100, console=console) as display:
        display.update(row(1))
        display.update(row(2))  # within ten seconds of the last line
        display.note("a note [1] about C:\\path")
        display.update(row(100))
    return file.getvalue()


def test_plain_lines_without_control_characters():
    text = show(terminal=False)
    assert all(character == "\n" or character.isprintable() for character in text)
    lines = text.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/100  loss 3.2500  1,234 tokens/s  loss scale 32768  ")
    assert lines[0].endswith(" left")
    assert lines[1] == "a note [1] about C:\\path"
    assert lines[2].startswith("step 100/100")


def test_a_terminal_shows_step_loss_speed_scale_and_time_left():
    text = show(terminal=True)
    for part in ("step 100/100", "loss 3.2500", "1,234 tokens/s", "loss scale 32768", "left"):
        assert part in text
    assert "a note [1]" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (750, "12:30"), (11100, "3:05:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
