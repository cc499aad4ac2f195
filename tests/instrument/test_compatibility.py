"""Adapters against releases: signatures are read from source, files come out of wheels by range."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.instrument import compatibility, published, registry
from kvprobe.instrument.adapter import Target

SOURCE = """
import os
try:
    from other import thing
except ImportError:
    thing = None
class Base:
    def kept(self): ...
class Handler(Base):
    @property
    def wide(self): ...
    async def transfer_async(self, job_id, spec, /, *, expedited=False): ...
    @staticmethod
    def static(a, b=1, *rest, **more): ...
if os.name:
    def copy(source, target, params, required): ...
"""


@pytest.mark.parametrize(
    ("path", "parameters", "why"),
    [
        ("Handler.transfer_async", ("job_id", "spec"), None),
        ("Handler.transfer_async", ("job", "spec"), "takes (job_id, spec, expedited), expected (job, spec)"),
        ("Handler.static", ("a",), None),
        ("Handler.__init__", None, None),
        ("Handler.kept", None, None),
        ("Handler.gone", (), "does not exist"),
        ("Gone.method", (), "does not exist"),
        ("thing.what", None, None),
        ("copy", ("source", "target", "params"), "takes (source, target, params, required)"),
        ("copy", ("source", "target", "params", "required"), None),
    ],
)
def test_signatures_are_read_from_source(tmp_path: Path, path: str, parameters: tuple[str, ...], why: str) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "module.py").write_text(SOURCE)
    found = compatibility.problem(Target("server.module", path, parameters), tmp_path)
    assert found is None if why is None else found is not None and why in found
    assert "does not exist" in (compatibility.problem(Target("server.absent", path), tmp_path) or "")


def test_what_no_longer_fits_is_named_and_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from kvprobe.commands.patches import command

    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "cache_utils.py").write_text(
        "class Cache:\n    def prefetch(self, layer, more): ...\n"
        "    def offload(self, layer_idx, only_non_sliding): ...\n"
    )
    monkeypatch.setattr(published, "versions", lambda distribution: ["5.99.0", "5.0.0"])
    monkeypatch.setattr(published, "tree", lambda *_, **__: tmp_path)
    done = CliRunner().invoke(command, ["--check-newest", "--server", "transformers"])
    assert done.exit_code == 1
    assert (
        "transformers 5.99.0  transformers.cache  does not fit: transformers.cache_utils:Cache.prefetch takes "
        "(layer, more), expected (layer_idx, only_non_sliding)"
    ) in done.output
    done = CliRunner().invoke(command, ["--versions", "--server", "transformers"])
    assert "| `transformers.cache` | - | 5.0.0 to 5.99.0: " in done.output


def test_a_server_that_cannot_be_asked_for_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from kvprobe.commands.patches import command

    def versions(distribution: str) -> list[str]:
        if distribution == "accelerate":
            raise KvprobeError("pip index: ERROR: No matching distribution found for accelerate")
        return ["5.0.0"]

    monkeypatch.setattr(published, "versions", versions)
    monkeypatch.setattr(published, "tree", lambda *_, **__: tmp_path)
    both = ["--server", "accelerate", "--server", "transformers"]
    done = CliRunner().invoke(command, ["--check-newest", *both])
    assert done.exit_code == 1
    assert "accelerate  cannot tell: pip index: ERROR: No matching distribution" in done.output
    assert "transformers 5.0.0  transformers.cache  does not fit" in done.output


class Ranges(http.server.BaseHTTPRequestHandler):
    """Serves parts of one file, or the whole where the test says so."""

    content, partial, sent = b"", True, 0

    def do_GET(self) -> None:
        low, high = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.content[low : high + 1] if self.partial else self.content
        Ranges.sent += len(part)
        self.send_response(206 if self.partial else 200)
        self.send_header("Content-Range", f"bytes {low}-{low + len(part) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who was sent too much hangs up
            self.wfile.write(part)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A wheel of 4 MB that nobody needs and one file, on a server that sends parts."""
    path = tmp_path / "server-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("server/big.so", bytes(4_000_000))
        made.writestr("server/module.py", "x = 1\n")
        made.writestr("server-1.0.dist-info/METADATA", "Name: server\nVersion: 1.0\n")
    Ranges.content, Ranges.partial, Ranges.sent = path.read_bytes(), True, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("KVPROBE_WHEELS", str(tmp_path / "cache"))
    url = f"http://127.0.0.1:{server.server_port}/{path.name}"
    monkeypatch.setattr(published, "wheel_url", lambda distribution, version: url)
    yield url
    server.shutdown()


def test_who_else_wants_the_same_release_waits_for_it(wheel: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: published.tree("server", "1.0", "server/"), range(8)))
    fetched = Ranges.sent
    shutil.rmtree(folders.pop())
    assert not folders
    published.tree("server", "1.0", "server/")
    assert Ranges.sent == 2 * fetched


def test_only_what_is_needed_of_a_wheel_is_fetched_and_only_once(wheel: str) -> None:
    folder = published.tree("server", "1.0", "server/")
    assert folder is not None
    assert (folder / "server" / "module.py").read_text() == "x = 1\n"
    assert (folder / "server-1.0.dist-info" / "METADATA").exists() and not (folder / "server" / "big.so").exists()
    assert 0 < Ranges.sent < 1_500_000
    sent = Ranges.sent
    assert published.tree("server", "1.0", "server/module.py", download=False) == folder
    assert sent == Ranges.sent
    assert published.tree("server", "2.0", "server/", download=False) is None


def test_whoever_reads_a_file_finds_it_whole_while_more_of_its_release_is_fetched(
    wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published.tree("server", "1.0", "server/module.py")
    assert folder is not None
    seen, extract = [], zipfile.ZipFile.extract

    def looking(wheel: zipfile.ZipFile, *arguments: object) -> str:
        made = Path(extract(wheel, *arguments))
        whole = made.read_bytes()
        made.write_bytes(b"")  # as while it is being written
        seen.append((folder / "server" / "module.py").read_text())
        made.write_bytes(whole)
        return str(made)

    monkeypatch.setattr(zipfile.ZipFile, "extract", looking)
    assert published.tree("server", "1.0", "server/") == folder
    assert seen == ["x = 1\n"] * 2


def test_an_index_that_sends_no_parts_is_an_error_and_leaves_nothing(wheel: str) -> None:
    Ranges.partial = False
    with pytest.raises(KvprobeError, match="does not support range requests"):
        published.tree("server", "1.0", "server/")
    assert published.tree("server", "1.0", "server/", download=False) is None


def test_adapters_fit_the_releases_that_are_here() -> None:
    """Whole packages of the cache, as `kvprobe patches --versions` judges those on the index."""
    looked = 0
    for server, line in registry.SERVERS.items():
        trees = (
            tree
            for distribution in line.distributions
            for tree in published.cache_folder().glob(f"trees/{distribution.replace('-', '_')}-*/")
        )
        for tree in trees:
            done = tree / ".complete"
            if not done.exists() or not {"all", f"{line.package}/"} & set(done.read_text().split()):
                continue
            looked += 1
            version = tree.name.rpartition("-")[2]
            fits = {kind.name: compatibility._fit(kind, version, tree) for kind in registry.adapter_classes(server)}
            assert not {name: why for name, why in fits.items() if why.startswith("does not fit")}, tree.name
    if not looked:
        pytest.skip(f"no server's whole package is in {published.cache_folder()} (kvprobe patches --versions)")
