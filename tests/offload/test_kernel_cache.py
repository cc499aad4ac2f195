"""Machine code is kept privately and whole, what does not fit is ignored, and what is missing has a name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvprobe.cuda import find_runtime, kernels
from kvprobe.errors import KvprobeError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = kernels._cache_folder()
    assert found is not None
    return found


def test_what_was_written_is_read_again(folder: Path) -> None:
    kernels._write_cache(folder / "a.cubin", b"code" * 1000)
    assert kernels._read_cache(folder / "a.cubin") == b"code" * 1000
    assert [path.name for path in folder.iterdir()] == ["a.cubin"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a.cubin").stat().st_mode) == 0o600


@pytest.mark.parametrize("held", [b"", b"KVPCUBIN", b"\x7fELF" + bytes(500)])
def test_a_file_that_is_not_whole_is_ignored(folder: Path, held: bytes) -> None:
    (folder / "a.cubin").write_bytes(held)
    assert kernels._read_cache(folder / "a.cubin") is None


def test_one_changed_byte_is_noticed(folder: Path) -> None:
    kernels._write_cache(folder / "a.cubin", b"code" * 1000)
    held = bytearray((folder / "a.cubin").read_bytes())
    held[-1] ^= 1
    (folder / "a.cubin").write_bytes(held)
    assert kernels._read_cache(folder / "a.cubin") is None


def test_code_that_others_could_have_written_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    kernels._write_cache(folder / "a.cubin", b"code")
    (folder / "a.cubin").chmod(0o666)
    assert kernels._read_cache(folder / "a.cubin") is None
    kernels._write_cache(tmp_path / "elsewhere", b"code")
    (folder / "b.cubin").symlink_to(tmp_path / "elsewhere")
    assert kernels._read_cache(folder / "b.cubin") is None


def test_a_folder_open_to_others_is_closed_and_a_link_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o777)
    assert kernels._cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    other = tmp_path / "other"
    (other / "kvprobe").mkdir(parents=True)
    (other / "kvprobe" / "kernels").symlink_to(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    assert kernels._cache_folder() is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernels._cache_folder() is None
    kernels._write_cache(tmp_path / "file" / "a.cubin", b"code")


def test_nvrtc_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise RuntimeError(f"no lib{name}.so anywhere\nsearched here\nand there")

    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", missing)
    with pytest.raises(KvprobeError) as raised:
        kernels._nvrtc()
    assert str(raised.value) == "NVRTC not found: no libnvrtc.so anywhere; install nvidia-cuda-nvrtc"


def test_the_host_runtime_has_both_kinds_of_kernels() -> None:
    runtime = find_runtime("host")
    bulk, registers = (kernels.load_copy_kernels(runtime, bulk=which) for which in (True, False))
    assert bulk.load is not None
    assert registers.load is not None
    assert (bulk.load.kind, registers.load.kind) == (kernels.BULK, kernels.REGISTERS)
    assert bulk.load.shared_bytes <= 227 << 10  # of a Hopper multiprocessor
    assert registers.load.shared_bytes == 0


def test_there_are_none_where_registered_memory_has_another_address_for_the_gpu(host, monkeypatch):
    monkeypatch.setenv("KVHOST_ATTRIBUTES", "16=2,91=0")
    assert "other addresses for registered memory" in kernels.load_copy_kernels(host()).reason
    monkeypatch.delenv("KVHOST_ATTRIBUTES")
    assert not kernels.load_copy_kernels(host()).reason
