"""Files of a server's published releases, taken out of their wheels by HTTP ranges: some megabytes, not gigabytes.

Which releases there are, and where their wheels lie, is pip's answer (its index, its certificates, its settings).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvprobe.environment import WHEELS
from kvprobe.errors import KvprobeError

__all__ = ["cache_folder", "tree", "versions", "wheel_url"]

_BLOCK_BYTES = 1 << 18


def cache_folder() -> Path:
    """`KVPROBE_WHEELS`, or `~/.cache/kvprobe-wheels`."""
    return Path(WHEELS.value() or Path.home() / ".cache" / "kvprobe-wheels")


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise KvprobeError(f"pip {' '.join(arguments[:1])}: {(said or ['no message'])[0].strip()}")
    return done.stdout


def versions(distribution: str) -> list[str]:
    """Its released versions, newest first.

    Raises:
        KvprobeError: the index cannot be asked, or does not have it.
    """
    found = re.search(r"Available versions: (.*)", _pip("index", "versions", distribution))
    return [version.strip() for version in found[1].split(",")] if found else []


def wheel_url(distribution: str, version: str) -> str:
    """Where the wheel of a release lies that pip would choose here.

    Raises:
        KvprobeError: there is none for this Python and machine, or the index cannot be asked.
    """
    wanted = ("--ignore-installed", "--no-deps", "--only-binary", ":all:", f"{distribution}=={version}")
    report = json.loads(_pip("install", "-q", "--dry-run", "--report", "-", *wanted))
    return str(report["install"][0]["download_info"]["url"])


class _Remote(io.RawIOBase):
    """A file on an HTTP server, read by ranges."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        self.blocks: dict[int, bytes] = {}
        cafile = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        self.context = ssl.create_default_context(cafile=cafile)
        self.size = 0
        self._block(0)

    def _block(self, number: int) -> bytes:
        if number not in self.blocks:
            low = number * _BLOCK_BYTES
            headers = {"Range": f"bytes={low}-{low + _BLOCK_BYTES - 1}", "User-Agent": "kvprobe"}
            request = urllib.request.Request(self.url, headers=headers)
            try:
                with urllib.request.urlopen(request, context=self.context, timeout=60) as answer:
                    if answer.status != 206:
                        raise KvprobeError(f"{self.url}: the server does not support range requests")
                    self.size = int(answer.headers["Content-Range"].rsplit("/", 1)[1])
                    self.blocks[number] = answer.read()
            except (urllib.error.URLError, OSError) as error:
                raise KvprobeError(f"{self.url}: {error}") from None
        return self.blocks[number]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        number, start = divmod(self.at, _BLOCK_BYTES)
        part = self._block(number)[start : start + min(len(view), max(0, self.size - self.at))]
        view[: len(part)] = part
        self.at += len(part)
        return len(part)


def _opened(url: str) -> io.BufferedReader:
    if url.startswith("file:"):  # pip was told to look into a folder, too
        return Path(urllib.request.url2pathname(url.removeprefix("file://"))).open("rb")
    return io.BufferedReader(_Remote(url))


def tree(distribution: str, version: str, *members: str, download: bool = True) -> Path | None:
    """Folder with a release's Python files, those whose paths begin with one of `members` (none: all).

    Taken from the cache, from a wheel that lies there, or, where `download` allows it, out of the wheel on the index.

    Returns:
        the folder; None where nothing is cached and nothing may be downloaded.

    Raises:
        KvprobeError: the release has no wheel here, or cannot be read.
    """
    folder = cache_folder() / "trees" / f"{distribution.replace('-', '_')}-{version}"
    with _alone(folder):
        return folder if _unpacked(distribution, version, members, folder, download) else None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Whoever else wants the same release waits, and finds it."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a cache that cannot be written is read
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(folder.with_name(f"{folder.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _extract(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> None:
    """A file whole or not at all: others may be reading what an earlier call put into this folder."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as making:
        made = Path(wheel.extract(info, making))
        place = folder / made.relative_to(making)
        place.parent.mkdir(parents=True, exist_ok=True)
        made.replace(place)


def _unpacked(distribution: str, version: str, members: tuple[str, ...], folder: Path, download: bool) -> bool:
    done = folder / ".complete"
    held = done.read_text().split() if done.exists() else []
    if "all" in held or (members and all(member.startswith(tuple(held)) for member in members)):
        return True
    whole = sorted(folder.parents[1].glob(f"{folder.name}-*.whl"))
    if not whole and not download:
        return False
    source = whole[-1].open("rb") if whole else _opened(wheel_url(distribution, version))
    with source, zipfile.ZipFile(source) as wheel:
        for info in wheel.infolist():
            # what a wheel installs beside its metadata may lie in a folder of its own (PEP 427)
            info.filename = path = info.filename.removeprefix(f"{distribution}-{version}.data/purelib/")
            about = ".dist-info/" in path and path.endswith(("METADATA", "entry_points.txt"))
            if about or (path.endswith(".py") and (not members or path.startswith(members))):
                _extract(wheel, info, folder)
    done.write_text(" ".join([*held, *members]) if members else "all")
    return True
