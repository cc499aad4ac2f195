"""The command line: a table of commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import codecs
import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Iterator
from keyword import iskeyword
from typing import Any

import click

from kvprobe.environment import DEBUG
from kvprobe.errors import KvprobeError, plain

# command -> its one-line help; the command itself is `kvprobe.commands.<command>.command` (`try_` for the keyword),
# imported when it is run, so that `kvprobe --help` costs no import.
COMMANDS = {
    "demo": "Fill a launch queue, see how kvprobe notices it and switches, and write a report.",
    "calibrate": "Measure the launch queue and every method of copying on this machine.",
    "bench": "Compare stream policies and copy methods on this machine.",
    "run": "Run a command and record every copy of every process it starts.",
    "verify": "Run a command and compare the bytes that its copies load with the bytes that were stored earlier.",
    "attach": "Record a process that is already running.",
    "detach": "End a recording that `kvprobe attach` began.",
    "try": "Measure which suggested changes help a command, without editing the program.",
    "top": "Show recorded processes live.",
    "metrics": "Export metrics to Prometheus or OpenTelemetry, and keep the calls around each slow moment.",
    "reduce": "Reduce the recordings of many ranks to one report that compares them.",
    "triage": "Print for each recording whether a launch queue was full, where, and what it cost.",
    "report": "Write an HTML page that says what is wrong in recordings.",
    "causes": "List the causes that a report names, or explain one.",
    "stats": "Print tables of a recording: calls, copies, sizes, ranges, streams.",
    "size": "Say how large the pool in CPU memory should be, from one recording.",
    "requests": "Say which requests were late, and what made them so.",
    "diff": "Compare two recordings, finding by finding.",
    "check": "Fail with an exit code when a recording breaks a limit.",
    "export": "Write a recording as Parquet or Perfetto.",
    "doctor": "Check this machine and environment for what slows offload.",
    "patches": "List the server adapters that apply in this environment, and why.",
    "mcp": "Let agents read recordings, by the Model Context Protocol.",
    "weights": "Run a model with its weights partly in CPU memory, and profile it.",
}

# How `kvprobe --help` and the documentation group them.
GROUPS = {
    "Record": ("run", "verify", "attach", "detach", "top", "metrics"),
    "Read": ("report", "causes", "stats", "size", "requests", "triage", "reduce", "diff", "export", "mcp"),
    "Gate": ("check", "try"),
    "Machine": ("demo", "doctor", "calibrate", "bench", "patches", "weights"),
}

# What an ASCII-only terminal gets for signs that kvprobe prints; anything else becomes a question mark.
PLAIN = {
    "\u00b5": "u",
    "\u00d7": "x",
    "\u2192": "->",
    "\u2013": "-",
    "\u2014": "-",
    "\u2026": "...",
    "\u201c": '"',
    "\u201d": '"',
    "\u00a0": " ",
    "\u2264": "<=",
    "\u00b7": "-",
}


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end


codecs.register_error("kvprobe", _plainly)


class _ReaderGoneError(Exception):
    """Whoever read the output wants no more of it (`| head`)."""


@contextlib.contextmanager
def _reader_told_apart() -> Iterator[None]:
    """Keeps from click that a reader has gone: it would end the process with 1, the code of a failure."""
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderGoneError from error


class _Commands(click.Group):
    """A group whose commands are imported when asked for."""

    @_reader_told_apart()
    def make_context(self, *words: Any, **more: Any) -> click.Context:
        """As click does; `--help` and `--version` print here."""
        return super().make_context(*words, **more)

    @_reader_told_apart()
    def invoke(self, ctx: click.Context) -> Any:
        """As click does."""
        return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kvprobe.commands.{cmd_name}{'_' if iskeyword(cmd_name) else ''}")
        found: click.Command = module.command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; an unknown command's error names the one that was probably meant."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            ctx.fail(f"no command is called {args[0]!r}; {meant}`kvprobe --help` lists them")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table itself, group by group: no command is imported for it."""
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), COMMANDS[name]) for name in names])


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    # not click.version_option: it fails where kvprobe was not installed
    if asked and not ctx.resilient_parsing:
        from kvprobe.version import version

        click.echo(f"kvprobe {version()}")
        ctx.exit()


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Say why KV-cache offload is slow: which call blocked, where, why, what it cost, and what to change."""
    ctx.obj = {"debug": debug}


def _stand_in_for_closed_streams() -> None:
    """Opens what was closed before the start (`>&-`), so that no other file gets its number; a command finds it closed.

    The lowest free number is given out first, so each gets its own; none of them outlives an exec.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    0, 1 for a failure, 2 for wrong usage, 130 when interrupted, 141 when nobody reads the output any more.
    """
    arguments = sys.argv[1:] if argv is None else argv
    _stand_in_for_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="kvprobe")
    debug = "--debug" in arguments or DEBUG.value()
    try:
        result = cli.main(arguments, prog_name="kvprobe", standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        click.echo(f"kvprobe: {plain(error.format_message())}", err=True)
        return error.exit_code
    except click.exceptions.Abort:
        click.echo("kvprobe: interrupted", err=True)
        return 130
    except (BrokenPipeError, _ReaderGoneError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KvprobeError as error:
        if debug:
            raise
        click.echo(f"kvprobe: {plain(str(error))}", err=True)
        return error.exit_code
    except (OSError, MemoryError) as error:
        if debug:
            raise
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "out of memory"
        click.echo(plain(f"kvprobe: {reason}{where}"), err=True)
        return 1
    except Exception as error:
        if debug or not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        click.echo("kvprobe: interrupted", err=True)  # inside __set_name__ Python makes another error of it, up to 3.11
        return 130


def entry() -> None:
    """Console script: `main` as an exit code."""
    gc.set_threshold(20_000)  # what is imported stays; at Python's 700 it is searched for garbage again and again
    code = main()
    # Ctrl-C while text is compiled and run, as for data classes, is remembered by Python as unhandled, caught or not,
    # and `python -m kvprobe` would end by the signal. What is run next forgets it.
    exec("")
    sys.exit(code)
