"""The first signal asks, the second interrupts."""

import os
import signal

import pytest

from raycloak.coordinator.training.stop_signals import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number):
    request, notices = StopRequest(), []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals(request, notices.append):
        assert not request.made
        os.kill(os.getpid(), number)
        assert request.made
        assert len(notices) == 1
        assert number.name in notices[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_request_may_be_made_twice():
    request = StopRequest()
    request.make()
    request.make()
    assert request.made
