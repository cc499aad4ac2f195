"""Is offload helping: from events to the page, the live view and the sentence; what was not seen is undecided."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvprobe.commands.top import Offloads, as_object
from kvprobe.diagnosis import offload_benefit
from kvprobe.diagnosis.offload_benefit import Benefit, of_events
from kvprobe.recordings.model import Direction, Recording, Table
from kvprobe.reporting.recorded import view
from tests.examining import examination

SEEN = {
    "requests": 4,
    "prompt_tokens": 4000,
    "gpu_hit_tokens": 1000,
    "hit_tokens": 1500,
    "stored_blocks": 100,
    "loaded_blocks": 60,
    "unread_blocks": 20,
    "held_unread_blocks": 30,
    "waits": 3,
    "waited_ns": 400_000_000,
    "prefill_ns_per_token": 1_000_000.0,
}


def one(**more: object) -> Benefit:
    (found,) = of_events([{"server": "vllm", "source": "OffloadingConnector", **SEEN, **more}])
    return found


def test_it_helps_where_prefill_saved_exceeds_what_was_waited() -> None:
    found = one()
    assert (found.hit_share, found.wasted_share, found.saved_ns) == (0.5, 0.2, 1.5e9)
    assert found.sentence == (
        "Offload by vllm's OffloadingConnector helps: 50% of the prompt tokens that the GPU lacked came from it, about "
        "1.50 s of prefill saved, 400 ms spent waiting for loads. 20% of what was stored was evicted before it was "
        "loaded."
    )
    assert one(waited_ns=2_000_000_000).conclusion == "does not help"


def test_without_a_hit_it_does_not_help() -> None:
    found = one(hit_tokens=0, loaded_blocks=None, unread_blocks=100, waits=None, waited_ns=None)
    assert found.sentence == (
        "Offload by vllm's OffloadingConnector does not help: none of 4,000 prompt tokens came from it. 100% of what "
        "was stored was evicted before it was loaded."
    )


@pytest.mark.parametrize(
    ("unseen", "words"),
    [
        ("hit_tokens", "which requests it served"),
        ("prefill_ns_per_token", "what prefill costs"),
        ("waited_ns", "waited"),
    ],
)
def test_what_was_not_seen_leaves_it_undecided(unseen: str, words: str) -> None:
    found = one(**{unseen: None})
    assert found.conclusion == "undecided" and words in found.sentence


def test_a_cache_server_knows_no_prefill_and_says_where_a_load_pays() -> None:
    found = one(gpu_hit_tokens=None, prefill_ns_per_token=None, unread_blocks=None, waited_ns=60_000_000)
    assert found.conclusion == "undecided" and found.hit_share == 0.375
    assert found.sentence.endswith(
        "(no step with a prompt, or too few). 38% of the prompt tokens came from it, 40.0 µs waited for each: it pays "
        "where prefill takes longer."
    )
    assert "waited for each" not in one(prefill_ns_per_token=None, waits=None, waited_ns=None).sentence


def test_processes_are_added_and_damaged_figures_are_not_seen() -> None:
    events = [{"server": "vllm", "source": "C", **SEEN} for _ in range(2)]
    events.append({"server": "vllm", "source": "C", "hit_tokens": "many", "waited_ns": -5})
    (found,) = of_events(events)
    assert (found.hit_tokens, found.waited_ns, found.prefill_ns_per_token) == (3000, 800_000_000, 1e6)


def recording(**more: object) -> Recording:
    made = Recording([], names=["", "vllm", "OffloadingConnector"])
    row = {**dict.fromkeys(("stored_bytes", "loaded_bytes", "unread_bytes"), -1), **SEEN, **more}
    made.tables["offload"] = Table("offload", {"server": [1], "source": [2], **{k: [v] for k, v in row.items()}})
    return made


def test_bytes_come_from_the_transfers_where_the_scheduler_does_not_know_them() -> None:
    made = recording()
    ways = [Direction.H2D, Direction.D2H]
    columns = {"start_ns": [0, 0], "end_ns": [9, 9], "direction": ways, "bytes": [600, 1000], "one_in": [1, 16]}
    made.tables["transfers"] = Table("transfers", columns)
    (found,) = offload_benefit.of_recording(made)
    assert (found.loaded_bytes, found.stored_bytes, found.wasted_bytes) == (600, 16_000, 3_200)


def test_the_page_has_one_table_and_the_verdict_a_sentence() -> None:
    shown = view(recording(waited_ns=-1), examination(recording(waited_ns=-1)))
    (section,) = [section for section in shown.sections if section.id == "offload"]
    (row,) = section.tables[0].rows
    assert [cell.text for cell in row][:2] == ["vllm OffloadingConnector", "undecided"]
    assert "Whether offload by vllm's OffloadingConnector helps is undecided" in shown.verdict.detail
    assert not [
        section
        for section in view(Recording([], names=[""]), None).sections
        if section.id == "offload" and section.tables
    ]


def test_the_live_view_reads_what_is_new(tmp_path: Path) -> None:
    event = {"t_ns": 1, "kind": "offload", "server": "vllm", "source": "C", **SEEN}
    file = tmp_path / "events-7.jsonl"
    file.write_text(json.dumps(event, separators=(",", ":")) + "\n" + '{"kind":"offload","cut')
    offloads, views = Offloads(), [SimpleNamespace(path=str(tmp_path / "ring-7.kvp"))]
    assert offloads.look(views)[0].hit_tokens == 1500
    with file.open("w") as again:
        again.write(json.dumps(event, separators=(",", ":")) + "\n")
        again.write(json.dumps({**event, "hit_tokens": 2000}, separators=(",", ":")) + "\n")
    found = offloads.look(views)
    assert found[0].hit_tokens == 2000
    assert as_object([], found)["offload"][0]["conclusion"] == "helps"
