"""The account as a reader sees it: one bar and its numbers, the same as a table, and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.account import COPIES, HOST, LINE_TITLES, Account, GpuAccount, Line, ThreadAccount, Unknown
from kvprobe.account.stretches import How
from kvprobe.reporting.streams import recorders_thread, submitters_thread, thread_title
from kvprobe.reporting.units import duration, percent, rate
from kvprobe.reporting.views import Bar, BarPart, Section, TableView, table

__all__ = ["THREAD_TITLES", "account_lines", "account_section", "gpu_name"]

ALIKE = 0.05  # of two rates: closer ones are one
SHOWN = 0.0005  # of a window: less is left out of what a terminal prints, never of a table
_ORDER = (Line.COMPUTING, *COPIES, *HOST, Line.NOTHING_TO_DO, Line.NOT_KNOWN)
TITLE = "Where the time went"
_LEAD = (
    "Every moment of the serving window belongs to exactly one line, so the lines add up to the window. Where the GPU "
    "ran nothing, the line says what the CPU thread that submitted the next operation was doing."
)
_BLIND = "The recording does not show what the GPU did. The table shows what the threads that submit to it did."


def gpu_name(account: Account, gpu: GpuAccount) -> str:
    """How a GPU is called: by its number, its rank, or the process of which no GPU was seen."""
    rank = next((f"rank {one}" for one in gpu.ranks if one >= 0), "")
    if gpu.device < 0:
        return rank or f"process {gpu.pids[0]}" if gpu.pids else "GPU"
    alike = sum(one.device == gpu.device for one in account.gpus)
    name = f"GPU {gpu.device}"
    return f"{name}, {rank}" if rank else f"{name}, process {gpu.pids[0]}" if alike > 1 and gpu.pids else name


def _lines(gpu: GpuAccount) -> Iterator[tuple[str, int, float]]:
    """Title, ns and share of each line that has any time, what is not known by its reasons."""
    for line in _ORDER[:-1]:
        if ns := gpu.ns(line):
            title = LINE_TITLES[line] + _link(gpu, line) + _estimated(gpu, line) + _mostly(gpu, line)
            yield title, ns, ns / gpu.window_ns
    for reason, ns in gpu.unknown_ns().items():
        yield f"{reason.title}{_mostly(gpu, reason)}", ns, ns / gpu.window_ns


def _mostly(gpu: GpuAccount, what: Line | Unknown) -> str:
    """In which function its thread was then, where stacks tell."""
    return f", mostly in {gpu.functions[what.name]}" if what.name in gpu.functions else ""


def _link(gpu: GpuAccount, line: Line) -> str:
    """The rate that copies are compared with, where the line goes by it; both where the directions differ."""
    made = [one for one in gpu.links if one.bytes_per_s]
    if line not in (Line.AT_LINK_RATE, Line.BELOW_LINK_RATE) or not made:
        return ""
    least, most = min(made), max(made)
    if most.bytes_per_s - least.bytes_per_s > ALIKE * most.bytes_per_s:
        ways = zip(("CPU to GPU", "GPU to CPU"), made, strict=True)
        said = (f"{way} {'assumed to carry ' if one.assumed else ''}{rate(one.bytes_per_s)}" for way, one in ways)
        return f" (link: {'; '.join(said)})"
    return f" (link: {rate(most.bytes_per_s)}{', assumed' if most.assumed else ''})"


def _estimated(gpu: GpuAccount, line: Line) -> str:
    """How much of a line is known by samples, by later calls or by counts alone, and how far it may be off."""
    cut, samples = gpu.stretches, gpu.samples
    sampled, counted = (cut.sum_ns((cut.how == one) & (cut.line == line)) for one in (How.SAMPLED, How.COUNTED))
    ns = sampled + counted
    if ns < SHOWN * gpu.window_ns or not ns:
        return ""
    error = percent(samples.estimated_error_ns / gpu.window_ns)
    by = [f"{samples.count} samples"] * bool(sampled and samples.ns)
    by += ["later calls"] * bool(sampled and samples.host_ns and line in HOST) + ["counts"] * bool(counted)
    listed = " and ".join(filter(None, (", ".join(by[:-1]), by[-1])))
    return f" ({percent(ns / gpu.window_ns)} estimated by {listed}, ± {error})"


def account_lines(account: Account) -> list[str]:
    """The account for a terminal: a heading for each GPU, and a line for each line that is no trifle."""
    out = []
    for gpu in account.gpus:
        if not gpu.seen:
            out.append(f"{gpu_name(account, gpu)}: the recording does not show what its GPU did")
            continue
        out.append(f"{gpu_name(account, gpu)}, serving window of {duration(gpu.window_ns)}")
        shown = [one for one in _lines(gpu) if one[2] >= SHOWN]
        out += [f"  {percent(share):>6}  {duration(ns):>8}  {title}" for title, ns, share in shown]
    program = [one for one in account.threads if not recorders_thread(one.name)]
    for thread in program[:1] if not account.seen else []:
        out.append(f"thread {thread.thread}, serving window of {duration(thread.window_ns)}")
        out += [f"  {percent(share):>6}  {duration(ns):>8}  {title}" for title, ns, share in _thread_lines(thread)]
    return out


THREAD_TITLES = {
    Line.FULL_QUEUE: "blocked by a full queue",
    Line.WAITING_FOR_DEVICE: "waiting for the GPU",
    Line.ALLOCATING: "allocating, pinning or freeing",
    Line.PAGEABLE: "copying pageable memory",
    Line.SUBMITTING: "submitting",
    Line.PYTHON: "in Python",
    Line.NO_CPU: "without a CPU",
    Line.TIER: "reading or writing files or sockets",
    Line.ELSEWHERE: "asleep, or in other code",
    Line.NOTHING_TO_DO: "nothing to do",
}


def _thread_lines(thread: ThreadAccount) -> Iterator[tuple[str, int, float]]:
    for line, title in THREAD_TITLES.items():
        ns = thread.ns(line)
        if ns >= SHOWN * thread.window_ns and ns:
            yield title, ns, ns / thread.window_ns


def account_section(account: Account) -> Section:
    """The first section of a page: a bar a GPU, the same as a table, and what the threads did."""
    bars = [_bar(gpu_name(account, gpu), gpu) for gpu in account.gpus if gpu.seen]
    blind = not bars
    if blind:
        program = [one for one in account.threads if one.window_ns > 0 and not recorders_thread(one.name)]
        program.sort(key=lambda one: submitters_thread(one.name))  # it serves only where nobody else does
        bars = [_thread_bar(one) for one in program[:1]]
    section = Section("account", TITLE, _BLIND if blind else _LEAD, bars=bars)
    section.tables = [one for one in (None if blind else _gpus(account), _threads(account)) if one and one.rows]
    return section


def _bar(name: str, gpu: GpuAccount) -> Bar:
    """One GPU's window; parts that would be too thin to see are in the legend alone."""
    parts, at = [], 0.0
    for line in _ORDER:
        share = gpu.share(line)
        if share > 0:
            text = percent(share)
            parts.append(
                BarPart(
                    line.key,
                    round(1000 * at, 2),
                    round(1000 * share, 2),
                    LINE_TITLES[line],
                    duration(gpu.ns(line)),
                    text,
                )
            )
        at += share
    return Bar(name, f"serving window of {duration(gpu.window_ns)}", parts)


def _thread_bar(thread: ThreadAccount) -> Bar:
    """The window of a thread, where nobody saw the GPU."""
    parts, at = [], 0.0
    for line, title in THREAD_TITLES.items():
        share = thread.ns(line) / thread.window_ns
        if share > 0:
            width = round(1000 * share, 2)
            parts.append(
                BarPart(line.key, round(1000 * at, 2), width, title, duration(thread.ns(line)), percent(share))
            )
        at += share
    name = f"thread {thread.thread}" + (f" ({thread_title(thread.name)})" if thread.name else "")
    said = f"serving window of {duration(thread.window_ns)}; the recording does not show what the GPU did"
    return Bar(name, said, parts)


def _gpus(account: Account) -> TableView:
    rows = [
        [gpu_name(account, gpu), title, (duration(ns), ns), (percent(share), share)]
        for gpu in account.gpus
        for title, ns, share in _lines(gpu)
    ]
    return table("Each GPU: the lines in numbers", ["GPU", "Line", "Time", "Share of the serving window"], rows)


def _threads(account: Account) -> TableView:
    """Threads that submit, a row each; of a wait for the device, how long that computed."""
    shown = [one for one in account.threads if one.window_ns > 0 and not recorders_thread(one.name)][:32]
    columns = [line for line in THREAD_TITLES if any(one.ns(line) for one in shown)]
    rows = []
    for one in shown:
        cells = [(percent(ns / one.window_ns) if (ns := one.ns(line)) else "", ns / one.window_ns) for line in columns]
        waited = one.waited_ns.get("computing", 0)
        rows.append(
            [
                f"{one.thread}" + (f" ({thread_title(one.name)})" if one.name else ""),
                f"{one.pid}",
                *cells,
                (duration(waited) if waited else "", waited),
            ]
        )
    titles = [THREAD_TITLES[line][:1].upper() + THREAD_TITLES[line][1:] for line in columns]
    return table(
        "Each thread that submits: what it did",
        ["Thread", "Process", *titles, "GPU computing during its waits"],
        rows,
        "Each figure is a share of the thread's own serving window. Submitting includes calls that record events. If "
        'the program runs Python, time outside of CUDA calls counts as "in Python", unless the recording shows that '
        'the thread slept, read files or had no CPU. In Python programs, "asleep, or in other code" means that the '
        "thread slept, or was in other CUDA calls.",
    )
