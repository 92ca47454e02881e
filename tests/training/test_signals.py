import os
import signal
import threading

import pytest

from fp4zoo.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_only_asks(number):
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number


def test_a_second_sigint_aborts():
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_does_not():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_other_threads_are_left_alone():
    errors = []

    def enter():
        try:
            with StopRequest() as stop:
                assert not stop
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not errors
