"""The real `lmcache server`, plain and watched, with a client that is watched, too: same bytes, same end, and a page
that says what moved and what it brought.

The client is what vLLM's worker and scheduler use (`lmcache_client.py`), over a KV cache in CPU memory. Both modes run
without a GPU, the engine-driven one with its chunks in the messages and in shared memory.
"""

import contextlib
import html
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(600)]

pytest.importorskip("torch")
pytest.importorskip("lmcache")
pytest.importorskip("lmcache.v1.multiprocess.modules.engine_driven_transfer")

CLIENT = Path(__file__).resolve().parent / "lmcache_client.py"
KVPROBE = [sys.executable, "-m", "kvprobe", "run"]
# what lmcache_client.py asks for: 6 prompts of 128 tokens are stored, 3 of them loaded, then the cache is cleared
LOOKUPS, STORED, LOADED, PROMPT, CHUNKS = 10, 6, 3, 128, 4
PROMPT_BYTES = 4 * 2 * 128 * 2 * 64 * 2  # layers, keys and values, tokens, heads, size of a head, bytes of a bfloat16


def environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVPROBE", "LMCACHE")) and k != "LD_PRELOAD"}
    return env | {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


def two_ports():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@contextlib.contextmanager
def serving(folder, before, mode, more):
    """The server as its own command starts it, behind `before`; its process and the port for clients."""
    port, http = two_ports()
    command = [*before, str(Path(sysconfig.get_path("scripts"), "lmcache")), "server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http)]
    command += ["--chunk-size", str(PROMPT // CHUNKS), "--l1-size-gb", "0.125", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--disable-observability", "--supported-transfer-mode", mode, *more]
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output, start_new_session=True)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-6000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{http}/config", timeout=5).close()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        else:
            raise AssertionError("the server did not come up: " + log.read_text()[-6000:])
        yield process, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def client(before, port, mode, name):
    """What one client saw."""
    command = [*before, sys.executable, str(CLIENT), str(port), mode, name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def end(process, how):
    """Ctrl-C reaches all that the terminal has in front, a supervisor's SIGTERM the command that it started."""
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    return process.wait(120)


def page(folder):
    """The text of a run's page, spaces made one."""
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", (folder / "report.html").read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def moved(recording):
    """Bytes of each direction that adapters saw, calls inside calls left out."""
    from kvprobe.recordings.model import Direction

    table = recording.server_calls
    outer = table["inside"] == 0
    return [int(table["bytes"][outer & (table["direction"] == way)].sum()) for way in (Direction.D2H, Direction.H2D)]


def check_requests(recording, log):
    """Each request's store and load, and as many of both and of as many tokens as the server's own log says."""
    from kvprobe.recordings.model import Phase

    steps, of = recording.steps, recording.step_requests
    told = []
    for row in range(steps.rows):
        (pair,) = (of["id"] == steps["id"][row]).nonzero()[0]
        told.append(
            (Phase(int(steps["phase"][row])), recording.text(int(of["request"][pair])), int(of["computed"][pair]))
        )
        assert steps["end_ns"][row] > steps["start_ns"][row]
    names = ("first", "second")
    stored = [(Phase.STORE, f"{name}-cold-{i}", PROMPT) for name in names for i in range(STORED)]
    loaded = [(Phase.LOAD, f"{name}-warm-{i}", PROMPT) for name in names for i in range(LOADED)]
    assert sorted(told) == sorted(stored + loaded)
    for word, own in (("Stored", stored), ("Retrieved", loaded)):
        assert [int(one) for one in re.findall(rf"{word} (\d+) tokens in", log)] == [tokens for _, _, tokens in own]


@pytest.mark.parametrize(
    ("mode", "shared_memory", "how"),
    [
        ("lmcache_driven", False, signal.SIGTERM),
        ("engine_driven", False, signal.SIGINT),
        ("engine_driven", True, signal.SIGTERM),
    ],
    ids=["lmcache-driven", "engine-driven", "engine-driven, shared memory"],
)
def test_a_watched_server_and_client_move_the_same_bytes_and_the_page_says_what_it_brought(
    tmp_path, mode, shared_memory, how
):
    more = ("--shm-name", f"kvprobe_test_{os.getpid()}") if shared_memory else ()
    with serving(tmp_path, [], mode, more) as (process, port):
        plain = client([], port, mode, "first")
        plain_code = end(process, how)
    assert plain["hits"] == [0] * STORED + [PROMPT] * LOADED + [0] and plain["equal"] == [True] * LOADED
    assert plain["context"].lower().startswith(mode.replace("_", ""))

    run, worker = tmp_path / "run", tmp_path / "worker"
    with serving(tmp_path, [*KVPROBE, "-o", run, "--"], mode, more) as (process, port):
        assert client([], port, mode, "first") == plain
        assert client([*KVPROBE, "-o", worker, "--"], port, mode, "second") == plain
        assert end(process, how) == plain_code

    from kvprobe.diagnosis import offload_benefit
    from kvprobe.recordings import open_recording

    server = open_recording(run)
    assert not [note for note in server.notes if "lmcache" in note and ("failed" in note or "skipped" in note)]
    stored, loaded = 2 * STORED * PROMPT_BYTES, 2 * LOADED * PROMPT_BYTES  # two clients
    assert moved(server) == [stored, loaded]
    check_requests(server, (tmp_path / "server.log").read_text())
    (benefit,) = offload_benefit.of_recording(server)
    assert (benefit.server, benefit.source, benefit.requests) == ("lmcache", "server", 2 * LOOKUPS)
    assert (benefit.prompt_tokens, benefit.hit_tokens) == (2 * LOOKUPS * PROMPT, 2 * LOADED * PROMPT)
    assert (benefit.stored_blocks, benefit.stored_bytes) == (2 * STORED * CHUNKS, stored)
    assert (benefit.loaded_blocks, benefit.loaded_bytes) == (2 * LOADED * CHUNKS, loaded)
    assert (benefit.unread_blocks, benefit.held_unread_blocks) == (2 * (STORED - LOADED) * CHUNKS, 0)
    assert benefit.waits == 2 * LOADED and benefit.waited_ns > 0
    shown = page(run)
    assert "Is offload helping?" in shown and "What the server's own functions moved" in shown
    assert benefit.sentence in shown
    assert "30% of the prompt tokens came from it" in benefit.sentence
    assert "50% of what was stored was evicted" in benefit.sentence and "pays where prefill takes longer" in shown
    assert "3.15 MB" in shown and "1.57 MB" in shown

    engine = open_recording(worker)
    assert any("lmcache.mp_worker" in note and "applied" in note for note in engine.notes), engine.notes
    copied = [STORED * PROMPT_BYTES, LOADED * PROMPT_BYTES] if mode == "engine_driven" else [0, 0]
    assert moved(engine) == copied, "the worker copies in the engine-driven mode alone"
    assert "batched_submit_retrieve_requests" in page(worker)
