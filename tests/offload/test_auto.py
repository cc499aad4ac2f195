"""Auto: measure, change the rung, compare like with like, keep it or go back."""

import pytest

from kvprobe.offload.auto import COOL_DOWN_NS, LOOK_NS, REST, TRIAL, Auto
from kvprobe.offload.rungs import Costs, Rung, Sample, compare, decision_text

OWN, BATCH, POOLED = Rung("shared", "loop"), Rung("shared", "batch"), Rung("pooled", "loop")


class Clock:
    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


def auto(rungs=(OWN, BATCH, POOLED), depth=1000, **more):
    log, clock = [], Clock()

    def decide(what, why, **evidence):
        log.append((what, why, evidence))

    made = Auto(rungs, decide, depth=depth, baseline_ns=1000, now=clock, **{"slow_ns": 100_000, **more})
    return made, log, clock


def feed(one, count, per_copy, copies=500, outstanding=0, copy_ns=None, size=1 << 20, expected_ns=0):
    for _ in range(count):
        sample = Sample(copies, int(per_copy * copies), size, one.rung, outstanding, expected_ns=expected_ns)
        sample.copy_ns = copy_ns
        one.submitted(sample)
        if copy_ns:
            one.completed(sample)


def until_it_changes(one, **work):
    """On the rung in force; how many transfers that took."""
    rung = one.rung
    for count in range(1, 1000):
        feed(one, 1, **work)
        if one.rung != rung:
            return count
    raise AssertionError("it stays")


def trial(one, per_copy, count=8, first=None, **work):
    """Transfers on a new rung: the first one is not counted."""
    feed(one, 1, first or per_copy, **work)
    feed(one, count, per_copy, **work)


def test_healthy_transfers_change_nothing():
    one, log, _ = auto()
    feed(one, 1000, per_copy=150, copies=400)
    assert (one.rung, log) == (OWN, [])


def test_slow_submissions_far_from_the_depth_are_not_called_saturation():
    one, log, _ = auto()
    feed(one, 100, per_copy=5000, copies=16, outstanding=0)
    assert (one.rung, log) == (OWN, [])


def test_a_full_queue_is_named_cured_and_kept():
    one, log, _ = auto()
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == BATCH
    assert log[0][0] == "switch"
    assert log[0][2]["cause"] == "launch_queue_saturation"
    trial(one, per_copy=300)
    assert [entry[0] for entry in log] == ["switch", "keep"]
    assert log[1][2]["gain"] > 60
    feed(one, 1000, per_copy=300)
    assert len(log) == 2
    assert [(d.before, d.after) for d in one.decisions] == [(OWN, BATCH)]
    assert one.decisions[0].gain == 20_000 / 300


def test_no_gain_rolls_back_and_tries_the_next_rung_then_waits():
    one, log, clock = auto()
    feed(one, 2, per_copy=20_000, outstanding=900)
    trial(one, per_copy=19_000)
    assert one.rung == OWN
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == POOLED
    trial(one, per_copy=19_000)
    feed(one, 50, per_copy=20_000, outstanding=900)
    assert [entry[0] for entry in log] == ["switch", "rollback"] * 2 + ["note"]
    clock.ns += COOL_DOWN_NS
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == BATCH


def test_cheaper_submission_with_slower_copies_is_rolled_back():
    one, log, _ = auto()
    until_it_changes(one, per_copy=900, copy_ns=100_000)
    assert log[0][2]["cause"] == "small_copies"
    feed(one, 9, per_copy=300, copy_ns=200_000)
    assert [entry[0] for entry in log] == ["switch", "rollback"]
    assert "the copies themselves take 2.00 times as long" in log[1][1]


def test_copies_that_are_a_little_slower_count_together_with_their_submission():
    """vLLM 0.32, loads beside stores: 360 us to submit and 645 us on the device; 80 us and 775 us by the submitter."""
    one, log, _ = auto((OWN, POOLED), depth=0)
    until_it_changes(one, per_copy=720, copy_ns=645_000)
    trial(one, per_copy=160, copy_ns=775_000)
    assert [entry[0] for entry in log] == ["switch", "keep"]
    feed(one, 100, per_copy=160, copy_ns=775_000)
    assert one.rung == POOLED
    slow, log, _ = auto((OWN, POOLED), depth=0)
    until_it_changes(slow, per_copy=720, copy_ns=645_000)
    trial(slow, per_copy=160, copy_ns=945_000)  # more than submission has gained
    assert [entry[0] for entry in log] == ["switch", "rollback"]


def test_other_work_than_before_is_not_compared():
    one, log, _ = auto()
    feed(one, 2, per_copy=20_000, outstanding=900)
    trial(one, per_copy=300, copies=40)
    assert one.rung == OWN
    assert [entry[0] for entry in log] == ["switch", "return"]
    assert one.decisions[0].gain == 0


def costs(*samples):
    known = Costs()
    for sample in samples:
        cost = known.add(sample)
        if sample.copy_ns:
            cost.add_copies(sample)
    return known


def test_only_equal_sizes_are_compared_each_with_its_weight():
    """Small transfers cost more a copy: a rung that merely met larger ones has gained nothing."""
    before = costs(*[Sample(500, 500 * 150, 1 << 20, OWN)] * 8, *[Sample(16, 16 * 5000, 1 << 20, OWN)] * 8)
    large = [Sample(500, 500 * 50, 1 << 20, BATCH)] * 8
    seen = compare(before, costs(*large, Sample(4000, 4000 * 5000, 1 << 20, BATCH)))
    assert (seen.before_ns, seen.after_ns, seen.transfers) == (150, 50, 8)
    mixed = compare(before, costs(*large, Sample(16, 16 * 100, 1 << 20, BATCH)))
    assert mixed.before_ns == (8 * 500 * 150 + 16 * 5000) / (8 * 500 + 16)
    assert mixed.transfers == 9
    assert compare(before, costs(Sample(4000, 1, 1 << 20, BATCH))).transfers == 0


def test_one_blocked_call_among_many_is_weighed_with_all_of_them():
    """A call of 30 ms among 4,000 of 1 us: what it gained is told of the mean of all, not of the blocked one alone."""
    calls = [Sample(64, 64_000, 64 << 12, OWN)] * 63
    seen = compare(
        costs(*calls, Sample(64, 30_000_000, 64 << 12, OWN)), costs(*[Sample(64, 64 * 100, 64 << 12, POOLED)] * 8)
    )
    assert 80 < seen.submit_gain < 90


def test_a_line_of_the_log_says_which_rung_is_kept_and_what_it_is_compared_with():
    calls, handed = [Sample(64, 64_000, 64 << 12, OWN)] * 8, [Sample(64, 64, 64 << 12, POOLED)] * 8
    seen = compare(costs(*calls), costs(*handed))
    assert seen.gain == "over 8 transfers, a submission was 1,000 times cheaper"
    assert decision_text("keep", OWN, POOLED) == f"keep {POOLED} (before: {OWN})"
    assert decision_text("rollback", POOLED, OWN) == f"rollback {POOLED} -> {OWN}"


def test_what_copies_take_on_a_rung_is_as_predicted_until_it_is_measured():
    own = Sample(64, 64_000, 4 << 20, OWN, expected_ns=80_000, copy_ns=240_000)
    handed = Sample(64, 20_000, 4 << 20, POOLED)
    seen = compare(costs(own), costs(handed))
    assert (seen.copy_gain, seen.whole_gain) == (1, 304 / 100)
    handed.copy_ns = 480_000
    seen = compare(costs(own), costs(handed))
    assert (seen.copy_gain, seen.whole_gain) == (0.5, 304 / 500)


def test_what_a_caller_loses_to_a_transfer_later_counts_as_its_submission():
    """A stream that has to wait for it: a hand-over that costs more there than it saves is no gain."""
    one, log, _ = auto()
    until_it_changes(one, per_copy=2000)
    for _ in range(TRIAL + 1):
        sample = Sample(500, 20_000, 1 << 20, BATCH)
        one.submitted(sample)
        sample.waited(2_000_000)
    assert [entry[0] for entry in log] == ["switch", "rollback"]


def test_the_rung_that_calibration_chooses_is_tried_first():
    chosen = Rung("pooled", "auto")
    one, _, _ = auto((OWN, BATCH, chosen))
    until_it_changes(one, per_copy=20_000, outstanding=900)
    assert one.rung == chosen


def test_copies_far_below_the_calibrated_rate_are_a_cause_of_their_own():
    one, log, _ = auto((OWN, POOLED))
    feed(one, 20, per_copy=100, copy_ns=120_000, expected_ns=100_000)
    assert (one.rung, log) == (OWN, [])
    assert until_it_changes(one, per_copy=100, copy_ns=200_000, expected_ns=100_000) == 5
    assert log[0][2]["cause"] == "small_copies"
    trial(one, per_copy=110, copy_ns=100_000)
    assert log[-1][0] == "keep"
    assert "the copies were " in log[-1][1]


def test_a_caller_that_does_nothing_but_submit_is_a_cause_where_asked_for():
    one, log, clock = auto((OWN, POOLED), depth=0, slow_ns=0)
    while one.rung == OWN:
        clock.ns += 64 * 2000
        one.submitted(Sample(64, 64 * 1500, 64 << 12, one.rung, end_ns=clock.ns))
    assert log[0][2]["cause"] == "small_copies"


def test_submissions_that_outlast_another_methods_copies_are_a_cause_after_a_few_transfers():
    """64 copies of 16 KiB that cost 200 us to submit and that another method moves in 20 us: 0.3 ms of it is enough."""
    one, log, clock = auto((OWN, POOLED), depth=0, slow_ns=0)
    for _ in range(3):
        clock.ns += 230_000
        one.submitted(Sample(64, 200_000, 64 << 14, OWN, end_ns=clock.ns, expected_ns=20_000))
    assert one.rung == POOLED
    assert log[0][2]["cause"] == "small_copies"


def test_submissions_that_outlast_another_method_between_long_steps_change_nothing():
    """One such transfer in a step of 100 ms takes a five-hundredth of the caller's time."""
    one, log, clock = auto((OWN, POOLED), depth=0, slow_ns=0)
    for _ in range(1000):
        clock.ns += 100_000_000
        one.submitted(Sample(64, 200_000, 64 << 14, one.rung, end_ns=clock.ns, expected_ns=20_000))
    assert (one.rung, log) == (OWN, [])


def submit_behind_others(one, clock, count, outstanding, own_ns=240_000, step_ns=10_000_000):
    """64 copies of 64 KiB: submitted in 90 us, and another method moves them in 85 us."""
    for _ in range(count):
        clock.ns += step_ns
        one.submitted(Sample(64, 90_000, 4 << 20, OWN, outstanding, end_ns=clock.ns, expected_ns=85_000, own_ns=own_ns))


@pytest.mark.parametrize(("times", "enough"), [(50, 3), (3.1, 3), (2.5, 4), (2, 5), (1.7, 8)])
def test_the_slower_the_copies_wait_the_fewer_transfers_are_enough(times, enough):
    """Before the queue is full."""
    one, log, clock = auto((OWN, POOLED), depth=0)
    submit_behind_others(one, clock, enough - 1, outstanding=64, own_ns=int(times * 85_000))
    assert one.rung == OWN
    submit_behind_others(one, clock, 1, outstanding=64, own_ns=int(times * 85_000))
    assert one.rung == POOLED
    assert log[0][2]["cause"] == "small_copies"


def test_copies_of_a_slow_method_that_nothing_waits_for_change_nothing():
    """155 us of a step of 30 ms; or little, whatever waits."""
    one, log, clock = auto((OWN, POOLED), depth=0)
    submit_behind_others(one, clock, 1000, outstanding=0, step_ns=30_000_000)
    submit_behind_others(one, clock, 1000, outstanding=64, own_ns=100_000)
    assert (one.rung, log) == (OWN, [])


def test_what_is_not_active_changes_nothing():
    one, log, _ = auto(active=False)
    feed(one, 20, per_copy=20_000, outstanding=900)
    assert (one.rung, log) == (OWN, [])


def kept():
    """An auto that stands on a rung that proved itself, and judges it again."""
    one, log, clock = auto()
    until_it_changes(one, per_copy=20_000, outstanding=100, copy_ns=100_000)
    trial(one, per_copy=300, copy_ns=100_000)
    assert [entry[0] for entry in log] == ["switch", "keep"]
    clock.ns += LOOK_NS
    return one, log, clock


def test_a_kept_rung_is_left_only_when_it_stays_bad():
    one, log, clock = kept()
    feed(one, TRIAL, per_copy=60_000)
    for _ in range(8):
        feed(one, TRIAL, per_copy=300)
    assert one.rung == BATCH
    clock.ns += LOOK_NS
    assert until_it_changes(one, per_copy=60_000) == 2 * TRIAL
    assert log[-1][0] == "return"
    until_it_changes(one, per_copy=60_000)
    trial(one, per_copy=60_000)
    assert [entry[0] for entry in log[2:]] == ["return", "switch", "rollback"]


def test_a_kept_rung_whose_copies_are_slowed_by_other_work_is_measured_against_the_base_under_that_work():
    one, log, clock = kept()
    while one.rung == BATCH:
        feed(one, 1, per_copy=300, copy_ns=170_000)  # loads, since stores run at once
        clock.ns += LOOK_NS
    until_it_changes(one, per_copy=20_000, copy_ns=170_000)  # the server's own are as slow now
    trial(one, per_copy=300, copy_ns=170_000)
    assert [entry[0] for entry in log[2:]] == ["return", "switch", "keep"]
    assert "the copies themselves take 1." in log[2][1]


def test_a_kept_rung_is_left_for_a_new_measurement_less_and_less_often():
    one, _, clock = kept()
    took = []
    for slower in range(4):
        took.append(until_it_changes(one, per_copy=300, copy_ns=100_000 * 4 ** (slower + 1)))
        until_it_changes(one, per_copy=20_000, copy_ns=100_000 * 4 ** (slower + 1))
        trial(one, per_copy=300, copy_ns=100_000 * 4 ** (slower + 1))
        clock.ns += LOOK_NS
    assert took == [2 * TRIAL, 3 * TRIAL, 5 * TRIAL, 9 * TRIAL]


def test_a_kept_rung_is_judged_for_one_window_in_a_while():
    one, log, clock = kept()
    for _ in range(100):
        feed(one, TRIAL, per_copy=300, copy_ns=100_000)
        assert not one.looks(clock.ns)
        feed(one, 100, per_copy=60_000)  # nobody looks
        clock.ns += LOOK_NS
    assert one.looks(clock.ns)
    assert (one.rung, [entry[0] for entry in log]) == (BATCH, ["switch", "keep"])


def test_device_times_that_become_known_after_the_change_count_in_what_came_before():
    one, log, _ = auto()
    samples = [Sample(500, 10_000_000, 1 << 20, OWN, 100) for _ in range(3)]
    for sample in samples:
        one.submitted(sample)
    assert one.rung == BATCH
    for sample in samples:  # their events were not reached before the next ones were submitted
        sample.copy_ns = 100_000
        one.completed(sample)
    trial(one, per_copy=300, copy_ns=500_000)
    assert [entry[0] for entry in log] == ["switch", "rollback"]


def test_a_trial_waits_for_the_devices_times_where_those_before_are_known():
    one, log, _ = auto()
    until_it_changes(one, per_copy=2000, copy_ns=100_000)
    feed(one, REST, per_copy=300)
    assert one.rung == BATCH and len(log) == 1
    feed(one, 1, per_copy=300)
    assert [entry[0] for entry in log] == ["switch", "keep"]


def test_a_refused_rung_is_never_tried_again():
    one, _, _ = auto()
    feed(one, 2, per_copy=20_000, outstanding=900)
    one.refuse(BATCH, "not supported")
    assert one.rung == OWN
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == POOLED


def test_a_batch_is_not_blamed_on_the_launch_queue():
    one, log, _ = auto((BATCH, POOLED), depth=0)
    until_it_changes(one, per_copy=500, copies=10_000, outstanding=100_000)
    assert log[0][2]["cause"] == "descriptor_bound_batch"


def exhausted():
    """A auto that tried everything for transfers of 500 copies, and rests."""
    one, log, clock = auto()
    for _ in range(2):
        until_it_changes(one, per_copy=2000)
        trial(one, per_copy=2000)
    feed(one, 6, per_copy=2000)
    assert [entry[0] for entry in log] == ["switch", "rollback", "switch", "rollback", "note"]
    assert (one.rung, one.resting) == (OWN, True)
    return one, log, clock


def serve(one, count, **work):
    """As a path does it: hand over only what is to be watched; returns how many that were."""
    watched = 0
    for _ in range(count):
        if one.watch():
            watched += 1
            feed(one, 1, **work)
    return watched


def test_with_nothing_left_to_try_one_transfer_in_sixteen_is_watched():
    one, log, clock = exhausted()
    known = len(log)
    assert serve(one, 50 * REST, per_copy=2000) == 50
    clock.ns += COOL_DOWN_NS - 1
    assert serve(one, 10 * REST, per_copy=2000) == 10
    assert len(log) == known


def test_after_the_cool_down_a_resting_auto_tries_again():
    one, log, clock = exhausted()
    clock.ns += COOL_DOWN_NS
    assert serve(one, REST + 5, per_copy=2000) == 6
    assert (one.rung, log[-1][0]) == (BATCH, "switch")


def test_a_resting_auto_wakes_for_slow_transfers_of_another_scale():
    one, log, _ = exhausted()
    assert serve(one, REST + 5, per_copy=2000, copies=8000) == 6
    assert (one.rung, log[-1][0]) == (BATCH, "switch")


@pytest.mark.parametrize(("copies", "tried"), [(127, True), (128, False), (511, False), (512, True)])
def test_work_is_of_one_scale_up_to_four_times_the_copies(copies, tried):
    """What was tried in vain with transfers of 500 copies was tried for those of 128 to 511."""
    one, log, _ = exhausted()
    known = len(log)
    serve(one, 2 * REST, per_copy=9000, copies=copies)
    assert (len(log) > known) == tried


def test_a_resting_auto_sleeps_through_transfers_of_another_scale_that_are_fine():
    one, _, _ = exhausted()
    assert serve(one, 20 * REST, per_copy=150, copies=40) == 20
    assert one.resting


def test_a_auto_whose_rungs_were_all_refused_rests_for_good():
    one, _, clock = auto((OWN, BATCH))
    one.refuse(BATCH, "not supported")
    serve(one, 6, per_copy=2000)
    for _ in range(3):
        clock.ns += 1000 * COOL_DOWN_NS
        assert serve(one, 10 * REST, per_copy=2000) == 10


def test_resting_is_said_once_for_a_scale_of_work():
    one, log, clock = exhausted()
    for _ in range(4):
        clock.ns += 1000 * COOL_DOWN_NS
        serve(one, 200 * REST, per_copy=2000)
    assert one.resting
    assert [entry[0] for entry in log].count("note") == 1
    assert [entry[0] for entry in log].count("rollback") == 10


def test_a_rung_that_costs_just_as_much_more_as_one_must_gain_has_its_whole_trial():
    """1.2 times, MIN_GAIN: what costs more than that has clearly lost."""
    one, log, _ = auto()
    until_it_changes(one, per_copy=2000)
    feed(one, TRIAL, per_copy=2400)
    assert one.rung == BATCH
    feed(one, 1, per_copy=2400)
    assert (one.rung, log[-1][0]) == (OWN, "rollback")


def test_a_rung_that_clearly_loses_is_left_after_half_a_trial():
    one, log, _ = auto()
    until_it_changes(one, per_copy=2000)
    feed(one, TRIAL // 2, per_copy=4000)
    assert one.rung == BATCH
    feed(one, 1, per_copy=4000)
    assert (one.rung, log[-1][0]) == (OWN, "rollback")
    assert log[-1][2]["transfers"] == TRIAL // 2


def test_the_first_transfer_on_a_rung_does_not_count():
    one, log, _ = auto()
    until_it_changes(one, per_copy=2000)
    trial(one, per_copy=300, first=400_000)
    assert (one.rung, log[-1][0]) == (BATCH, "keep")


def test_copies_that_are_clearly_slower_end_a_trial_early():
    one, log, _ = auto()
    until_it_changes(one, per_copy=900, copy_ns=100_000)
    feed(one, TRIAL // 2 + 2, per_copy=300, copy_ns=300_000)
    assert log[-1][0] == "rollback"


def asked(one, count):
    return sum(one.watch() for _ in range(count))


def test_where_nothing_is_slow_for_long_one_transfer_in_sixteen_is_asked_for_until_one_is():
    one, log, _ = auto()
    feed(one, REST - 1, per_copy=150)
    assert asked(one, 10) == 10
    feed(one, 1, per_copy=150)
    assert (asked(one, 10 * REST), one.resting) == (10, True)
    feed(one, 1, per_copy=20_000, outstanding=900)  # the queue is full: every one is asked for again
    assert (asked(one, 10), log) == (10, [])
    feed(one, 1, per_copy=20_000, outstanding=900)
    assert (one.rung, log[0][2]["cause"]) == (BATCH, "launch_queue_saturation")


def test_copies_below_the_calibrated_rate_end_the_calm_too():
    one, _, _ = auto()
    feed(one, REST, per_copy=150, copy_ns=1000, expected_ns=1000)
    assert asked(one, REST) == 1
    feed(one, 1, per_copy=150, copy_ns=4000, expected_ns=1000)
    assert asked(one, REST) == REST


def test_transfers_too_small_to_judge_are_not_all_asked_for_either():
    one, _, _ = auto()
    feed(one, REST, per_copy=150, copies=2)
    assert asked(one, REST) == 1


def test_a_server_that_runs_for_months_keeps_no_more_decisions_than_the_newest():
    from kvprobe.offload.rungs import MOST_DECISIONS, Decision, Decisions

    kept, rung = Decisions(), Rung("shared", "loop")
    for at in range(MOST_DECISIONS + 5):
        kept.append(Decision(at, rung, rung, ""))
    assert [one.time_ns for one in (kept[0], kept[-1])] == [5, MOST_DECISIONS + 4] and len(kept) == MOST_DECISIONS
