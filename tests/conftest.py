"""What all tests need: an interrupt reaches the programs that they start."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell starts what runs in its background with Ctrl-C ignored, and every child of such a run inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
