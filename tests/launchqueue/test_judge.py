"""Where each rule of the judge turns: at its threshold it concludes one thing, and just beside it the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvprobe.launchqueue import constants as c
from kvprobe.launchqueue.evidence import (
    Deepest,
    DepthStep,
    Evidence,
    Flood,
    HeldAt,
    InBurst,
    Incomplete,
    Labels,
    LiveSums,
    LiveWindow,
    Made,
    MetDepths,
    NumberedLaunches,
    OtherSlowCalls,
    OverStreams,
    Paced,
    Pinned,
    Plateau,
    Regular,
    SharedChannel,
    StoodStill,
    Together,
    Transfers,
)
from kvprobe.launchqueue.judge import QueueConclusion, conclude, many, overall

NO, MAYBE, FULL = "not full", "cannot tell", "full"

PLATEAU = Plateau(1_021, 300, 1_020, 9_000_000, at_pin=400, aligned=0.9, chance=0.2, drained=0.9, in_graphs=0.0)
CHANCE = replace(PLATEAU, chance=c.TELLING_CHANCE, drained=c.DRAINED_SHARE, at_pin=c.LEAST_SEEN)
REGULAR = Regular(1_000, 1_000, 200, 1, slow=40, top=80, slow_below=0.01, delays=0, gathered=0.0)
DELAYED = replace(REGULAR, depth=0, slow=40, top=80, delays=c.LEAST_DELAYS, gathered=0.6)
STOOD = StoodStill(1_000, 1_000, fences=1, delays=0)
CHANNEL = SharedChannel(known=False, calls=40, streams=2, roomy=20)
MET = MetDepths(950.0, 1_000.0, 1_050.0, times=2, least=200.0, usual=(900.0, 1_250.0))
PACED = Paced(1_000, ((1_000.0, 500.0, 20), (300.0, 500.0, 10)))
STEP = DepthStep(1_000, 40, 80, slow_below=1, below=100, passed=10, lost_ns=5_000_000, shallowest=990, how="counted")
PINNED = Pinned(1_009, 1_023, 1_800, 289, 1_900, 1.2, 0.5, (1_000, 1_026), slow=1_700, lost_ns=5_000_000)
HELD = HeldAt(2, 60_000_000, 1_019, 1_021, elsewhere=1, elsewhere_ns=60_000_000)
BURST = InBurst(bursts=4, fits=3, proven=False, calls=9, lost_ns=3_000_000, first=1_020, last=1_021, queues="1,021")
FLOOD = Flood(
    longest=40_000,
    waits=300,
    calls=10_000,
    lost_ns=25_000_000,
    spent_ns=60_000_000,
    times=1.25,
    spread=0.5,
    pauses=5,
    slow_after=1,
    onsets=2,
    misfits=1,
    seen_waiting=False,
    slow_before=1,
    before=100,
    alone=False,
    no_cpu=0.1,
)
NUMBERED = NumberedLaunches(slow=5, lost_ns=8_000_001, early_ns=2_000_000, slow_span=100, first=1_021, capacity=1_021)
REST = OtherSlowCalls(1_000_001, 0, 100_000_000, "calls", "reckoned", deepest=900, depth=0, top=0)
OVER = OverStreams(submitted=1_800, own=700, channels=(2,), after_event=True)
LIVE = LiveWindow(
    longest_on_cpu_ns=0,
    blocked=0,
    lost_ns=0,
    span_ns=10_000_000,
    on_cpu=0,
    on_cpu_lost_ns=0.0,
    on_cpu_span_ns=10_000_000,
    top_calls=100.0,
    top_slow=0.0,
    top_mean_ns=1_000.0,
    room_odds=0.01,
    room_mean_ns=1_000.0,
    baseline_ns=1_000.0,
)
LIKELY = {"top_calls": 80.0, "top_slow": 8.0}
DEARER = {"top_calls": 512.0, "top_slow": 8.0, "top_mean_ns": 1_500.0}

TURNS: list[tuple[Evidence, dict[str, Any], str]] = [
    # counts alone
    (Made(179), {}, NO),
    (Made(180), {}, MAYBE),
    (Made(199, 1_000), {}, NO),
    (Made(200, 1_000), {}, MAYBE),
    (Made(90, 100), {}, MAYBE),
    (Made(89, 100), {}, NO),
    (Incomplete(()), {}, NO),
    (Incomplete(("it was cut off",)), {}, MAYBE),
    (Deepest(()), {}, NO),
    (Deepest((199,)), {}, NO),
    (Deepest((200,)), {}, MAYBE),
    (Deepest((199, 199, 199, 199)), {}, NO),
    (Deepest((3, 3, 3, 3, 3)), {}, NO),
    (Deepest((4, 3, 3, 3, 3)), {}, MAYBE),
    (Together(0, 0), {}, NO),
    (Together(1, 1_000), {}, MAYBE),
    (Labels(0, 5, 5, False), {}, NO),
    (Labels(1, 5, 5, False), {}, FULL),
    # the plateau of a recorded device
    (PLATEAU, {}, FULL),
    (PLATEAU, {"deepest": 15}, NO),
    (PLATEAU, {"deepest": 16}, FULL),
    (PLATEAU, {"slow": 0}, NO),
    (PLATEAU, {"in_graphs": 0.5}, FULL),
    (PLATEAU, {"in_graphs": 0.51}, MAYBE),
    (PLATEAU, {"slow": 5}, FULL),
    (PLATEAU, {"slow": 4}, MAYBE),
    (PLATEAU, {"slow": 4, "lost_ns": 1_000_000}, NO),
    (PLATEAU, {"slow": 4, "lost_ns": 1_000_001}, MAYBE),
    (PLATEAU, {"aligned": 0.5, "chance": 0.25}, FULL),
    (PLATEAU, {"aligned": 0.45, "chance": 0.25}, FULL),
    (PLATEAU, {"aligned": 0.44, "chance": 0.25}, MAYBE),
    (PLATEAU, {"aligned": 0.78, "chance": 0.59}, MAYBE),
    (CHANCE, {}, FULL),
    (CHANCE, {"aligned": 0.0}, FULL),
    (CHANCE, {"drained": 0.79}, MAYBE),
    (CHANCE, {"at_pin": 19}, MAYBE),
    # regular returns
    (REGULAR, {}, FULL),
    (REGULAR, {"deepest": 901}, FULL),
    (REGULAR, {"deepest": 899}, NO),
    (REGULAR, {"slow": 4, "slow_below": 0.0}, FULL),
    (REGULAR, {"slow": 3, "slow_below": 0.0}, NO),
    (REGULAR, {"slow_below": 0.1}, FULL),
    (REGULAR, {"slow_below": 0.101}, NO),
    (REGULAR, {"top": 0, "slow_below": 0.0}, FULL),
    (REGULAR, {"top": 0, "slow_below": 0.01}, NO),
    (REGULAR, {"deepest": 1_099}, FULL),
    (REGULAR, {"deepest": 1_101}, NO),
    (REGULAR, {"deepest": 1_450}, NO),
    (REGULAR, {"deepest": 1_801, "streams": 2}, FULL),
    (REGULAR, {"deepest": 1_799, "streams": 2}, NO),
    (REGULAR, {"deepest": 2_199, "streams": 2}, FULL),
    (REGULAR, {"deepest": 2_000, "streams": 1}, NO),
    (DELAYED, {}, FULL),
    (DELAYED, {"deepest": 200}, FULL),
    (DELAYED, {"deepest": 199}, NO),
    (DELAYED, {"depth": 1_000, "deepest": 900}, FULL),
    (DELAYED, {"depth": 1_000, "deepest": 899}, NO),
    (DELAYED, {"top": 81}, NO),
    (DELAYED, {"delays": 15}, NO),
    (DELAYED, {"slow": 15, "top": 30, "delays": 40}, NO),
    (DELAYED, {"slow": 16, "top": 32, "delays": 40}, FULL),
    (DELAYED, {"gathered": 0.5}, NO),
    (Regular(0, 0, 0, 1, 4, 80, 0.0, 0, 0.0), {}, NO),  # no depth is known: that nothing is outstanding is none
    (Regular(0, 0, 0, 2, 4, 80, 0.0, 0, 0.0), {}, NO),
    # long calls while the stream stood still
    (STOOD, {}, FULL),
    (STOOD, {"fences": 0}, NO),
    (STOOD, {"fences": 0, "delays": 1}, FULL),
    (STOOD, {"deepest": 900}, FULL),
    (STOOD, {"deepest": 899}, NO),
    (STOOD, {"depth": 500, "deepest": 899}, FULL),
    (STOOD, {"depth": 500, "deepest": 899, "fences": 0, "delays": 1}, NO),
    (STOOD, {"depth": 500, "deepest": 900, "fences": 0, "delays": 1}, FULL),
    (STOOD, {"depth": 0, "deepest": 200}, FULL),
    (STOOD, {"depth": 0, "deepest": 199}, NO),
    # streams that may share a channel
    (CHANNEL, {}, FULL),
    (CHANNEL, {"roomy": 19}, NO),
    (CHANNEL, {"streams": 1}, NO),
    (CHANNEL, {"known": True, "streams": 1, "roomy": 0}, FULL),
    (CHANNEL, {"known": True, "calls": 0, "roomy": 0}, NO),
    (CHANNEL, {"calls": 0, "roomy": 0}, NO),
    # a step at one depth
    (STEP, {}, FULL),
    (STEP, {"depth": 16}, FULL),
    (STEP, {"depth": 15}, NO),
    (STEP, {"below": 20, "slow_below": 0}, FULL),
    (STEP, {"below": 19, "slow_below": 0}, NO),
    (STEP, {"slow_below": 10}, FULL),
    (STEP, {"slow_below": 11}, NO),
    (STEP, {"top": 1_333, "slow_below": 0}, FULL),
    (STEP, {"top": 1_334, "slow_below": 0}, NO),
    (STEP, {"passed": 11}, NO),
    (STEP, {"slow": 5, "top": 10, "passed": 1}, FULL),
    (STEP, {"slow": 4, "top": 8, "passed": 0}, NO),
    (STEP, {"top": 0}, NO),
    # a depth that is reckoned at the calls' own pace
    (MET, {}, FULL),
    (MET, {"times": 0, "middle": 0.0}, NO),
    (MET, {"times": 1}, FULL),
    (MET, {"low": 800.0}, FULL),
    (MET, {"low": 300.0, "middle": 400.0, "high": 380.0}, FULL),
    (MET, {"low": 300.0, "middle": 400.0, "high": 381.0}, NO),
    (MET, {"low": 400.0, "middle": 400.0, "high": 400.0, "times": 1}, NO),
    (MET, {"low": 200.0, "middle": 200.0, "high": 200.0}, FULL),
    (MET, {"low": 199.0, "middle": 199.0, "high": 199.0}, NO),
    (MET, {"middle": 900.0, "times": 1}, FULL),
    (MET, {"middle": 899.0, "times": 1}, NO),
    (MET, {"middle": 1_250.0, "times": 1}, FULL),
    (MET, {"middle": 1_251.0, "times": 1}, NO),
    (PACED, {}, FULL),
    (PACED, {"onsets": ((1_000.0, 500.0, 19), (300.0, 500.0, 10))}, NO),
    (PACED, {"onsets": ((1_000.0, 499.0, 20),)}, NO),
    (PACED, {"onsets": ((850.0, 500.0, 20),)}, FULL),
    (PACED, {"onsets": ((849.0, 500.0, 20),)}, NO),
    (PACED, {"onsets": ((980.0, 30.0, 20), (1_000.0, 500.0, 1))}, FULL),
    (PACED, {"onsets": ((979.0, 30.0, 20), (1_000.0, 500.0, 1))}, NO),
    (PACED, {"onsets": ((950.0, 100.0, 20), (1_000.0, 500.0, 1))}, FULL),
    (PACED, {"onsets": ((949.0, 100.0, 20), (1_000.0, 500.0, 1))}, NO),
    (PACED, {"onsets": ((1_000.0, 0.0, 20),)}, NO),  # how many slots were free is not known
    (PACED, {"onsets": ()}, NO),
    # a count that gathers at the depth
    (PINNED, {}, FULL),
    (PINNED, {"calls": 1_445}, FULL),
    (PINNED, {"calls": 1_444}, NO),
    (PINNED, {"calls": 20, "elsewhere": 4}, FULL),
    (PINNED, {"calls": 19, "elsewhere": 3}, NO),
    (PINNED, {"dearer": 1.1}, FULL),
    (PINNED, {"dearer": 1.09}, NO),
    (PINNED, {"dearer": 1.0, "inside": 0.8}, FULL),
    (PINNED, {"dearer": 1.0, "inside": 0.79}, NO),
    (PINNED, {"below": 19, "dearer": 0.0}, FULL),
    (PINNED, {"below": 19, "dearer": 0.0, "calls": 512, "elsewhere": 0}, FULL),
    (PINNED, {"below": 19, "dearer": 0.0, "calls": 511, "elsewhere": 0}, NO),
    (PINNED, {"least": 985, "most": 1_000}, FULL),
    (PINNED, {"least": 984, "most": 999}, NO),
    (PINNED, {"least": 1_026, "most": 1_040}, FULL),
    (PINNED, {"least": 1_027, "most": 1_041}, NO),
    (PINNED, {"slow": 1, "lost_ns": 3_000}, FULL),
    (PINNED, {"slow": 0, "lost_ns": 0}, NO),
    # long waits at the depth
    (HELD, {}, FULL),
    (HELD, {"elsewhere_ns": 60_000_001}, NO),
    (HELD, {"calls": 1}, NO),
    (HELD, {"calls": 0, "lost_ns": 0, "elsewhere": 0, "elsewhere_ns": 0}, NO),
    # the number in its burst
    (BURST, {}, FULL),
    (BURST, {"bursts": 5}, NO),
    (BURST, {"fits": 4, "bursts": 6}, FULL),
    (BURST, {"fits": 2, "bursts": 3}, NO),
    (BURST, {"fits": 2, "bursts": 2}, NO),
    (BURST, {"fits": 1, "bursts": 1, "proven": True}, FULL),
    (BURST, {"fits": 1, "bursts": 2, "proven": True}, NO),
    (BURST, {"fits": 0, "bursts": 0, "proven": True}, NO),
    # a flood
    (FLOOD, {}, FULL),
    (FLOOD, {"spent_ns": 60_000_001}, NO),
    (FLOOD, {"waits": 600, "spent_ns": 100_000_000}, FULL),
    (FLOOD, {"waits": 600, "spent_ns": 100_000_001}, NO),
    (FLOOD, {"waits": 299, "spent_ns": 59_000_000, "before": 0, "alone": True}, NO),
    (FLOOD, {"spread": 0.51}, NO),
    (FLOOD, {"slow_after": 2}, NO),
    (FLOOD, {"slow_after": 2, "pauses": 4}, FULL),
    (FLOOD, {"slow_after": 2, "pauses": 6}, FULL),
    (FLOOD, {"slow_before": 2}, NO),
    (FLOOD, {"slow_before": 1, "before": 20}, NO),
    (FLOOD, {"slow_before": 0, "before": 20}, FULL),
    (FLOOD, {"slow_before": 0, "before": 19}, NO),
    (FLOOD, {"slow_before": 9, "before": 19, "alone": True}, FULL),
    (FLOOD, {"misfits": 2}, NO),
    (FLOOD, {"onsets": 1, "misfits": 1}, NO),
    (FLOOD, {"onsets": 0, "misfits": 0}, NO),
    (FLOOD, {"onsets": 0, "misfits": 0, "seen_waiting": True}, FULL),
    (FLOOD, {"no_cpu": 0.11}, MAYBE),
    # numbered launches
    (NUMBERED, {}, FULL),
    (NUMBERED, {"slow": 4}, NO),
    (NUMBERED, {"slow": 6, "slow_span": 200}, FULL),
    (NUMBERED, {"slow": 6, "slow_span": 201}, NO),
    (NUMBERED, {"lost_ns": 8_000_000}, NO),
    (NUMBERED, {"capacity": 0}, MAYBE),
    (NUMBERED, {"capacity": 900, "usual": (900.0, 1_250.0)}, FULL),
    (NUMBERED, {"capacity": 899, "usual": (900.0, 1_250.0)}, MAYBE),
    (NUMBERED, {"capacity": 1_251, "usual": (900.0, 1_250.0)}, MAYBE),
    # what is slow for no reason that is seen
    (REST, {}, MAYBE),
    (REST, {"slow_ns": 1_000_000}, NO),
    (REST, {"slow_ns": 2_000_000, "span_ns": 200_000_000}, NO),
    (REST, {"slow_ns": 2_000_001, "span_ns": 200_000_000}, MAYBE),
    (REST, {"slow_ns": 3_000_000, "no_cpu_ns": 2_000_000}, NO),
    (REST, {"slow_ns": 3_000_000, "no_cpu_ns": 1_999_999}, MAYBE),
    (REST, {"depth": 1_021}, NO),
    (REST, {"depth": 1_021, "top": 1}, MAYBE),
    # a burst over streams
    (OVER, {}, FULL),
    (OVER, {"submitted": 1_799}, NO),
    (OVER, {"submitted": 2_122}, FULL),
    (OVER, {"submitted": 2_123}, NO),
    (OVER, {"submitted": 1_500, "channels": (2, 4)}, NO),
    (OVER, {"submitted": 4_000, "channels": (2, 4)}, FULL),
    (OVER, {"own": 701}, NO),
    (OVER, {"after_event": False}, NO),
    # a running stream
    (LIVE, {}, NO),
    (LIVE, {"longest_on_cpu_ns": 2_000_000}, FULL),
    (LIVE, {"longest_on_cpu_ns": 1_999_999}, NO),
    (LIVE, {"on_cpu": 4, "on_cpu_lost_ns": 2_500_000.0}, FULL),
    (LIVE, {"on_cpu": 3, "on_cpu_lost_ns": 2_500_000.0}, NO),
    (LIVE, {"on_cpu": 4, "on_cpu_lost_ns": 2_499_999.0}, NO),
    (LIVE, {"blocked": 50, "lost_ns": 2_500_000}, FULL),
    (LIVE, {"blocked": 49, "lost_ns": 2_500_000}, NO),
    (LIVE, {"blocked": 50, "lost_ns": 2_499_999}, NO),
    (LIVE, {"blocked": 32, "lost_ns": 500_000, "span_ns": 2_000_000}, FULL),
    (LIVE, {"blocked": 31, "lost_ns": 500_000, "span_ns": 2_000_000}, NO),
    (LIVE, LIKELY, FULL),
    (LIVE, LIKELY | {"top_calls": 81.0}, NO),
    (LIVE, LIKELY | {"top_slow": 7.0, "top_calls": 40.0}, NO),
    (LIVE, LIKELY | {"top_slow": 8.0, "top_calls": 16.0, "room_odds": 0.33}, FULL),
    (LIVE, LIKELY | {"top_slow": 8.0, "top_calls": 16.0, "room_odds": 0.34}, NO),
    (LIVE, LIKELY | {"top_slow": 8.0, "top_calls": 24.0, "room_odds": 0.17}, NO),
    (LIVE, LIKELY | {"top_slow": 8.0, "top_calls": 8.0, "room_odds": 9.0}, FULL),
    (LIVE, LIKELY | {"top_slow": 8.0, "top_calls": 9.0, "room_odds": 3.0}, NO),
    (LIVE, LIKELY | {"top_slow": 9.0, "top_calls": 12.0, "room_odds": 1.0}, FULL),
    (LIVE, {"top_slow": 0.0, "top_calls": 0.0}, NO),
    (LIVE, DEARER, FULL),
    (LIVE, DEARER | {"top_calls": 511.0}, NO),
    (LIVE, DEARER | {"top_mean_ns": 1_499.0}, NO),
    (LIVE, DEARER | {"top_slow": 7.9}, NO),
    (LIVE, DEARER | {"baseline_ns": 1_001.0}, NO),
    (LIVE, DEARER | {"room_mean_ns": 1_001.0}, NO),
    (LiveSums(200.0, 1_000.0, 64, 64), {}, MAYBE),
    (LiveSums(199.0, 1_000.0, 64, 64), {}, NO),
    (LiveSums(200.0, 1_000.0, 63, 64), {}, NO),
    (LiveSums(200.0, 1_000.0, 100, 1_000), {}, MAYBE),
    (LiveSums(200.0, 1_000.0, 99, 1_000), {}, NO),
    (Transfers((900, 900), 1_000), {}, FULL),
    (Transfers((900, 899), 1_000), {}, NO),
    (Transfers((900, 900), 0), {}, NO),
]


@pytest.mark.parametrize(("evidence", "changed", "state"), TURNS, ids=range(len(TURNS)))
def test_a_rule_turns_where_it_says(evidence: Evidence, changed: dict[str, Any], state: str) -> None:
    assert conclude(replace(evidence, **changed)).state == state


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (Labels(3, 7, 7, False), "blocked by a full command buffer, with 7 submissions outstanding"),
        (Labels(3, 6, 7, True), "with 6 to 7 submissions outstanding (approximate: CUDA graphs are among them)"),
        (replace(PLATEAU, slow=0), "calls took no longer with up to 1,021 submissions outstanding than with a few"),
        (
            PLATEAU,
            "300 calls with 1,020 to 1,021 outstanding took 9.00 ms more than calls with few outstanding; 90% of",
        ),
        (replace(PLATEAU, shallowest=1_021), "300 calls with 1,021 outstanding took"),
        (replace(PLATEAU, deepest=9), "no call began with more than 9 others outstanding"),
        (CHANCE, "90% of them return when the stream moves on (60% would by chance)"),
        (replace(CHANCE, drained=0.7), "operations end so often that returning with one proves nothing"),
        (replace(CHANCE, at_pin=3), "operations end so often that returning with one proves nothing"),
        (REGULAR, "which is the depth of the queue as it was counted"),
        (DELAYED, "40 of 80 calls with up to 1,000 outstanding were slow, and the delay of their return"),
        (replace(STOOD, delays=2), "3 long calls with 1,000 outstanding"),
        (
            STEP,
            "40 calls with 990 or more submissions outstanding took 5.00 ms longer than usual; "
            "50% of the calls that meet that many are slow, and 1.0% of those that meet fewer",
        ),
        (BURST, "being its number 1,021 to 1,022: 1,021"),
        (replace(BURST, last=1_020), "being its number 1,021: 1,021"),
        (FLOOD, "and 3% of them took 1.2 times as long"),
        (LIVE, "0 slow calls, 0% of those there"),
        (LiveSums(200.0, 1_000.0, 64, 64), "calls lost 20% of the time"),
        (LiveSums(200.0, 0.0, 64, 64), "calls lost 0% of the time"),
        (Transfers((950, 900, 10), 1_000), "2 slow transfers had up to 950 of 1,000 outstanding"),
        (Transfers((), 1_000), "0 slow transfers had up to 0 of 1,000 outstanding"),
    ],
    ids=str,
)
def test_a_conclusion_says_its_numbers(evidence: Evidence, said: str) -> None:
    assert said in conclude(evidence).because


def test_the_worst_queue_speaks_for_a_recording() -> None:
    no, other, maybe, full = (QueueConclusion(state, str(i)) for i, state in enumerate((NO, NO, MAYBE, FULL)))  # type: ignore[arg-type]
    assert overall([(no, 9), (maybe, 1), (full, 2)]) == full and full.full
    assert overall([(no, 9), (maybe, 1)]) == maybe and not maybe.full
    assert overall([(no, 3), (other, 9)]) == other
    assert overall([]) == QueueConclusion(NO, "nothing was submitted to a stream")
    assert many([NO, FULL, MAYBE]) == FULL and many([MAYBE, NO]) == MAYBE and many([]) == NO  # type: ignore[list-item]
