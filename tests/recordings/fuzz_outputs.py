"""What is shown of a recording: made as the commands make it, and no text of the recording steers who shows it."""

from __future__ import annotations


def check_outputs(recording: object, findings: object, queues: object) -> None:
    """Makes the page."""
    from kvprobe.reporting.page import build_page

    page = build_page(recording, findings=findings, queues=queues)
    assert "<script>alert(1)" not in page and "<img src=x" not in page
