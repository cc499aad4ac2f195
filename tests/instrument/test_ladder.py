"""Auto mode's ladder: measure, switch, verify, roll back."""

from kvprobe.instrument.ladder import COOL_DOWN_NS, GLANCE, REST, Ladder, Sample


class Clock:
    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


def ladder(rungs=("shared", "batch", "pooled"), depth=1000):
    log, clock = [], Clock()
    made = Ladder(rungs, depth, 1000, lambda what, why, **evidence: log.append((what, why, evidence)), clock)
    return made, log, clock


def feed(one, count, per_copy, copies=500, outstanding=0, copy_ns=None, size=1 << 20):
    for _ in range(count):
        one.submitted(Sample(copies, int(per_copy * copies), outstanding, size, one.rung, copy_ns))


def test_healthy_transfers_change_nothing():
    one, log, _ = ladder()
    feed(one, 1000, per_copy=150, copies=400)
    assert (one.rung, log) == ("shared", [])


def test_slow_submissions_far_from_the_depth_are_not_called_saturation():
    one, log, _ = ladder()
    feed(one, 100, per_copy=5000, copies=16, outstanding=0)
    assert (one.rung, log) == ("shared", [])


def test_a_full_queue_is_named_cured_and_kept():
    one, log, _ = ladder()
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == "batch"
    assert log[0][0] == "switch"
    assert log[0][2]["cause"] == "launch_queue_saturation"
    feed(one, 8, per_copy=300)
    assert [entry[0] for entry in log] == ["switch", "keep"]
    assert log[1][2]["gain"] > 60
    feed(one, 1000, per_copy=300)
    assert len(log) == 2


def test_no_gain_rolls_back_and_tries_the_next_rung_then_waits():
    one, log, clock = ladder()
    feed(one, 2, per_copy=20_000, outstanding=900)
    feed(one, 8, per_copy=19_000)
    assert one.rung == "shared"
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == "pooled"
    feed(one, 8, per_copy=19_000)
    feed(one, 50, per_copy=20_000, outstanding=900)
    assert [entry[0] for entry in log] == ["switch", "rollback"] * 2 + ["note"]
    clock.ns += COOL_DOWN_NS
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == "batch"


def test_cheaper_submission_with_slower_copies_is_rolled_back():
    one, log, _ = ladder()
    feed(one, 8, per_copy=900, copy_ns=100_000)
    assert log[0][2]["cause"] == "too_many_small_copies"
    feed(one, 8, per_copy=300, copy_ns=200_000)
    assert log[-1][0] == "rollback"
    assert "copies themselves" in log[-1][1]


def test_other_work_than_before_is_not_compared():
    one, log, _ = ladder()
    feed(one, 2, per_copy=20_000, outstanding=900)
    feed(one, 8, per_copy=300, copies=40)
    assert one.rung == "shared"
    assert [entry[0] for entry in log] == ["switch"]


def test_a_kept_rung_is_left_only_when_it_stays_bad():
    one, log, _ = ladder()
    feed(one, 2, per_copy=20_000, outstanding=900)
    feed(one, 8, per_copy=300)
    feed(one, 8, per_copy=60_000)
    feed(one, 8, per_copy=300)
    assert one.rung == "batch"
    feed(one, 24, per_copy=60_000)
    assert log[-1][0] == "rollback"


def test_a_refused_rung_is_never_tried_again():
    one, _, _ = ladder()
    feed(one, 2, per_copy=20_000, outstanding=900)
    one.refuse("batch", "not supported")
    assert one.rung == "shared"
    feed(one, 2, per_copy=20_000, outstanding=900)
    assert one.rung == "pooled"


def test_a_batch_is_not_blamed_on_the_launch_queue():
    one, log, _ = ladder(("upstream", "coalesced"), depth=0)
    feed(one, 8, per_copy=500, copies=10_000, outstanding=100_000)
    assert log[0][2]["cause"] == "descriptor_bound_batch"


def exhausted():
    """A ladder that tried everything for transfers of 500 copies, and rests."""
    one, log, clock = ladder()
    feed(one, 8, per_copy=2000)
    feed(one, 8, per_copy=2000)
    feed(one, 8, per_copy=2000)
    feed(one, 8, per_copy=2000)
    feed(one, 6, per_copy=2000)
    assert [entry[0] for entry in log] == ["switch", "rollback", "switch", "rollback", "note"]
    assert (one.rung, one.resting) == ("shared", True)
    return one, log, clock


def serve(one, count, **work):
    """As a path does it: hand over only what is to be watched; returns how many that were."""
    watched = 0
    for _ in range(count):
        if one.watch():
            watched += 1
            feed(one, 1, **work)
    return watched


def test_every_transfer_is_watched_while_something_is_left_to_try():
    one, _, _ = ladder()
    assert serve(one, 100, per_copy=150) == 100


def test_with_nothing_left_to_try_one_transfer_in_sixteen_is_watched():
    one, log, clock = exhausted()
    known = len(log)
    assert serve(one, 50 * REST, per_copy=2000) == 50
    clock.ns += COOL_DOWN_NS - 1
    assert serve(one, 10 * REST, per_copy=2000) == 10
    assert len(log) == known


def test_after_the_cool_down_a_resting_ladder_tries_again():
    one, log, clock = exhausted()
    clock.ns += COOL_DOWN_NS
    assert serve(one, REST + 5, per_copy=2000) == 6
    assert (one.rung, log[-1][0]) == ("batch", "switch")


def test_a_resting_ladder_wakes_for_slow_transfers_of_another_scale():
    one, log, _ = exhausted()
    assert serve(one, REST + 5, per_copy=2000, copies=8000) == 6
    assert (one.rung, log[-1][0]) == ("batch", "switch")


def test_a_resting_ladder_sleeps_through_transfers_of_another_scale_that_are_fine():
    one, _, _ = exhausted()
    assert serve(one, 20 * REST, per_copy=150, copies=40) == 20
    assert one.resting


def test_a_ladder_whose_rungs_were_all_refused_rests_for_good():
    one, _, clock = ladder(("upstream", "batch"))
    one.refuse("batch", "not supported")
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


def test_a_rung_that_clearly_loses_is_left_after_three_transfers():
    one, log, _ = ladder()
    feed(one, 6, per_copy=2000)
    feed(one, GLANCE - 1, per_copy=4000)
    assert one.rung == "batch"
    feed(one, 1, per_copy=4000)
    assert (one.rung, log[-1][0]) == ("shared", "rollback")
    assert log[-1][2]["transfers"] == GLANCE


def test_a_slow_first_transfer_does_not_end_a_trial():
    one, log, _ = ladder()
    feed(one, 6, per_copy=2000)
    feed(one, 1, per_copy=400_000)
    feed(one, 7, per_copy=300)
    assert (one.rung, log[-1][0]) == ("batch", "keep")


def test_copies_that_are_clearly_slower_end_a_trial_early():
    one, log, _ = ladder()
    feed(one, 6, per_copy=900, copy_ns=100_000)
    feed(one, GLANCE, per_copy=300, copy_ns=300_000)
    assert log[-1][0] == "rollback"
