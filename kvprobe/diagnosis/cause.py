"""What a file of this folder that looks for a cause offers: `Cause`, and how one is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvprobe.account import Line
    from kvprobe.diagnosis.finding import Finding, NotLookedFor
    from kvprobe.diagnosis.joined import JoinedRecording

__all__ = ["Cause", "load_cause"]


class Cause(Protocol):
    """A cause's module. CAUSE and `find` are needed; what a module leaves out of the others is as it is here.

    Attributes:
        CAUSE: its name, which is its file's: `cause_of(__name__)`.
        OF_EXECUTIONS: whether it is told by what the device executed: not looked for in a recording without that.
        PROVES: the line of the account that a GPU's waiting belongs to where this cause explains it; None: as the
            account has it already.
        PREDICTS: whether a change can be told that helps, with what it saves.
    """

    CAUSE: str
    OF_EXECUTIONS: bool = False
    PROVES: Line | None = None
    PREDICTS: bool = True

    def find(self, joined: JoinedRecording) -> Finding | None:
        """The cause in this recording, None where it is not there."""
        ...

    def not_shown(self, joined: JoinedRecording) -> NotLookedFor | None:
        """Why this recording cannot show the cause, None where it can; `find` is not called where it cannot."""
        return None

    def open_question(self, joined: JoinedRecording) -> Finding | None:
        """What this cause cannot tell of calls that no other cause explains, asked before `unexplained` takes them."""
        return None


class _File(Cause):
    """A module as a `Cause`, complete."""

    def __init__(self, name: str) -> None:
        self._module = import_module(f"kvprobe.diagnosis.{name}")
        self.CAUSE = self._module.CAUSE
        for member in ("OF_EXECUTIONS", "PROVES", "PREDICTS", "not_shown", "open_question"):
            if hasattr(self._module, member):
                setattr(self, member, getattr(self._module, member))

    def find(self, joined: JoinedRecording) -> Finding | None:
        found: Finding | None = self._module.find(joined)
        return found


def load_cause(name: str) -> Cause:
    """The cause of this name, a member of CAUSES."""
    return _File(name)
