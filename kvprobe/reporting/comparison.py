"""Two recordings side by side: whether the second is better, and what changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.account import COPIES, HOST
from kvprobe.diagnosis import waiting_for_copies, waiting_for_host
from kvprobe.diagnosis.left import left_between_kernels
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.reporting.alike import compare_accounts, unlike
from kvprobe.reporting.compare import compare_calls, compare_findings, submission_cost
from kvprobe.reporting.conclusion import conclude

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.diagnosis.verdict import Verdict
    from kvprobe.output.recorded import DiffJson
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting.alike import LineChange
    from kvprobe.reporting.compare import CallChange, FindingChange
    from kvprobe.reporting.conclusion import Conclusion

__all__ = ["SideBySide", "compare_recordings"]

Side = tuple[str, "Recording", "Examination"]


@dataclass(frozen=True)
class SideBySide:
    """Two recordings side by side.

    Attributes:
        sides: name, recording and findings of each.
        lengths: ns of each one's serving window.
        verdicts: of each by itself.
        apart: in what they are not alike.
        lines: of their accounts.
        changes: of findings; `calls` of calls.
        calls: see there.
        conclusion: whether the second is better.
    """

    sides: tuple[Side, Side]
    lengths: tuple[int, int]
    verdicts: list[Verdict]
    apart: list[str]
    lines: list[LineChange]
    changes: list[FindingChange]
    calls: list[CallChange]
    conclusion: Conclusion

    def to_json(self, before: str, after: str) -> DiffJson:
        """All but the recordings; `before` and `after` are what they are called."""
        return {
            "before": before,
            "after": after,
            "span_before_ns": int(self.lengths[0]),
            "span_after_ns": int(self.lengths[1]),
            "conclusion": self.conclusion.to_json(),
            "verdict_before": self.verdicts[0].to_json(),
            "verdict_after": self.verdicts[1].to_json(),
            "unlike": self.apart,
            "account": [line.to_json() for line in self.lines],
            "findings": [change.to_json() for change in self.changes],
            "calls": [change.to_json() for change in self.calls],
        }


def compare_recordings(before: Side, after: Side, parts: tuple[Recording, Recording]) -> SideBySide:
    """Compares two recordings.

    Args:
        before: name, recording and findings of the one; `after` of the other.
        after: see there.
        parts: what of each is compared call by call: the recordings themselves, or those cut to a window.
    """
    (name, one, found_before), (other, two, found_after) = before, after
    lengths = one.window.span_ns if one.window else 0, two.window.span_ns if two.window else 0
    verdicts = [of_recording(one, found_before), of_recording(two, found_after)]
    tells = not verdicts[0].missing, not verdicts[1].missing
    changes = compare_findings(found_before, found_after, *tells, _left(found_before), _left(found_after))
    missing = {
        title: verdict.missing[0] for title, verdict in zip((name, other), verdicts, strict=True) if verdict.missing
    }
    return SideBySide(
        sides=(before, after),
        lengths=lengths,
        verdicts=verdicts,
        apart=unlike(one, two),
        lines=compare_accounts(found_before.account, found_after.account),
        changes=changes,
        calls=compare_calls(*parts),
        conclusion=conclude(name, other, changes, submission_cost(*parts, lengths), missing),
    )


def _left(found: Examination) -> dict[str, tuple[int, float]]:
    """Ns and share of the waits that no cause explains, by the cause that is named after them."""
    waits = ((waiting_for_copies.CAUSE, COPIES), (waiting_for_host.CAUSE, HOST))
    return {cause: left_between_kernels(found.account, lines) for cause, lines in waits}
