"""Builds what is published from the commit HEAD: sdist, wheels for x86-64 and aarch64, SBOM, checksums; and tries it.

python .ci/release.py FOLDER   # `make release` calls it with the tools of the extra `release`

Everything is built twice, in two folders, and must be the same to the last byte. The wheels come from the sdist, so
that it is whole. auditwheel says by the symbols of the C library that are used which systems a wheel is for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
GLIBC = (2, 34)  # of Ubuntu 22.04 and RHEL 9; who has an older one compiles the sdist
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class Failed(Exception):
    """The release is not as it should be; one line that says why."""


def call(*words: object, cwd: Path = ROOT, **environment: str) -> str:
    """What a command prints.

    Raises:
        Failed: it ends with an error.
    """
    command = [str(word) for word in words]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise Failed(f"{' '.join(command[:4])} ended with {done.returncode}:\n{said}")
    return done.stdout


def built(folder: Path, epoch: str) -> Path:
    """Builds sdist and wheels below a folder; the folder that they lie in."""
    out, source = folder / "out", folder / "source"
    source.mkdir(parents=True)
    call("git", "archive", "-o", folder / "source.tar", "HEAD")
    call("tar", "-xf", folder / "source.tar", "-C", source)
    hatch = [sys.executable, "-m", "hatchling", "build", "-d"]
    call(*hatch, out, "-t", "sdist", cwd=source, SOURCE_DATE_EPOCH=epoch)
    for machine, compiler in COMPILERS.items():
        unpacked = folder / machine
        with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
            sdist.extractall(unpacked, filter="data")
        (tree,) = unpacked.iterdir()
        call(*hatch, unpacked, "-t", "wheel", cwd=tree, SOURCE_DATE_EPOCH=epoch, CC=compiler, KVPROBE_NATIVE_LIB="")
        (wheel,) = unpacked.glob("*.whl")
        if not wheel.stem.endswith(f"py3-none-linux_{machine}"):
            raise Failed(f"{compiler} made {wheel.name}, which is not for {machine}")
        audit = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "-w", out, wheel]
        call(*audit, SOURCE_DATE_EPOCH=epoch, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if not (found := re.search(rf"manylinux_(\d+)_(\d+)_{machine}", " ".join(map(str, out.glob("*.whl"))))):
            raise Failed(f"auditwheel gave the wheel for {machine} no manylinux tag")
        if (glibc := (int(found[1]), int(found[2]))) > GLIBC:
            raise Failed(f"the wheel for {machine} needs glibc {glibc}, newer than {GLIBC}: build on an older system")
    return out


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def tried(wheel: Path, version: str, folder: Path) -> Path:
    """Installs the wheel in a clean environment and runs kvprobe there; the environment's Python."""
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", wheel)
    kvprobe = [folder / "venv" / "bin" / "kvprobe"]
    clean = {"PYTHONPATH": "", "KVPROBE_NATIVE_LIB": "", "CC": "/nonexistent"}
    demo(kvprobe, version, folder / "demo.html", clean)
    return python


def demo(kvprobe: list[object], version: str, page: Path, environment: dict[str, str]) -> None:
    """Runs `kvprobe --version` and the demo.

    Raises:
        Failed: another version, or no report.
    """
    if (said := call(*kvprobe, "--version", cwd=page.parent, **environment)) != f"kvprobe {version}\n":
        raise Failed(f"the wheel of {version} says {said.strip()!r}")
    call(*kvprobe, "demo", "--report", page, cwd=page.parent, **environment)
    if page.stat().st_size < 100_000:
        raise Failed(f"the demo's report has {page.stat().st_size} bytes")


def tried_on_aarch64(wheel: Path, version: str, folder: Path) -> str:
    """The same on an emulated processor, with Debian's Python and C library; how it was tried."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not (qemu and shutil.which("apt-get") and shutil.which("dpkg")):
        return "not run: no qemu-aarch64, apt-get or dpkg here"
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root"}
    settings |= {"Dir::State": folder / "state", "Dir::State::status": folder / "status"}
    settings |= {"Dir::Cache": folder / "cache", "Debug::NoLocking": "1"}
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    try:
        call(*apt, "update")
        call(*apt, "install", "-y", "--no-install-recommends", "--download-only", "python3", "libstdc++6")
    except Failed as error:
        return f"not run: no packages for arm64 here ({str(error).splitlines()[0]})"
    for package in (folder / "cache" / "archives").glob("*.deb"):
        call("dpkg", "-x", package, folder / "root")
    (python,) = [one for one in (folder / "root/usr/bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", one.name)]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (34, 28, 27, 26, 17)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--target", folder / "site"]
    call(*pip, "--python-version", python.name.removeprefix("python"), *platforms, wheel)
    run: list[object] = [qemu, "-L", folder / "root", python, "-m", "kvprobe"]
    demo(run, version, folder / "demo.html", {"PYTHONPATH": str(folder / "site"), "KVPROBE_NATIVE_LIB": ""})
    return f"--version and demo ran under {Path(qemu).name} with {python.name}"


def machines(wheel: Path, folder: Path) -> set[int]:
    """The ELF machines of a wheel's libraries: 62 is x86-64, 183 aarch64."""
    shutil.unpack_archive(wheel, folder, "zip")
    return {int.from_bytes(path.read_bytes()[18:20], "little") for path in folder.rglob("*.so")}


def sbom(python: Path, out: Path, version: str, epoch: str) -> Path:
    """A CycloneDX bill of what the wheel installs, as it was resolved today, and of the headers compiled into it.

    Raises:
        Failed: a dependency is missing in it.
    """
    pinned = re.search(r'"nvidia-nvtx==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", f"nvidia-nvtx=={pinned[1]}")
    path = out / f"kvprobe-{version}.cdx.json"
    how = ["--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", "--output-reproducible", "-o", path]
    call(sys.executable, "-m", "cyclonedx_py", "environment", *how, python, SOURCE_DATE_EPOCH=epoch)
    bill = json.loads(path.read_text())
    about = "import importlib.metadata as m, re\nfor one in m.requires('kvprobe'):\n"
    about += "    if 'extra ==' not in one: print(re.match(r'[\\w.-]+', one)[0])"
    wanted = {*call(python, "-c", about).split(), "nvidia-nvtx"}
    there = {re.sub(r"[-_.]+", "-", one["name"]).lower() for one in bill["components"]}
    main = bill["metadata"]["component"]
    if (main["name"], main["version"]) != ("kvprobe", version) or (missing := wanted - there):
        raise Failed(f"the SBOM is of {main['name']} {main['version']} and lacks {missing or 'nothing'}")
    return path


def main(words: list[str]) -> int:
    """Builds, compares, tries; the exit status."""
    out = Path(words[0]).resolve()
    if shutil.which("git") is None or call("git", "status", "--porcelain", "--untracked-files=no"):
        raise Failed("there are changes that are not committed: a release is of a commit")
    epoch = call("git", "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory(prefix="kvprobe-release-") as name:
        folder = Path(name)
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda one: built(folder / one, epoch), ("one", "another/folder"))
        if sums(first) != sums(second):
            raise Failed(f"two builds differ: {sums(first)} and {sums(second)}")
        version = re.fullmatch(r"kvprobe-(.+)\.tar\.gz", next(first.glob("*.tar.gz")).name)[1]
        (x86,), (arm,) = first.glob("*_x86_64.whl"), first.glob("*_aarch64.whl")
        if (found := [machines(one, folder / f"look{at}") for at, one in enumerate((x86, arm))]) != [{62}, {183}]:
            raise Failed(f"libraries of other processors: {found}")
        python = tried(x86, version, folder)
        print("x86-64: --version and demo ran in a clean environment; two builds are the same")
        print(f"aarch64: {tried_on_aarch64(arm, version, folder / 'arm')}")
        sbom(python, first, version, epoch)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(first, out)
    text = "".join(f"{digest}  {name}\n" for name, digest in sums(out).items())
    (out / "SHA256SUMS").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as error:
        print(f"release: {error}", file=sys.stderr)
        sys.exit(1)
