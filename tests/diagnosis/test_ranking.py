"""The order in which findings are told."""

from kvprobe.diagnosis import Finding, ranked


def finding(cause, severity, lost_ns, lost_on="host", confidence="likely"):
    return Finding(cause, cause, severity, confidence, lost_ns, lost_on=lost_on)


def test_wrong_results_lead_whatever_was_lost():
    slow = finding("launch_queue_saturation", "critical", 10**12)
    wrong = finding("store_not_ordered", "critical", 0, "none")
    assert ranked([slow, wrong]) == [wrong, slow]


def test_what_can_be_cured_comes_before_what_only_explains():
    bound = finding("link_bound", "info", 10**12, "copy engine")
    warning = finding("pageable_memory", "warning", 10**6)
    small = finding("synchronisation", "warning", 10**5)
    assert ranked([bound, small, warning]) == [warning, small, bound]


def test_what_abstains_comes_last():
    open_ = finding("load_not_ordered", "warning", 0, "none", "cannot tell")
    info = finding("link_bound", "info", 1, "copy engine")
    assert ranked([open_, info]) == [info, open_]
