"""The tools of `kvprobe mcp`: each answers with the document of a command, made by that command's own functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvprobe.agents.roots import Roots
from kvprobe.agents.server import KeptDocuments, Tool
from kvprobe.commands import causes, diff, requests, size, stats, triage
from kvprobe.commands._reading import WindowOptions
from kvprobe.diagnosis import CAUSES
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.output import DESCRIBED, DIFF, REQUESTS, SIZE, STATS, TRIAGE
from kvprobe.recordings import expand_deeply
from kvprobe.reporting.summaries import REPORTS

__all__ = ["MOST_ROWS", "tools"]

MOST_ROWS = 1000  # of a table; the document says how many more there are
_MOST_RECORDINGS = 500  # that are looked at in one call

_RECORDING = {
    "type": "string",
    "minLength": 1,
    "description": "A file or folder below the folders that the server was started with.",
}
_WINDOW = {
    "from": {
        "type": "string",
        "maxLength": 40,
        "description": "Judge only from this time on, counted from the start of the recording: 1.5s.",
    },
    "to": {"type": "string", "maxLength": 40, "description": "Judge only up to this time, counted as for from."},
    "range": {
        "type": "string",
        "maxLength": 1000,
        "description": "Judge only what lies in NVTX ranges of this name.",
    },
}
_ONE = {"recording": _RECORDING, **_WINDOW}
_CAUSE = {"type": "string", "maxLength": 100, "description": "The name of a cause, as a finding has it."}


class _Documents:
    """The documents that the tools show parts of."""

    def __init__(self, roots: Roots) -> None:
        self._roots, self._kept = roots, KeptDocuments()

    def stats(self, given: Mapping[str, Any]) -> dict[str, Any]:
        path, files = self._roots.recording(given["recording"])
        window = _window(given)
        return self._kept.get(
            ("stats", files, window),
            lambda: STATS.content(stats.document([path], window, list(REPORTS), MOST_ROWS, quiet=True)),
        )

    def diff(self, given: Mapping[str, Any]) -> dict[str, Any]:
        (before, first), (after, second) = (self._roots.recording(given[side]) for side in ("before", "after"))
        window = _window(given)

        def made() -> dict[str, Any]:
            found = diff.side_by_side(before, after, window, quiet=True)
            return DIFF.content(found.to_json(str(before), str(after)))

        return self._kept.get(("diff", first, second, window), made)

    def size(self, given: Mapping[str, Any]) -> dict[str, Any]:
        path, files = self._roots.recording(given["recording"])
        rate, tokens = given.get("prefill_rate"), given.get("block_tokens")
        return self._kept.get(
            ("size", files, rate, tokens),
            lambda: SIZE.content(size.document(size.pools([path], rate, tokens, quiet=True))),
        )

    def requests(self, given: Mapping[str, Any]) -> dict[str, Any]:
        path, files = self._roots.recording(given["recording"])
        window = _window(given)
        return self._kept.get(
            ("requests", files, window),
            lambda: REQUESTS.content(requests.document(requests.served([path], window, quiet=True))),
        )

    def triage(self, given: Mapping[str, Any]) -> dict[str, Any]:
        where = [self._roots.path(given["folder"])] if "folder" in given else self._roots.folders
        errors, found = [], []
        paths = [path for folder in where for path in expand_deeply(folder)]
        if len(paths) > _MOST_RECORDINGS:
            below = sorted({str(path.parent) for path in paths})
            raise UsageError(f"{len(paths):,} recordings, of at most {_MOST_RECORDINGS}: name a folder of {below[:20]}")
        for path in paths:
            try:
                found.append(self._roots.recording(path))
            except KvprobeError as error:
                errors.append(str(error))

        def made() -> dict[str, Any]:
            answers, failed = triage.triaged([path for path, _ in found], _window(given))
            return TRIAGE.content(triage.document(answers, [*errors, *failed]))

        return self._kept.get(("triage", tuple(files for _, files in found), tuple(errors), _window(given)), made)


def _causes(given: Mapping[str, Any]) -> dict[str, Any]:
    return DESCRIBED.content(causes.document([given["cause"]] if "cause" in given else sorted(CAUSES)))


def _window(given: Mapping[str, Any]) -> WindowOptions:
    return WindowOptions(given.get("from"), given.get("to"), given.get("range", ""))


def _calls_of(given: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Where the calls of a finding stand in the document."""
    named = [one["cause"] for one in content["findings"]]
    if given["cause"] not in named:
        raise UsageError(f"no finding is called {given['cause'][:100]}; there are {', '.join(named) or 'none'}")
    return f"/findings/{named.index(given['cause'])}/calls"


def _request_of(given: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Where a late request stands in the document."""
    if content["served"] is None:
        raise UsageError("this recording shows no steps, so nothing is known about requests")
    named = [one["request"] for one in content["served"]["late_requests"]]
    if given["request"] not in named:
        raise UsageError(f"no late request is called {given['request'][:100]}; {len(named):,} are late: late_requests")
    return f"/served/late_requests/{named.index(given['request'])}"


def _table_of(given: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    return f"/tables/{given['table']}"


def _parts_of_stats(documents: _Documents) -> list[Tool]:
    """What answers with one part of a recording's document."""
    table = {"type": "string", "enum": list(REPORTS), "description": "The table's name."}
    return [
        Tool(
            "calls",
            "The calls behind one finding that lost most, with the Python stack of each where one was recorded.",
            {**_ONE, "cause": _CAUSE},
            "stats",
            documents.stats,
            ("recording", "cause"),
            at=_calls_of,
        ),
        Tool(
            "table",
            "One summary table: calls, kernels, copies, sizes, ranges, streams and more.",
            {**_ONE, "table": table},
            "stats",
            documents.stats,
            ("recording", "table"),
            at=_table_of,
        ),
    ]


def _of_requests(documents: _Documents) -> list[Tool]:
    """What is told of requests."""
    request = {"type": "string", "maxLength": 200, "description": "The id of a late request, as late_requests has it."}
    return [
        Tool(
            "late_requests",
            "Which requests and steps of a server were late and by what: time to first token and between tokens.",
            _ONE,
            "requests",
            documents.requests,
            ("recording",),
        ),
        Tool(
            "request",
            "One late request: what its tokens waited for, split into the lines of the account, and its late steps.",
            {**_ONE, "request": request},
            "requests",
            documents.requests,
            ("recording", "request"),
            at=_request_of,
        ),
    ]


def tools(roots: Roots) -> list[Tool]:
    """All tools, for recordings below these folders."""
    documents = _Documents(roots)
    folder = {"folder": {**_RECORDING, "description": "A folder, or a file; without it, all folders."}}
    rates = {
        "prefill_rate": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "How many prompt tokens a second the model computes, if the recording does not show it.",
        },
        "block_tokens": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "How many tokens a block holds, if the recording does not show it.",
        },
    }

    def one(name: str, says: str, *keys: str) -> Tool:
        return Tool(name, says, _ONE, "stats", documents.stats, ("recording",), keys)

    return [
        Tool(
            "find_recordings",
            "All recordings below a folder, and of each whether a launch queue was full, worst first.",
            {**folder, **_WINDOW},
            "triage",
            documents.triage,
        ),
        one(
            "open_recording",
            "What a recording is: its source and machine, the verdict with its reason, start-up, notes, what was lost.",
            *("source", "machine", "machine_how", "verdict", "startup", "notes", "lost"),
        ),
        one("account", "Where every instant went, for each GPU and each thread that submits.", "verdict", "account"),
        one("findings", "What is wrong, the worst first: causes, evidence, changes with savings.", "findings"),
        *_parts_of_stats(documents),
        Tool(
            "compare",
            "Whether the second of two recordings is better: account, findings and calls side by side.",
            {"before": _RECORDING, "after": _RECORDING, **_WINDOW},
            "diff",
            documents.diff,
            ("before", "after"),
        ),
        Tool(
            "size",
            "How large each pool in CPU memory should be: its curve, where it stands, what is advised.",
            {"recording": _RECORDING, **rates},
            "size",
            documents.size,
            ("recording",),
        ),
        *_of_requests(documents),
        Tool("causes", "What a cause means, how it is told and cured; without a name, all of them.",
             {"cause": _CAUSE}, "causes", _causes),
    ]  # fmt: skip
