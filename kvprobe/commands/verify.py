"""`kvprobe verify -- COMMAND`: do copies load the bytes that copies had stored? By samples, of any program.

The command runs and is recorded as by `kvprobe run`, and the interposer's byte witness looks at pages of CPU memory:
`kvprobe/native/interpose/witness.c` says at which, when, and what it cannot see.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from kvprobe import environment
from kvprobe.commands._speaking import end_like
from kvprobe.commands._watching import how_stacks, interposer, new_folder, recording_options
from kvprobe.commands.run import become, environment_of, find_program, preloadable, record, say_where
from kvprobe.errors import UsageError
from kvprobe.output import VERIFY
from kvprobe.runfolder.folder import RunFolder
from kvprobe.runfolder.secrets import redact, redact_text

__all__ = ["command"]


@click.command(
    short_help="Run a command and compare the bytes that its copies load with the bytes that were stored earlier.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, metavar="[--] COMMAND [ARGUMENT...]", type=click.UNPROCESSED)
@recording_options
@click.option(
    "--budget",
    type=click.FloatRange(0, 100, min_open=True),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Share of the program's time that kvprobe may use to look at pages. With less, it looks at fewer pages.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; COMMAND's output goes to stderr.")
def command(
    words: tuple[str, ...], output: Path | None, detail: str, max_bytes: int, budget: float, as_json: bool
) -> int:
    """Run COMMAND and compare the bytes that its copies load to the GPU with the bytes that were stored earlier.

    The program needs no change. kvprobe looks three times at each page of a sample of the pinned memory: after a store
    to this page has ended, when a later copy loads the page, and while this load runs. A mismatch names the block, both
    times and the calls.

    Bytes that changed during a load are a bug. Bytes that changed between store and load were written by something that
    kvprobe does not see, which may be the program itself on purpose. If an allocation's bytes change before most of its
    loads, the program rewrites this buffer. Then kvprobe reports no mismatch for it, and says so: it would not see a
    bug there. Where nothing was compared, kvprobe says "cannot tell", and why. The exit code is COMMAND's. The run
    folder also holds the recording and the report of `kvprobe run`.
    """
    if not words:
        raise UsageError("no command was given: kvprobe verify [OPTIONS] -- COMMAND [ARGUMENT...]")
    program = find_program(words[0])
    library = interposer()
    folder = new_folder(output, "kvprobe-verify", words[0])
    library = preloadable(library, folder)
    options: dict[str, Any] = {
        "report": "",
        "fix": "off",
        "detail": detail,
        "max_bytes": max_bytes,
        "stacks": True,
        "stacks_how": how_stacks(),
        "stacks_after_ms": 50,
        "nvml": False,
        "nsys": False,
        "verify": budget,
        "program": program,
        "words": redact_text(" ".join(words)),
        "terminal": "",
        "killed": environment.killed(),
    }
    env = environment_of(folder, library, options) | {environment.VERIFY.name: f"{budget:g}"}

    def begin(observer: int) -> None:
        if as_json:
            os.dup2(2, 1)
        become(program, list(words), {**env, environment.OBSERVER.name: str(observer)})

    say_where(folder, options)
    stdout = os.dup(1) if as_json else -1  # whoever waits for the end of COMMAND's output is not kept waiting
    code = record(folder, words, options, begin, findings=False)
    if as_json:
        os.dup2(stdout, 1)
        os.close(stdout)
    _say(folder, words, code, as_json)
    return end_like(code)


def _say(folder: Path, words: tuple[str, ...], code: int, as_json: bool) -> None:
    """The verdict: lines on stderr, as `kvprobe run` speaks, or the document on stdout."""
    from kvprobe.commands._reading import plain
    from kvprobe.recordings import open_recording
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.witnessed import of_recording
    from kvprobe.reporting.verified import document, lines

    recording = open_recording(folder) if RunFolder(folder).rings() else Recording(source=[])
    found = of_recording(recording)
    said = document(recording, found)
    if as_json:
        VERIFY.print({"command": redact(words), "folder": str(folder), "exit_code": code, **said})
        sys.stdout.flush()
        return
    for line in lines(recording, found) if found is not None else [said["sentence"]]:
        click.echo(f"kvprobe: {plain(line)}", err=True)
