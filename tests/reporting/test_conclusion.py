"""Whether the second of two recordings is better: the sentence that `kvprobe diff` opens with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvprobe.diagnosis.finding import Finding
from kvprobe.diagnosis.verdict import MissingPart
from kvprobe.reporting.compare import FindingChange, Shift, SubmissionCost, compare_findings
from kvprobe.reporting.compared import costs_text, verdict
from kvprobe.reporting.conclusion import Conclusion, conclude
from kvprobe.reporting.units import TIMES_SIGN


def change(what: str, before: float, after: float, cause: str = "pageable_memory", severity: str = "warning"):
    lost = int(before * 1e9), int(after * 1e9)
    return FindingChange(cause, what, "200 copies blocked.", *lost, before, after, severity, "certain")


def cost(ratio: float, verdict: str, share: float) -> SubmissionCost:
    return SubmissionCost(Shift(2000.0, 2000.0 * ratio, ratio, ratio * 0.9, ratio * 1.1, verdict), share)


def said(*changes: FindingChange, at: SubmissionCost | None = None, **missing: MissingPart) -> Conclusion:
    return conclude("a", "b", changes, at, missing)


AS_BEFORE = cost(1.0, "same", 0.0)


def test_what_is_better_by_how_much_and_how_sure() -> None:
    one = said(change("gone", 0.47, 0.0), change("less", 0.05, 0.01, "unexplained"), at=cost(0.5, "faster", 0.02))
    assert one.state == "better"
    assert one.sentence.replace(TIMES_SIGN, "x") == (
        "b is better than a: “200 copies blocked” is gone (cost: 47% of the serving window; cause certain), and "
        "another finding costs less than before, and a typical submission is 2 times faster (over all calls, 95% "
        "interval 1.82x to 2.22x), which saves the threads 2.0% of their time."
    )
    assert said(change("more", 0.05, 0.3), at=AS_BEFORE).sentence.startswith(
        "b is worse than a: “200 copies blocked” costs 30% of the serving window instead of 5.0% (cause certain), and "
        "a typical "
    )


def test_a_wait_without_a_cause_of_its_own_is_measured_and_no_cause() -> None:
    wait = replace(change("gone", 0.47, 0.0, "waiting_for_copies"), confidence="certain")
    assert (
        "is gone (cost: 47% of the serving window; the wait is measured, its cause is not)"
        in said(wait, at=AS_BEFORE).sentence
    )
    untold = replace(change("gone", 0.47, 0.0, "unexplained"), confidence="cannot tell")
    assert "is gone (cost: 47% of the serving window; cause not known)" in said(untold, at=AS_BEFORE).sentence


def test_a_page_sets_what_submissions_cost_below_the_headline() -> None:
    one = said(change("gone", 0.47, 0.0), at=cost(1.5, "slower", 0.001))
    head = verdict(one, [], [])
    assert (
        head.headline
        == "b is better than a: “200 copies blocked” is gone (cost: 47% of the serving window; cause certain)."
    )
    assert head.detail.startswith("A typical submission is 1.50 times slower")
    assert "With one recording of each" in head.detail
    alone = said(at=cost(1.5, "slower", 0.1))
    assert verdict(alone, [], []).headline == alone.sentence


def test_what_is_small_beside_the_gain_is_told_and_not_held_against_it() -> None:
    one = said(change("gone", 0.9, 0.0), change("new", 0.0, 0.02, "unexplained"), at=cost(1.5, "slower", 0.03))
    assert one.state == "better"
    assert "though a typical submission is 1.50 times slower" in one.sentence.replace(TIMES_SIGN, "x")
    assert said(change("gone", 0.9, 0.0), change("new", 0.0, 0.2, "unexplained"), at=AS_BEFORE).state == "mixed"
    assert said(change("gone", 0.1, 0.0), at=cost(3.0, "slower", 0.1)).state == "mixed"


def test_wrong_results_weigh_more_than_any_time() -> None:
    wrong = change("new", 0.0, 0.0, "load_not_ordered", "critical")
    one = said(wrong, change("gone", 0.05, 0.0), at=AS_BEFORE)
    assert one.state == "worse"
    assert "results at stake" in one.sentence


def test_less_than_a_hundredth_of_the_time_decides_nothing_nor_does_the_profiler() -> None:
    for one in (change("new", 0.0, 0.009), change("new", 0.0, 0.5, "profiler_overhead")):
        assert said(one, at=AS_BEFORE).state == "same"
    assert said(at=cost(2.0, "slower", 0.001)).state == "same"
    assert said(at=cost(2.0, "slower", 0.02)).state == "worse"


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (
            said(change("undecided", 0.4, 0.0), at=AS_BEFORE, b=MissingPart("it is cut off", "record again")),
            "of b, it is cut",
        ),
        (said(), "no submitting call occurs 40 times in both"),
        (said(at=cost(1.4, "unsure", 0.1)), "which may be chance"),
    ],
)
def test_what_cannot_be_compared_is_undecided(one: Conclusion, why: str) -> None:
    assert one.state == "undecided"
    assert one.sentence.startswith("Whether b is better than a is undecided: ")
    assert why in one.sentence


def test_less_by_a_trifle_of_the_window_is_as_before() -> None:
    """A thread lost more than before and a GPU waited a thousandth less for it: that is no less."""

    def found(ms: int, share: float) -> list[Finding]:
        made = Finding("synchronisation", "waits", "info", "likely", ms * 1_000_000, (), ())
        return [replace(made, cost_share=share)]

    assert [one.what for one in compare_findings(found(128, 0.002), found(130, 0.001))] == ["same"]
    assert [one.what for one in compare_findings(found(128, 0.02), found(130, 0.01))] == ["less"]


@pytest.mark.parametrize(
    ("small", "what"), [(0.09, "more"), (0.115, "same"), (0.011, "new")], ids=["below it", "almost at it", "a trifle"]
)
def test_what_was_below_the_limit_of_a_finding_is_no_nothing(small: float, what: str) -> None:
    """A cost of 9% that became 12% has grown by a third; only the report's limit lies in between."""
    cause, ns = "waiting_for_host", round(1e9 * small)
    after = [replace(Finding(cause, "waited", "warning", "certain", 120_000_000, (), ()), cost_share=0.12)]
    (one,) = compare_findings([], after, small_before={cause: (ns, small)})
    assert (one.what, one.lost_before_ns, one.share_before, one.below_limit) == (what, ns, small, "before")
    assert "below the limit of a finding" in costs_text(one)[0] and "below" not in costs_text(one)[1]
    (other,) = compare_findings(after, [], small_after={cause: (ns, small)})
    assert other.what == {"more": "less", "same": "same", "new": "gone"}[what] and other.below_limit == "after"
