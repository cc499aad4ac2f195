"""What a program of the corpus is: its causes, and which recorder can show them; and what the programs share."""

from __future__ import annotations

import ctypes as ct
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from device import Device

KiB, MiB = 1 << 10, 1 << 20
Truth = dict[str, int]
Body = Callable[[Device], Truth]

EVERY = ("run", "kineto", "nsys")
DEVICE = ("kineto", "nsys")
# Recorders that can show a cause; EVERY where a cause is not named here.
SHOWN: dict[str, tuple[str, ...]] = {
    "redundant_loads": ("run",),  # needs addresses
    "wasted_stores": ("run",),
    "unmerged_neighbours": ("run",),
    "weights_not_overlapped": DEVICE,  # these need executions
    "link_bound": DEVICE,
    "small_copies": DEVICE,
    "head_of_line_copies": DEVICE,
    "gpu_starved": DEVICE,
    "failed_calls": ("run", "nsys"),  # the PyTorch profiler keeps no return codes
    "context_lock_stall": ("run", "nsys"),  # the PyTorch profiler leaves out the making of events
    "pinning_stall": ("run", "nsys"),
    "aliased_stream": DEVICE,  # needs to know whose submissions are outstanding
    "load_not_ordered": ("nsys",),  # these also need the streams of waits
    "store_not_ordered": ("nsys",),
}


# Lines of the account, as programs of the later shapes name them.
AT_LINK_RATE = "waiting_for_copies.at_link_rate"
BELOW_LINK_RATE = "waiting_for_copies.below_link_rate"
INSIDE_GPU = "waiting_for_copies.inside_gpu"
NOT_NEEDED = "waiting_for_copies.not_needed"
HOST = "waiting_for_host."
FULL_QUEUE, WAITING, ALLOCATING = HOST + "full_queue", HOST + "waiting_for_device", HOST + "allocating"
PAGEABLE, SUBMITTING, PYTHON = HOST + "pageable", HOST + "submitting", HOST + "python"
NO_CPU, TIER, ELSEWHERE = HOST + "no_cpu", HOST + "tier", HOST + "elsewhere"
NOTHING_TO_DO, COMPUTING = "nothing_to_do", "computing"
LINES = (
    *(AT_LINK_RATE, BELOW_LINK_RATE, INSIDE_GPU, NOT_NEEDED),
    *(FULL_QUEUE, WAITING, ALLOCATING, PAGEABLE, SUBMITTING, PYTHON, NO_CPU, TIER, ELSEWHERE),
    *(NOTHING_TO_DO, COMPUTING),
)


@dataclass(frozen=True)
class Program:
    """One program: what it does wrong; for a healthy one, what it could be taken for.

    Attributes:
        line: the largest line of its account, computing aside where it loses time; "" where it does not know.
        or_lines: lines that a sound account may show as the largest instead, where the border is a matter of wording.
        prepare: done before the recording's window, where the recorder has one: imports, first calls.
        needs_gpu: the host runtime lacks what it uses.
        series: which set of programs it belongs to: "corpus", or one of `series`.
        blind: recorders that cannot tell its line from others of the same kind (copies, host), nor its causes.
        undecided_in: recorders of which "undecided" is right, too.
    """

    name: str
    body: Callable[[Device], Truth]
    causes: tuple[str, ...]
    like: tuple[str, ...]
    also: tuple[str, ...] = ()  # true of it as well, by the way: may be named
    forms: tuple[str, ...] = EVERY  # recorders that record all of it
    line: str = ""
    or_lines: tuple[str, ...] = ()
    prepare: Callable[[Device], None] | None = None
    needs_gpu: bool = False
    series: str = "corpus"
    blind: tuple[str, ...] = ()
    undecided_in: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is to be found."""
        return not self.causes and self.line in ("", COMPUTING, NOTHING_TO_DO)

    @property
    def why(self) -> str:
        """Its truth as a sentence."""
        return (self.body.__doc__ or "").split("\n\n")[0].strip()

    def expected(self, form: str) -> set[str]:
        """The causes that a recording of this format must name."""
        return {cause for cause in self.causes if form in SHOWN.get(cause, EVERY) and form not in self.blind}


PROGRAMS: dict[str, Program] = {}


def program(*causes: str, **what: Any) -> Callable[[Body], Body]:
    """Registers a body under its name; `what` are fields of `Program`."""

    def register(body: Body) -> Body:
        if body.__name__ in PROGRAMS:
            raise ValueError(f"there are two programs {body.__name__}")
        PROGRAMS[body.__name__] = Program(body.__name__, body, causes, **{"like": (), **what})
        return body

    return register


def series(name: str, calm_share: float | None = None) -> Callable[..., Callable[[Body], Body]]:
    """As `program`, for a set of programs whose author knew nothing of the diagnosis.

    Args:
        name: of the set.
        calm_share: its programs fail on a GPU where their own account is not plain (`plain`), and this is how much of a
            healthy one's window is not lost; None: they have no account of their own. A program is written to lose less
            still: what its kernels take to begin and end, and its first and last step, its own account does not know.
    """

    def registers(*causes: str, **what: Any) -> Callable[[Body], Body]:
        def register(body: Body) -> Body:
            @functools.wraps(body)
            def told(d: Device) -> Truth:
                truth = body(d)
                if d.gpu and calm_share is not None:
                    plain(d.spent.account(), what["line"], what.get("or_lines", ()), calm_share)
                return truth

            return program(*causes, series=name, **what)(told)

        return register

    return registers


fresh, blind_program, unseen = series("fresh"), series("blind"), series("unseen")
served, sixth = series("served", 0.8), series("sixth", 0.8)
seventh, eighth, ninth = series("seventh", 0.95), series("eighth", 0.95), series("ninth", 0.96)
tenth, eleventh, twelfth = series("tenth", 0.95), series("eleventh", 0.95), series("twelfth", 0.95)
thirteenth = series("thirteenth", 0.95)
fourteenth = series("fourteenth", 0.95)
fifteenth = series("fifteenth", 0.95)
sixteenth = series("sixteenth", 0.95)
seventeenth = series("seventeenth", 0.95)
eighteenth = series("eighteenth", 0.95)
nineteenth = series("nineteenth", 0.95)
twentieth = series("twentieth", 0.95)
twentyfirst = series("twentyfirst", 0.95)
twentysecond = series("twentysecond", 0.95)
twentythird = series("twentythird", 0.95)
twentyfourth = series("twentyfourth", 0.95)
twentyfifth = series("twentyfifth", 0.95)
twentysixth = series("twentysixth", 0.95)


def plain(account: dict[str, float], line: str, or_lines: tuple[str, ...] = (), calm_share: float = 0.8) -> None:
    """Raises unless the account shows a quarter of the window lost to these lines, or `calm_share` of it not lost."""
    calm = line in (COMPUTING, NOTHING_TO_DO)
    lines, least = ((COMPUTING, NOTHING_TO_DO), calm_share) if calm else ((line, *or_lines), 0.25)
    share = sum(account.get(one, 0.0) for one in lines)
    if share < least or (not calm and account.get(COMPUTING, 0.0) > 1 - least):
        raise RuntimeError(f"the truth is not plain: {line} has {share:.0%} of the window, {account}")


def in_thread(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


def blocked(durations: list[int]) -> tuple[int, int]:
    """What the longest call took beyond a quick one, and the other blocked calls together."""
    quick = sorted(durations[:900])
    usual = quick[len(quick) // 2]
    late = durations[1_000:]
    longest = max(late, default=usual) - usual
    return longest, max(sum(late) - len(late) * usual - longest, 0)


def pageable(size: int) -> tuple[ct.Array[ct.c_char], int]:
    buffer = ct.create_string_buffer(size + 4096)
    ct.memset(buffer, 1, size + 4096)
    return buffer, (ct.addressof(buffer) + 4095) & ~4095


def usual(durations: list[int]) -> int:
    return sorted(durations)[len(durations) // 2]
