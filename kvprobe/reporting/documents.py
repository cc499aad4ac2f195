"""What `kvprobe stats --json` prints of a recording, put together for whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.diagnosis.startup import startup
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.output.recorded import StatsJson
from kvprobe.recordings.serving import serving_window

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.recordings.model import Recording
    from kvprobe.reporting.summaries import SummaryTable

__all__ = ["stats"]


def stats(recording: Recording, findings: Examination, tables: Sequence[SummaryTable], rows: int) -> StatsJson:
    """All that can be told of a recording; at most `rows` rows of each table, 0: all."""
    return {
        "source": [
            {"path": one.path, "format": one.format, "tool": one.tool, "command": one.command}
            for one in recording.source
        ],
        "machine": recording.machine,
        "machine_how": recording.machine_how,
        "account": findings.account.to_json(),
        "findings": [one.to_json() for one in findings],
        "tables": {one.report: one.to_json(rows) for one in tables},
        "verdict": of_recording(recording, findings).to_json(),
        "startup": startup(recording, recording.window or serving_window(recording)).to_json(),
        "notes": recording.notes,
        "lost": {str(row): int(count) for row, count in recording.lost.items()},
    }
