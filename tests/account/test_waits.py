"""A real HTTP server under `kvprobe run`: while it waits for its next request it has nothing to do, and is healthy."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.verdict import Verdict, of_recording
from kvprobe.native import build
from kvprobe.recordings import open_recording
from kvprobe.recordings.serving import recorded_span, serving_window

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
PAUSES_MS = (37, 23, 44, 31, 28, 41, 33, 26) * 3  # no timer's, and none that takes several times as long as most
SERVER = f"""
import sys, time
sys.path.insert(0, {str(CORPUS)!r})
from http.server import BaseHTTPRequestHandler, HTTPServer
from device import Device

d = Device(streams=1, events=8)

def decode():
    for step in range(12):
        d.launch(1_200_000)
        d.record(step % 8, d.compute)
        if step > 1:
            d.sync_event((step - 2) % 8)
    d.sync(d.compute)

class Decoder(BaseHTTPRequestHandler):
    def do_POST(self):
        prompt = self.rfile.read(int(self.headers["Content-Length"]))
        PREPARE
        decode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(prompt)))
        self.end_headers()
        self.wfile.write(prompt)

    def log_message(self, *_):
        pass

decode()
with HTTPServer(("127.0.0.1", 0), Decoder) as server:
    print(server.server_port, flush=True)
    for _ in range({len(PAUSES_MS)}):
        server.handle_request()
"""


def served(folder: Path, prepare: str) -> tuple[Examination, Verdict]:
    """The server, asked with pauses between, recorded by `kvprobe run` with what the played device did."""
    env = {**os.environ, "KVHOST_CLOCK": "real", "KVPROBE_MARKS": "on"}
    command = [sys.executable, "-m", "kvprobe", "run", "-o", str(folder), "--", sys.executable, "-c"]
    process = subprocess.Popen(
        [*command, SERVER.replace("PREPARE", prepare)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    for pause_ms in PAUSES_MS:
        time.sleep(pause_ms / 1_000)
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("POST", "/", b"?" * 256)
        assert len(client.getresponse().read()) == 256
        client.close()
    process.stdout.read()
    process.wait(120)
    recording = open_recording(folder)
    first, last = recorded_span(recording)
    waits = recording.os_calls["start_ns"]
    begin = int(waits.min()) if len(waits) else first
    recording.window = serving_window(recording, begin - first, last - first)
    found = examine(recording)
    return found, of_recording(recording, found)


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    build.build()


def test_a_server_that_waits_for_its_next_request_has_nothing_to_do(tmp_path: Path) -> None:
    found, verdict = served(tmp_path / "run", "pass")
    (gpu,) = found.account.gpus
    asked_after_ns = sum(PAUSES_MS[1:]) * 1_000_000  # a client sleeps so long at least
    assert gpu.ns(Line.NOTHING_TO_DO) > 0.95 * asked_after_ns
    assert gpu.open_ns < 0.1 * gpu.window_ns
    assert verdict.state == "healthy" or "request" not in verdict.reason  # it may lack a CPU


def test_what_it_does_for_a_request_before_it_submits_is_no_wait(tmp_path: Path) -> None:
    """A request is prepared for as long as its steps take: by a timer, so that a busy machine changes nothing."""
    found, verdict = served(tmp_path / "run", "time.sleep(0.03)")
    (gpu,) = found.account.gpus
    prepared_ns = len(PAUSES_MS[1:]) * 30_000_000
    untold = gpu.window_ns - gpu.ns(Line.NOTHING_TO_DO, Line.COMPUTING)
    assert untold > 0.95 * prepared_ns
    assert verdict.state != "healthy", verdict.reason
