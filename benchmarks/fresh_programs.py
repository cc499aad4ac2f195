"""How right the diagnosis is at programs that were written without knowledge of it, and how right its account is.

    python benchmarks/record_corpus.py DIR --set fresh    # or blind, unseen, served, sixth, ..., twentysixth
    python benchmarks/fresh_programs.py DIR [--only TEXT] [--found-window] [--json FILE]

A recording is right if every cause that its recorder can show is named, no warning is false, the verdict is the
program's own (healthy, found), and the largest line of the account's losses is the one that the program says. Of
recordings of `kvprobe run`, which begin with the process, the program's own part is judged; with --found-window the
serving window that `kvprobe report` finds by itself. Then the account of `kvprobe run` beside the one of Nsight
Systems, each line in points of its window (bound 5), those of the PyTorch profiler beside it (bound 3), and Nsight's
beside a union of intervals that is computed here, out of the tables of the recording and nothing else (bound 1).
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.serving import ServingWindow

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "corpus"))

from grade import EXPLAINING, FORMATS, grade, unpack
from programs import PROGRAMS
from registry import COMPUTING, NOTHING_TO_DO

RUN_BOUND, KINETO_BOUND, UNION_BOUND = 5.0, 3.0, 1.0  # points of the window
NOT_KNOWN = "not_known"
UNTOLD = {
    "waiting_for_copies.not_needed": "waiting_for_copies.at_link_rate",
    "waiting_for_host.no_cpu": "waiting_for_host.python",
}
Interval = tuple[int, int]
Lines = dict[str, float]


def shares(account: dict[str, Any]) -> Lines:
    """Each line of an account as a share of the window, GPUs together; what is not known is one line."""
    gpus = account["gpus"]
    window = sum(gpu["window_ns"] for gpu in gpus) or 1
    out: dict[str, float] = {}
    for gpu in gpus:
        parts = {COMPUTING: gpu["computing_ns"], NOTHING_TO_DO: gpu["nothing_to_do_ns"]}
        parts[NOT_KNOWN] = sum(gpu["not_known_ns"].values())
        for kind in ("waiting_for_copies", "waiting_for_host"):
            parts |= {f"{kind}.{line}": ns for line, ns in gpu[f"{kind}_ns"].items()}
        for line, ns in parts.items():
            out[line] = out.get(line, 0.0) + ns / window
    return out


def kinds(lines: Lines) -> Lines:
    """Shares by kind of line: computing, waiting for copies, waiting for the host, nothing to do, not known."""
    out: dict[str, float] = {}
    for line, share in lines.items():
        kind = line.partition(".")[0]
        out[kind] = out.get(kind, 0.0) + share
    return out


# ---- the union of intervals -----------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as intervals that do not touch."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in union(intervals))


def of_gpus(path: Path, gpus: list[dict[str, Any]]) -> Lines:
    """As `of_intervals`, the mean of these GPUs of an account."""
    each = [of_intervals(path, (gpu["from_ns"], gpu["to_ns"]), gpu["gpu"]) for gpu in gpus]
    return {part: sum(one[part] for one in each) / len(each) for part in each[0]}


def of_intervals(path: Path, window: Interval, device: int) -> Lines:
    """Shares of a window of an Nsight recording: kernels (and memsets), copies alone, neither; memsets alone apart."""
    db = sqlite3.connect(path)
    have = {row[0] for row in db.execute("select name from sqlite_master where type = 'table'")}

    def within(table: str) -> list[Interval]:
        name = f"CUPTI_ACTIVITY_KIND_{table}"
        told = f"select start, end from {name} where deviceId = ?"
        rows = db.execute(told, (device,)) if name in have else ()
        cut = [(max(begin, window[0]), min(end, window[1])) for begin, end in rows]
        return [one for one in cut if one[0] < one[1]]

    kernels, memsets = within("KERNEL") + within("GRAPH_TRACE"), within("MEMSET")
    busy = length(kernels + memsets)
    copies = length(kernels + memsets + within("MEMCPY")) - busy
    db.close()
    whole = window[1] - window[0] or 1
    return {
        "computing": busy / whole,
        "copies": copies / whole,
        "neither": 1 - (busy + copies) / whole,
        "memsets": (busy - length(kernels)) / whole,
    }


# ---- one recording --------------------------------------------------------------------------------------------------


def judge(path: Path, program: str, form: str, scratch: Path, own: bool = True) -> dict[str, Any]:
    """What was said of one recording, and what is wrong with that."""
    from kvprobe.diagnosis import examine
    from kvprobe.diagnosis.verdict import of_recording
    from kvprobe.recordings import open_recording
    from kvprobe.recordings.serving import recorded_span, serving_window

    said = json.loads(path.with_name(f"{program}.truth.json").read_text())
    plain = unpack(path, scratch)
    recording = open_recording(plain)
    if form == "run" and own:  # a process of its own; the other recorders begin where the program does
        recording.window = own_window(recording, said)
    found = examine(recording)
    verdict = of_recording(recording, found).to_json()
    account = found.account.to_json()
    findings = [one.to_json() for one in found]
    graded = grade(program, form, said["lost_ns"], found, recording)
    out: dict[str, Any] = {
        "program": program,
        "format": form,
        "true": {key: said[key] for key in ("line", "or_lines", "healthy", "account", "lost_ns")},
        "verdict": verdict,
        "account": shares(account),
        "not_known": {why: ns for gpu in account["gpus"] for why, ns in gpu["not_known_ns"].items()},
        "window_ns": sum(gpu["window_ns"] for gpu in account["gpus"]),
        "findings": [
            {key: one[key] for key in ("cause", "title", "severity", "confidence", "lost_ns", "device_ns")}
            for one in findings
        ],
        "missed": sorted(graded.missed),
        "error": graded.error,
    }
    loud = {one["cause"] for one in findings if one["severity"] != "info" and one["confidence"] != "cannot tell"}
    known = PROGRAMS[program]
    extra = loud & EXPLAINING if known.healthy else set()
    out["false"] = sorted(graded.false & loud | extra)
    out["false_information"] = sorted(graded.false - loud)
    out["wrong"] = mistakes(out, form)
    if form == "nsys":
        out["union"] = of_gpus(plain, account["gpus"])
        whole = open_recording(plain)
        whole.window = serving_window(whole, within=program)
        first, end = recorded_span(whole)[0], whole.window.end_ns
        begin = max(end - said["account"].get("window_ns", said["span_ns"]), whole.window.start_ns)
        whole.window = serving_window(whole, begin - first, end - first)
        out["whole"] = shares(examine(whole).account.to_json())
    return out


def mistakes(said: dict[str, Any], form: str) -> list[str]:
    """What is wrong with what was said of one recording; empty where it is right."""
    known = PROGRAMS[said["program"]]
    wrong = [f"missed {cause}" for cause in said["missed"]] + [f"false {cause}" for cause in said["false"]]
    state = said["verdict"]["state"]
    right = {"healthy" if known.healthy else "found"} | ({"undecided"} if form in known.undecided_in else set())
    if state not in right:
        wrong.append(f"verdict {state}, is {' or '.join(sorted(right))}")
    if not known.healthy:
        losses = {line: share for line, share in said["account"].items() if line != COMPUTING}
        largest = max(losses, key=lambda line: losses[line], default=NOT_KNOWN)
        true = {known.line, *known.or_lines}
        if form in known.blind:
            largest, true = largest.partition(".")[0], {line.partition(".")[0] for line in true}
        if largest not in true:
            wrong.append(f"line {largest}, is {' or '.join(sorted(true))}")
    return wrong


def own_window(recording: Recording, said: dict[str, Any]) -> ServingWindow:
    """From where the program's own work began to where it ended, on the clock of `kvprobe run`."""
    from kvprobe.recordings.serving import recorded_span, serving_window

    first, last = recorded_span(recording)
    end = min(said.get("end_ns", last), last)
    own = min(said["span_ns"], said["account"].get("window_ns", said["span_ns"]))  # a program may begin to count later
    return serving_window(recording, max(end - own - first, 0), end - first)


def judged(work: tuple[Path, str, str, bool]) -> dict[str, Any]:
    path, program, form, own = work
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return judge(path, program, form, Path(scratch), own)
        except Exception as error:  # the other recordings are worth having alone
            where = "".join(traceback.format_exception(error))[-1_500:]
            return {"program": program, "format": form, "wrong": [f"failed: {error!r}"], "where": where}


# ---- tables ---------------------------------------------------------------------------------------------------------


def as_nsys(lines: Lines) -> Lines:
    """The lines as Nsight Systems can tell them: it sees neither the bytes of a copy nor who waits for a CPU."""
    out: Lines = {}
    for line, share in lines.items():
        line = UNTOLD.get(line, line)
        out[line] = out.get(line, 0.0) + share
    return out


def farthest(one: Lines, other: Lines) -> tuple[float, str]:
    """The line in which two accounts differ most, points."""
    differences = {line: 100 * (one.get(line, 0.0) - other.get(line, 0.0)) for line in {*one, *other}}
    line = max(differences, key=lambda name: abs(differences[name]))
    return differences[line], line


def print_grades(rows: list[dict[str, Any]]) -> None:
    print("RECORDINGS THAT ARE JUDGED WRONG\n")
    for row in rows:
        if row["wrong"]:
            print(f"{row['program']:56} {row['format']:7} {'; '.join(row['wrong'])}")
            if "verdict" in row:
                named = [
                    f"{one['cause']} ({one['severity']}, {one['lost_ns'] / 1e6:.1f} ms)" for one in row["findings"][:3]
                ]
                print(
                    f"{'':12}{row['verdict']['state']}: {row['verdict']['reason']}; {', '.join(named) or 'no finding'}"
                )
    print("\nRIGHT, BY FORMAT\n")
    for form in [form for form in FORMATS if any(row["format"] == form for row in rows)]:
        mine = [row for row in rows if row["format"] == form]
        judged = [row for row in mine if "verdict" in row]
        healthy = [row for row in judged if row["true"]["healthy"]]
        named = sum(not any(one.startswith(("missed", "false", "verdict")) for one in row["wrong"]) for row in judged)
        counts = {
            "right": f"{sum(not row['wrong'] for row in mine)} of {len(mine)}",
            "causes and verdict right": named,
            "causes missed": sum(len(row["missed"]) for row in judged),
            "false warnings": sum(len(row["false"]) for row in judged),
            f"of {len(healthy)} healthy ones called found": sum(row["verdict"]["state"] == "found" for row in healthy),
            "healthy ones with a false warning": sum(bool(row["false"]) for row in healthy),
            "with information beyond the truth": sum(bool(row["false_information"]) for row in judged),
        }
        print(f"{form:7} " + "; ".join(f"{what} {count}" for what, count in counts.items()))


def print_accounts(rows: list[dict[str, Any]]) -> None:
    by = {(row["program"], row["format"]): row for row in rows if "account" in row}
    names = list(dict.fromkeys(row["program"] for row in rows))
    for form, bound in (("run", RUN_BOUND), ("kineto", KINETO_BOUND)):
        pairs = [(name, by[name, form], by[name, "nsys"]) for name in names if {(name, form), (name, "nsys")} <= {*by}]
        if not pairs:
            continue
        print(f"\nTHE ACCOUNT OF {form} LESS THE ONE OF nsys, POINTS OF THE WINDOW (bound {bound:g})\n")
        print(f"{'program':56} {'window ms':>15} {'largest':>8} {'kinds':>7}  lines that differ by a point or more")
        within = alike = same = told_by_both = 0
        for name, mine, nsys in pairs:
            other = nsys["whole" if form == "run" else "account"]
            most, _ = farthest(mine["account"], other)
            kind, _ = farthest(kinds(mine["account"]), kinds(other))
            within += abs(most) <= bound
            told_by_both += abs(farthest(as_nsys(mine["account"]), as_nsys(other))[0]) <= bound
            alike += abs(kind) <= bound
            same += [one["cause"] for one in mine["findings"][:1]] == [one["cause"] for one in nsys["findings"][:1]]
            parts = {
                line: 100 * (mine["account"].get(line, 0.0) - other.get(line, 0.0))
                for line in {*mine["account"], *other}
            }
            told = [
                f"{line.replace('waiting_for_', '')} {points:+.1f}"
                for line, points in sorted(parts.items(), key=lambda item: -abs(item[1]))
                if abs(points) >= 1
            ]
            own = mine["true"]["account"].get("computing")
            told += (
                [f"(computing less the program's own {100 * (mine['account']['computing'] - own):+.1f})"]
                if own is not None and form == "run"
                else []
            )
            windows = f"{mine['window_ns'] / 1e6:.0f}/{nsys['window_ns'] / 1e6:.0f}"
            print(f"{name:56} {windows:>15} {most:>+8.1f} {kind:>+7.1f}  {', '.join(told)}")
        print(f"every line within {bound:g} points: {within} of {len(pairs)}; ", end="")
        print(f"every line that both can tell: {told_by_both}; ", end="")
        print(f"every kind of line: {alike}; ", end="")
        print(f"the same first finding: {same}")


def print_unions(rows: list[dict[str, Any]]) -> None:
    mine = [row for row in rows if "union" in row]
    if not mine:
        return
    print(f"\nnsys: THE ACCOUNT LESS A UNION OF INTERVALS, POINTS OF THE WINDOW (bound {UNION_BOUND:g})\n")
    print(f"{'program':56} {'computing':>16} {'copies alone':>16} {'neither':>16}  memsets alone")
    within = 0
    for row in mine:
        kind, true = kinds(row["account"]), row["union"]
        said = {"computing": kind.get(COMPUTING, 0.0), "copies": kind.get("waiting_for_copies", 0.0)}
        said["neither"] = 1 - said["computing"] - said["copies"]
        off = {part: 100 * (said[part] - true[part]) for part in said}
        within += all(abs(points) <= UNION_BOUND for points in off.values())
        cells = "".join(f"{100 * true[part]:>9.1f} {off[part]:>+6.1f} " for part in ("computing", "copies", "neither"))
        print(f"{row['program']:56} {cells} {100 * true['memsets']:.1f}%")
    print(f"all three within {UNION_BOUND:g} point: {within} of {len(mine)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--found-window", action="store_true", help="judge the serving window that kvprobe finds")
    parser.add_argument("--workers", type=int, default=1, help="processes that judge recordings side by side")
    parser.add_argument("--json", type=Path, help="write everything that was said here")
    options = parser.parse_args()
    work = [
        (options.corpus / form / f"{name}{suffix}", name, form, not options.found_window)
        for name, one in PROGRAMS.items()
        for form, suffix in FORMATS.items()
        if one.line and options.only in name and (options.corpus / form / f"{name}{suffix}").exists()
    ]
    with ProcessPoolExecutor(options.workers) as pool:
        rows = list(pool.map(judged, work))
    print_grades(rows)
    print_accounts(rows)
    print_unions(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows and not any(row["wrong"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
