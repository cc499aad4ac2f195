"""Puts the page together: one HTML file that holds everything it shows and asks nothing of the network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import jinja2
from markupsafe import Markup, escape

from kvprobe.errors import UsageError
from kvprobe.recordings.serving import recorded_span
from kvprobe.reporting import headline
from kvprobe.reporting.inputs import Input
from kvprobe.reporting.inputs import sections as apart
from kvprobe.reporting.streams import process_name
from kvprobe.reporting.units import NONE, moved_text, rate, value_text
from kvprobe.reporting.views import Chart, Section, table
from kvprobe.version import version

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvprobe.diagnosis import Examination
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy

__all__ = ["build_page", "check_writable", "report_of_others", "write_report", "write_whole"]

_UNSCRIPTED = (  # a chart without its script is its table; what only a script does is not offered
    ".plot,.strip,.readout,.seen,.theme,.copy{display:none}th[aria-sort] button::after{content:none}"
    "a[href^='#call=']{color:inherit;text-decoration:none}"
)
GENERATOR = b'name="generator" content="kvprobe '
_FIRST_SCRIPT = (
    'try{const t=localStorage.getItem("kvprobe-theme");if(t)document.documentElement.dataset.theme=t}catch{}'
)


class Page(TypedDict, total=False):
    """What a page is made of, beside its recording.

    Attributes:
        findings: of `kvprobe.diagnosis.diagnose`; None leaves out the section, and the account.
        queues: of `kvprobe.recordings.occupancy.occupancy`; worked out here where it is not given.
        inputs: what the recording was put together from, where each is to be shown by itself as well.
        title: default: the recording's file.
        interactive: draw with plotly, which adds 4.6 MiB to the page.
        extra: sections before all others, for a command with measurements of its own.
        lead_verdict: what the page says first; default: worked out from the findings.
    """

    findings: Examination | None
    queues: Occupancy | None
    inputs: Sequence[Input]
    title: str | None
    interactive: bool
    extra: Sequence[Section]
    lead_verdict: headline.PageHead | None


def build_page(recording: Recording | None = None, **page: Unpack[Page]) -> str:
    """The page as text.

    Args:
        recording: what was recorded; None for a page of `extra` sections with a verdict and a title of their own.
        page: see `Page`.

    Raises:
        UsageError: there is neither a recording nor sections with a verdict and a title.
    """
    findings, title, inputs = page.get("findings"), page.get("title"), page.get("inputs", ())
    extra, lead_verdict = page.get("extra", ()), page.get("lead_verdict")
    if recording is None and not (extra and lead_verdict and title):
        raise UsageError("a report needs a recording")
    sections: list[Section] = []
    shown: list[dict[str, Any]] | None = None
    lead = ""
    if recording is not None:
        from kvprobe.reporting import recorded

        view = recorded.view(recording, findings, page.get("queues"))
        found, shown, lead = view.verdict, view.findings, view.lead
        sections += view.sections
    if inputs:
        overview, own = apart(inputs, recording.notes if recording is not None else [])
        sections = [overview, *sections, *own]
    first = [one for one in sections if one.id == "account"]
    sections = [one for one in (*extra, *sections) if (one.charts or one.tables or one.bars) and one not in first]
    provenance, commands, notes = _provenance(recording)
    notes += _assumed(findings)
    drawn = [chart for one in sections for chart in one.charts] + [one["chart"] for one in shown or [] if one["chart"]]
    return _render(
        title=title or _title(recording),
        verdict=lead_verdict or found,
        findings=shown,
        findings_lead=lead,
        first=first,
        sections=sections,
        own={one.id for one in extra},
        drawn=drawn,
        provenance=provenance,
        commands=commands,
        notes=notes,
        interactive=page.get("interactive", False),
    )


def _assumed(findings: Examination | None) -> list[str]:
    """The rates of a link that the account went by and the recording does not tell, a line each."""
    gpus = findings.account.gpus if findings is not None else ()
    ways = [both for gpu in gpus for both in zip(("CPU to GPU", "GPU to CPU"), gpu.links, strict=True)]
    told = dict.fromkeys(
        f"the link carries {rate(one.bytes_per_s)} from {way} ({one.assumed})" for way, one in ways if one.assumed
    )
    return [
        f"assumed: {one}, because the recording neither states this rate nor holds a "
        "large copy of pinned memory in this direction"
        for one in told
    ]


def write_report(recording: Recording | None, path: str | os.PathLike[str], **page: Unpack[Page]) -> Path:
    """Writes the page to `path` in one step: a reader sees the old file or the new one, never half of one.

    Raises:
        UsageError: `path` cannot be written (see `check_writable`, which a command calls before its work).
    """
    target = check_writable(path)
    write_whole(target, build_page(recording, **page))
    return target


def write_whole(target: Path, data: str | bytes) -> None:
    """Writes a file in one step: a reader sees the old file or the new one, never half of one."""
    if isinstance(data, str):
        data = data.encode("utf-8", "replace")  # a path need not be UTF-8
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if not (target.parent / "run.json").exists():  # a run folder's files are for their user alone
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)  # mkstemp's 0600 would keep a web server from reading the page
        Path(name).replace(target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:  # a full disk says of which file nothing
            error.filename = str(target)
        raise


def check_writable(path: str | os.PathLike[str], force: bool = True) -> Path:
    """The path, if a report or another file for the user can be written there.

    Args:
        path: of the file.
        force: overwrite whatever file is there; else only an earlier report of kvprobe's.

    Raises:
        UsageError: it is a folder, its folder is missing or read-only, or it holds something that is no report.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"cannot write {target}: it is a folder; name a file in it")
    folder = target.parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {target}: there is no folder {folder}; create it or choose another path")
    try:  # asking for permission is not enough: a full or a virtual file system says yes and then refuses
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {target}: {folder}: {error.strerror}") from None
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {target}: it is not a regular file")
    if target.exists() and not force:
        with target.open("rb") as file:
            if GENERATOR not in file.read(4096):
                raise UsageError(f"{target} exists and is not a report of kvprobe; use -f to overwrite it")
    return target


def report_of_others(path: str | os.PathLike[str], recording: Recording) -> str:
    """The title of the report at `path`, if that is a report, and not of the files that `recording` was read from."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"<title>(.*) · kvprobe</title>", text)
    if GENERATOR.decode() not in text[:4096] or found is None:
        return ""
    same = all(f">{escape(one.path)}<" in text for one in recording.source)
    return "" if same else Markup(found[1]).unescape()


def _title(recording: Recording | None) -> str:
    names = [Path(one.path).name for one in recording.source] if recording is not None else []
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "recording"


def _provenance(recording: Recording | None) -> tuple[list[Any], list[str], list[str]]:
    if recording is None:
        return [], [], []
    facts = [
        [
            _fact(name),
            _moment(recording) if name == _CLOCK else value_text(name, value),
            recording.machine_how.get(name) or "not stated",
        ]
        for name, value in recording.machine.items()
    ]
    hashed = any(one.sha256 for one in recording.source)
    files = [
        [
            one.path,
            one.format,
            one.tool or NONE,
            (moved_text(one.bytes), one.bytes),
            *([one.sha256 or NONE] if hashed else []),
        ]
        for one in recording.source
    ]
    tables = [
        table("Machine", ["Fact", "Value", "How it was obtained"], facts),
        table(
            "Files read",
            ["File", "Format", "Recorded by", "Size", *(["sha256 of the first MiB"] if hashed else [])],
            files,
        ),
    ]
    lost = [
        f"{count:,} single calls of {process_name(recording, row)} were lost; its totals are exact"
        for row, count in recording.lost.items()
        if count
    ]
    commands = list(dict.fromkeys(one.command for one in recording.source if one.command))
    return [one for one in tables if one.rows], commands, [*recording.notes, *lost]


_CLOCK = "unix_offset_ns"


def _fact(name: str) -> str:
    """A fact's name in words; its unit stands with the value."""
    return "recording began" if name == _CLOCK else re.sub(r"_(ns|ms|bytes)$", "", name).replace("_", " ")


def _moment(recording: Recording) -> str:
    """When the recording began, as a date."""
    began = recorded_span(recording)[0] + int(recording.machine[_CLOCK])
    try:
        return (
            f"{datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=began // 1000):%Y-%m-%d %H:%M:%S} UTC"
        )
    except OverflowError:
        return "not a date"


def _asset(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _json(value: Any) -> Markup:
    """JSON that can stand inside a script element: no text of a recording can end it or open a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _render(*, drawn: Sequence[Chart], interactive: bool, **values: Any) -> str:
    css = _asset("page.css")
    scripts = [_asset("page.js"), _asset("rows.js")]
    if interactive:
        from plotly.offline import get_plotlyjs

        scripts[:0] = [get_plotlyjs(), _asset("plotly.js")]
    hashes = " ".join(_hash(text) for text in (_FIRST_SCRIPT, *scripts))
    # plotly writes style elements and data: images while it draws; the page's own script needs neither.
    styles, images = (
        ("'unsafe-inline'", "data: blob:") if interactive else (f"{_hash(css)} {_hash(_UNSCRIPTED)}", "data:")
    )
    csp = (
        f"default-src 'none'; script-src {hashes}; style-src {styles}; img-src {images}; "
        "base-uri 'none'; form-action 'none'"
    )
    contents = [("verdict", "Verdict"), *((one.id, one.title) for one in values["first"])]
    if values["findings"] is not None:
        contents.append(("findings", "Findings"))
    contents += [(one.id, one.title) for one in values["sections"]] + [("provenance", "Where this comes from")]
    return (
        _templates()
        .get_template("page.html")
        .render(
            css=Markup(css),
            first_script=Markup(_FIRST_SCRIPT),
            unscripted=Markup(_UNSCRIPTED),
            scripts=[Markup(text) for text in scripts],
            csp=csp,
            version=version(),
            contents=contents,
            data=_json({one.id: one.spec for one in drawn}),
            **values,
        )
    )
