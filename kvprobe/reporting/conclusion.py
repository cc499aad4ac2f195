"""Says of two recordings whether the second is better: in what, by how much and how sure, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvprobe.diagnosis import PROFILER, WAITS_LEFT
from kvprobe.output.recorded import ConclusionJson
from kvprobe.reporting.compare import LEAST, interval
from kvprobe.reporting.headline import WAIT_MEASURED
from kvprobe.reporting.units import number_text, percent

if TYPE_CHECKING:
    from kvprobe.diagnosis.verdict import MissingPart
    from kvprobe.reporting.compare import FindingChange, SubmissionCost

__all__ = ["Conclusion", "conclude"]

State = Literal["better", "worse", "mixed", "same", "undecided"]

OF_WEIGHT = 0.01  # of the time: what changed by less decides nothing
OUTWEIGHED = 0.1  # of what changed the other way: what is less than that is not held against it
ONE_EACH = "With one recording of each, it is not known how much two runs of the same program differ by chance."


@dataclass(frozen=True)
class Conclusion:
    """Whether the second recording is better.

    Attributes:
        state: "mixed" where something of weight became better and something else worse.
        sentence: the whole of it, for a person.
        detail: what limits it, or what to do; may be empty.
        beside: the part of the sentence that can stand below a headline of the rest; may be empty.
    """

    state: State
    sentence: str
    detail: str = ""
    beside: str = ""

    @property
    def headline(self) -> str:
        """The sentence without what can stand below it."""
        return self.sentence.removesuffix(f"{self.beside}.").rstrip(", ") + "." if self.beside else self.sentence

    def to_json(self) -> ConclusionJson:
        """Without the part that a page sets apart."""
        return {"state": self.state, "sentence": self.sentence, "detail": self.detail}


def conclude(
    before: str,
    after: str,
    changes: Sequence[FindingChange],
    cost: SubmissionCost | None,
    missing: Mapping[str, MissingPart],
) -> Conclusion:
    """Weighs what changed, by the share of the time that it is.

    Args:
        before: what to call the first recording; `after` the second.
        after: see there.
        changes: of the findings, as `compare_findings` gives them.
        cost: as `submission_cost` gives it.
        missing: what a recording of that name lacks to prove anything.
    """
    open_question = f"Whether {after} is better than {before} is undecided"
    if missing:
        lacks = "; ".join(f"of {name}, {one.what}" for name, one in missing.items())
        how = "; ".join(dict.fromkeys(one.how for one in missing.values()))
        return Conclusion("undecided", f"{open_question}: {lacks}.", f"To decide it: {how}.")
    less, more = _moved(changes, ("gone", "less")), _moved(changes, ("new", "more"))
    weight = cost.share if cost is not None else 0.0
    verdict = cost.moved.verdict if cost is not None else ""
    good = max([*less.values(), weight if verdict == "faster" else 0.0], default=0.0)
    bad = max([*more.values(), weight if verdict == "slower" else 0.0], default=0.0)
    better = good >= max(OF_WEIGHT, OUTWEIGHED * bad)
    worse = bad >= max(OF_WEIGHT, OUTWEIGHED * good)
    if not better and not worse:
        told = f"no finding changed by much, and {_costs(cost)}"
        if cost is None or (verdict == "unsure" and weight >= OF_WEIGHT):
            return Conclusion("undecided", f"{open_question}: {told}.")
        return Conclusion("same", f"{after} is neither better nor worse than {before}: {told}.")
    pros = _said(less) if better and less else ""
    cons = _said(more) if worse and more else ""
    if better and worse:
        pros, cons = pros or _costs(cost), cons or _costs(cost)
        both = f"{after} is better than {before} in one way and worse in another"
        return Conclusion("mixed", f"{both}: {pros}; but {cons}.", ONE_EACH)
    state: State = "better" if better else "worse"
    findings = pros or cons or "no finding changed by much"
    link = "though" if verdict == ("slower" if better else "faster") else "and"
    beside = f"{link} {_costs(cost)}" if cost is not None else ""
    told = f"{findings}, {beside}" if beside else findings
    # alone, that no finding changed would be no reason
    return Conclusion(state, f"{after} is {state} than {before}: {told}.", ONE_EACH, beside if pros or cons else "")


def _moved(changes: Sequence[FindingChange], words: tuple[str, str]) -> dict[FindingChange, float]:
    """The findings that so changed by a notable share of the time, with that share; the largest first.

    Wrong results lose no time and weigh as much as all of it. What the recorder delayed says nothing of the program.
    """
    shares = {}
    for one in changes:
        if one.what not in words or one.cause == PROFILER:
            continue
        share = abs(one.share_after - one.share_before)
        if _wrong_results(one):
            share = 1.0
        if share >= OF_WEIGHT:
            shares[one] = share
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _wrong_results(change: FindingChange) -> bool:
    return change.severity == "critical" and not change.lost_before_ns and not change.lost_after_ns


def _said(moved: Mapping[FindingChange, float]) -> str:
    first, rest = next(iter(moved)), len(moved) - 1
    title = f"\u201c{first.title.rstrip('.').partition(': ')[0]}\u201d"  # the list below has the whole title
    before, after = percent(first.share_before), percent(first.share_after)
    sure = _sure(first)
    if first.what in ("less", "more"):
        text = f"{title} costs {after} of the serving window instead of {before} ({sure})"
    else:
        lost = f"cost: {before if first.what == 'gone' else after} of the serving window"
        figure = "results at stake" if _wrong_results(first) else lost
        text = f"{title} is {first.what} ({figure}; {sure})"
    if not rest:
        return text
    now = "less" if first.what in ("gone", "less") else "more"
    return f"{text}, and {f'{rest} other findings cost' if rest > 1 else 'another finding costs'} {now} than before"


def _sure(change: FindingChange) -> str:
    if change.cause in WAITS_LEFT and change.confidence == "certain":
        return f"{WAIT_MEASURED}, its cause is not"
    return "cause not known" if change.confidence == "cannot tell" else f"cause {change.confidence}"


def _costs(cost: SubmissionCost | None) -> str:
    if cost is None:
        return f"no submitting call occurs {LEAST} times in both"
    sure = f"over all calls, 95% interval {interval(cost.moved)}"
    if cost.moved.verdict == "same":
        return f"a typical submission takes as long as before ({sure})"
    text = f"a typical submission is {_faster(cost.moved.ratio)} ({sure}"
    does = "costs" if cost.moved.ratio > 1 else "saves"
    weight = f"which {does} the threads {percent(cost.share)} of their time"
    return f"{text}, which may be chance)" if cost.moved.verdict == "unsure" else f"{text}), {weight}"


def _faster(ratio: float) -> str:
    """How many times faster or slower; `ratio` is the time after over the time before."""
    return f"{number_text(1 / ratio)} times faster" if ratio < 1 else f"{number_text(ratio)} times slower"
