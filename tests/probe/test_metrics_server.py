"""The metrics server: whoever does not finish a request holds no thread for long, and keeps nobody else out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvprobe.probe import exposed, metrics_server


def threads() -> int:
    return sum("process_request_thread" in one.name for one in threading.enumerate())


@pytest.fixture
def url(watched: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.3)
    monkeypatch.setattr(metrics_server, "WHOLE_S", 1.0)
    with exposed.served(watched.path.parent, 0) as address:
        yield address


def scrape(url: str) -> str:
    """What a scraper gets, which tries again as Prometheus does; a test that waits too long has failed."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            time.sleep(0.05)


def clients(url: str, many: int, text: bytes) -> list[socket.socket]:
    host, port = url.split("/")[2].rsplit(":", 1)
    found = []
    for _ in range(many):
        client = socket.create_connection((host, int(port)))
        client.sendall(text)
        found.append(client)
    return found


@pytest.mark.parametrize("text", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_clients_that_do_not_finish_hold_few_threads_and_are_dropped(url: str, text: bytes) -> None:
    open_clients = clients(url, 60, text)
    assert "kvprobe_watched_processes" in scrape(url)
    assert threads() <= metrics_server.THREADS
    for client in open_clients:
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1 << 16) == b""  # closed by the server
    assert "kvprobe_watched_processes" in scrape(url)


def test_a_client_that_sends_a_byte_now_and_then_is_dropped(url: str) -> None:
    (client,) = clients(url, 1, b"GET ")
    with pytest.raises(OSError):
        while True:
            client.sendall(b"x")
            time.sleep(0.05)
