"""The recordings that other projects published, unpacked: `recordings/public`, where their licences lie, too."""

from __future__ import annotations

import functools
import gzip
import lzma
import os
import shutil
import tempfile
from pathlib import Path

PACKED = Path(__file__).parent / "recordings" / "public"
UNPACKED = Path(__file__).parents[1] / "build" / "public-recordings"


@functools.cache
def folder() -> Path:
    """Where they are, as `<project>/<file>.json.gz` or `.sqlite`; unpacked once, and made anew where that is deleted.

    `KVPROBE_SHARED_DATA` may name a folder that has them.
    """
    given = os.environ.get("KVPROBE_SHARED_DATA", "")
    if given and Path(given).is_dir():
        return Path(given)
    if not UNPACKED.exists():
        UNPACKED.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=UNPACKED.parent))
        for packed in PACKED.glob("*/*.xz"):
            data = lzma.decompress(packed.read_bytes())
            name = packed.stem if packed.stem.endswith(".sqlite") else f"{packed.stem}.gz"
            (made / packed.parent.name).mkdir(exist_ok=True)
            (made / packed.parent.name / name).write_bytes(
                data if name.endswith(".sqlite") else gzip.compress(data, 6, mtime=0)
            )
        try:
            made.rename(UNPACKED)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return UNPACKED
