"""Brings kvprobe's start-up part into a Python in which kvprobe is not installed: `kvprobe run` puts this folder first.

Gives way at once: the folder leaves `sys.path`, and the environment's own `sitecustomize` runs in this one's place.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes 2 ms to import
try:
    if sys.version_info >= (3, 6):  # noqa: UP036 - the Python may be any
        import kvprobe_startup

        kvprobe_startup.start()
except Exception:  # the program starts as if this folder were not there
    pass
sys.path[:] = [entry for entry in sys.path if entry != _here]
_mine = sys.modules.pop(__name__, None)
try:
    import sitecustomize  # noqa: F401 - the next one on the path
except ImportError as error:
    if error.name != __name__:
        raise
finally:
    if _mine is not None:
        sys.modules.setdefault(__name__, _mine)  # the import of this file looks for its module there
