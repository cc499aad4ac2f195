"""`python -m kvprobe`: the command line, where its script is not on the PATH."""

from kvprobe.cli import entry

entry()
