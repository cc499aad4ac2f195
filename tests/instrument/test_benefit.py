"""What an offload brings: every count by hand, and that what is not seen stays unknown."""

from kvprobe.instrument import event_log
from kvprobe.instrument.benefit import BenefitTotals
from kvprobe.reuse.estimate import WHOLE
from kvprobe.reuse.sample import LOADED, STORED


def told(account: BenefitTotals) -> dict:
    with event_log.subscribed() as events:
        account.tell()
    return next(event for event in events if event["kind"] == "offload")


def test_what_was_not_seen_stays_unknown() -> None:
    account = BenefitTotals("toy.offload", "connector")
    account.loaded("ab")
    event = told(account)
    assert event["loaded_blocks"] == 2
    unknown = ("prompt_tokens", "hit_tokens", "stored_blocks", "unread_blocks", "waited_ns", "prefill_ns_per_token")
    assert [event[name] for name in unknown] == [None] * len(unknown)
    assert "held_unread_blocks" not in event


def test_an_account_that_saw_nothing_tells_nothing() -> None:
    with event_log.subscribed() as events:
        BenefitTotals("toy.offload", "connector").tell()
    assert not events


def test_blocks_that_nobody_loaded_are_counted_once_they_are_gone() -> None:
    account = BenefitTotals("toy.offload", "cache")
    account.stored("abcd", size_bytes=10)
    account.loaded("a")
    account.loaded("a")
    account.evicted("ab")
    account.stored("c")  # written over before anybody loaded it
    event = told(account)
    assert (event["stored_blocks"], event["stored_bytes"], event["loaded_blocks"]) == (5, 40, 2)
    assert (event["unread_blocks"], event["unread_bytes"]) == (2, 20)  # b and c
    assert event["held_unread_blocks"] == 2  # c again, and d


def test_a_request_counts_once_however_often_the_scheduler_asks() -> None:
    account = BenefitTotals("toy.offload", "cache")
    for hit in (600, 0):  # the second call comes when the load has ended
        account.admitted("r1", 1000, 100, hit)
    account.admitted("r2", 500, 0, 0)
    event = told(account)
    assert (event["requests"], event["prompt_tokens"], event["gpu_hit_tokens"], event["hit_tokens"]) == (
        2,
        1500,
        100,
        600,
    )


def test_a_wait_ends_once() -> None:
    account = BenefitTotals("toy.offload", "cache")
    account.waits("r1")
    account.arrived("r1")
    account.arrived("r1")
    account.arrived("stranger")
    account.waited(5_000_000)
    event = told(account)
    assert event["waits"] == 2 and event["waited_ns"] >= 5_000_000


def test_prefill_costs_what_large_steps_take_beyond_one_without_prefill() -> None:
    account = BenefitTotals("toy.offload", "cache")
    for tokens in (0, 1000, 0, 2000, 10, 1500):  # 1 us a token and 5 ms a step; small ones say little
        account.step(tokens, 5_000_000 + 1_000 * tokens)
    assert account.prefill_ns() == 1_000
    few = BenefitTotals("toy.offload", "cache")
    few.step(1000, 1_000_000)
    assert few.prefill_ns() is None


def test_uses_of_blocks_are_told_once_with_what_is_known_of_the_pool() -> None:
    account = BenefitTotals("toy.offload", "cache")
    account.stored("abc", size_bytes=10)
    account.loaded("a")
    account.evicted("b")
    account.stored("d", size_bytes=10)
    with event_log.subscribed() as events:
        account.tell()
        account.loaded("c")
        account.tell()
    first, second = (event for event in events if event["kind"] == "blocks")
    assert [what for _, _, what in first["notes"]] == [STORED, STORED, STORED, LOADED, STORED]
    assert first["notes"][0][1] == first["notes"][3][1]
    assert (first["blocks"], first["block_bytes"], first["threshold"]) == (3, 10, WHOLE)
    assert [what for _, _, what in second["notes"]] == [LOADED]
    assert (second["counts"]["loaded"], second["counts"]["stored"]) == (2, 4)
    assert account.reuse.uses == 6 and account.reuse.missed[-1] == 4  # every size of the metrics holds four blocks
