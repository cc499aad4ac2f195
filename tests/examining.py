"""An examination with findings that a test makes up: of the recording's own account and window."""

from __future__ import annotations

from collections.abc import Iterable

from kvprobe.account import account_of
from kvprobe.diagnosis import Examination, Finding
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Recording


def examination(recording: Recording, findings: Iterable[Finding] = ()) -> Examination:
    joined = Joined(recording)
    return Examination(list(findings), [], account_of(joined), joined.serving)
