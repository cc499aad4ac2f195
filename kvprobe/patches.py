"""The adapters, one file a server; in a checkout and an editable install they lie in patches/ at the top.

A wheel has that folder here, in place of this file.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1] / "patches")]
