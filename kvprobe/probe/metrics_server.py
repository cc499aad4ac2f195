"""The HTTP server of `kvprobe metrics`: few threads, and none for a client that does not finish.

prometheus_client's own server keeps a thread for each client, for as long as that client likes.
"""

from __future__ import annotations

import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

__all__ = ["THREADS", "WHOLE_S", "serve"]

THREADS = 8  # clients at once; scrapers are one or two, and whoever comes on top is turned away
WAIT_S = 5.0  # for the next piece of a request
WHOLE_S = 10.0  # for all of it, the answer included


class _Handler(WSGIRequestHandler):
    timeout = WAIT_S

    def log_message(self, format: str, *words: Any) -> None:
        """Says nothing: a scrape every few seconds is no news."""

    def handle(self) -> None:
        """One request; a client that is cut off, or has gone, is nobody's trouble."""
        try:
            super().handle()
        except OSError:
            self.close_connection = True


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 32

    def __init__(self, address: tuple[Any, ...], family: int) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # connection -> when it was taken
        super().__init__(address[:2], _Handler)

    def server_bind(self) -> None:
        """Without asking for the address's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if one is left."""
        with self._lock:
            room = len(self._open) < THREADS
            if room:
                self._open[request] = time.monotonic()
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """At the end of each."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: ends what takes too long; its thread then finds the connection closed."""
        oldest = time.monotonic() - WHOLE_S
        with self._lock:
            for request, since in self._open.items():
                if since < oldest:
                    try:
                        request.shutdown(socket.SHUT_RDWR)
                    except OSError:  # closed meanwhile
                        continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the next client is served all the same."""


def serve(app: Any, port: int, address: str) -> tuple[_Server, threading.Thread]:
    """Serves a WSGI application from a thread; `shutdown` and `server_close` of the server end it.

    Raises:
        OSError: the port cannot be used.
    """
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server = _Server(found, family)
    server.set_app(app)
    thread = threading.Thread(target=server.serve_forever, name="kvprobe-metrics", daemon=True)
    thread.start()
    return server, thread
