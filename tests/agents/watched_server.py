"""`kvprobe mcp` under an audit hook of its own, which notes what the process writes, starts or connects to.

python watched_server.py LOG ARGUMENT...    # LOG: a line for each act, from the moment on that the server is guarded
"""

from __future__ import annotations

import os
import sys

from kvprobe import cli

LOG = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.listxattr", "os.getxattr")
guarded = False


def note(event: str, args: tuple[object, ...]) -> None:
    """Writes a line for what is more than reading; an event loop's own pair of sockets is not."""
    global guarded
    if event == "sys.addaudithook":
        guarded = True
        os.write(LOG, b"guarded\n")
    if event == "open":
        acts = isinstance(args[2], int) and bool(args[2] & WRITES) and not isinstance(args[0], int)  # open already
    else:
        acts = event.startswith(("os.", "subprocess.", "socket.", "shutil.", "tempfile.", "pty.", "urllib.", "ftplib."))
        acts = acts and event not in (*READS, "socket.__new__")
    if guarded and acts:
        os.write(LOG, f"{event} {args!r}"[:300].replace("\n", " ").encode("utf-8", "replace") + b"\n")


sys.addaudithook(note)
sys.exit(cli.main(["mcp", *sys.argv[2:]]))
