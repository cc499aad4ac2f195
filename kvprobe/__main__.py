"""`python -m kvprobe`: the command line, where its script is not on the PATH."""

from kvprobe.cli import entry

if __name__ == "__main__":
    entry()
