"""Adapters go in and out of a process without a trace, and never change what the server computes."""

import importlib
import inspect
import subprocess
import sys

import pytest

import kvprobe.instrument as instrument
from kvprobe.errors import UsageError
from kvprobe.instrument import installation


def engine():
    return importlib.import_module("toyengine.engine")


def results(module):
    """Everything the toy server computes, exceptions included."""
    instance = module.Engine.make()
    out = [instance.copy(1, 4), instance.copy(job=2, blocks=5), module.Engine.size(3), module.helper(3, scale=7)]
    with pytest.raises(ValueError, match="negative"):
        instance.copy(3, -1)
    return [*out, instance.jobs]


EXPECTED = [8, 10, 30, 21, [1, 2]]


def originals(module):
    return {name: vars(module.Engine)[name] for name in ("copy", "size", "make")} | {"helper": module.helper}


def adapter():
    return installation._adapters["toyengine.copies"]


def test_installed_before_the_server_is_imported(toyengine):
    toyengine()
    assert instrument.install("toyengine") == {}
    module = engine()
    assert str(adapter().state) == "applied"
    assert results(module) == EXPECTED
    assert adapter().seen[0].__class__.__name__ == "Engine"
    assert adapter().seen[1:] == [8, 10, 30, 21]


def test_installed_after_the_server_was_imported(toyengine):
    toyengine()
    module = engine()
    assert instrument.install("toyengine") == {"toyengine.copies": "applied"}
    assert results(module) == EXPECTED


def test_uninstall_restores_every_function_and_install_works_again(toyengine):
    toyengine()
    module = engine()
    before = originals(module)
    for _ in range(3):
        instrument.install("toyengine")
        assert all(originals(module)[name] is not before[name] for name in before)
        assert results(module) == EXPECTED
        instrument.uninstall("toyengine")
        assert originals(module) == before
        assert results(module) == EXPECTED


def test_installing_twice_wraps_once(toyengine):
    toyengine()
    module = engine()
    instrument.install("toyengine")
    once = originals(module)
    instrument.install("toyengine")
    assert originals(module) == once


def test_signatures_stay_what_they_were(toyengine):
    toyengine()
    module = engine()
    before = {name: inspect.signature(getattr(module.Engine, name)) for name in ("copy", "size", "make")}
    instrument.install("toyengine")
    assert before == {name: inspect.signature(getattr(module.Engine, name)) for name in ("copy", "size", "make")}


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.9", "skipped: toyengine 0.9 is outside >=1.0,<2.0"), ("2.1", "not needed: already upstream: since 2.0")],
)
def test_a_version_outside_the_range_is_left_alone(toyengine, version, state):
    toyengine(version)
    module = engine()
    before = originals(module)
    assert instrument.install("toyengine") == {"toyengine.copies": state}
    assert originals(module) == before
    assert results(module) == EXPECTED


@pytest.mark.parametrize(
    "change",
    [
        ("def copy(self, job, blocks)", "def copy(self, blocks, job)"),
        ("def copy(self, job, blocks)", "def copy(self, job, blocks, must)"),
        ("def helper(x, *, scale=1)", "def assistant(x, *, scale=1)"),
    ],
)
def test_a_changed_signature_is_refused_before_anything_is_touched(toyengine, change):
    toyengine(source=toyengine.source.replace(*change))
    module = engine()
    before = dict(vars(module.Engine))
    (state,) = instrument.install("toyengine").values()
    assert state.startswith("skipped: toyengine.engine:")
    assert dict(vars(module.Engine)) == before


def test_a_new_parameter_with_a_default_is_accepted(toyengine):
    toyengine(source=toyengine.source.replace("def copy(self, job, blocks)", "def copy(self, job, blocks, priority=0)"))
    engine()
    assert instrument.install("toyengine") == {"toyengine.copies": "applied"}


@pytest.mark.parametrize("moment", ["fail", "fail_after"])
def test_a_wrapper_that_always_fails_changes_nothing_and_says_so_once(toyengine, moment, monkeypatch, caplog):
    toyengine()
    module = engine()
    before = originals(module)
    instrument.install("toyengine")
    monkeypatch.setattr(type(adapter()), moment, True)
    for _ in range(5):
        assert results(module) == EXPECTED
    assert originals(module) == before
    assert str(adapter().state).startswith("failed: Engine.make: RuntimeError: kvprobe's own mistake")
    assert sum("is switched off" in record.message for record in caplog.records) == 1


def test_a_wrapper_of_somebody_else_above_ours_survives_uninstall(toyengine):
    toyengine()
    module = engine()
    instrument.install("toyengine")
    ours = module.helper
    module.helper = lambda x, *, scale=1: ours(x, scale=scale) + 1
    theirs = module.helper
    instrument.uninstall("toyengine")
    assert module.helper is theirs
    assert module.helper(3, scale=7) == 22


def test_kvprobe_off_beats_everything(toyengine, monkeypatch, tmp_path):
    toyengine()
    module = engine()
    before = originals(module)
    monkeypatch.setenv("KVPROBE", "off")
    monkeypatch.setenv("KVPROBE_FIX", "auto")
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    instrument.activate()
    assert instrument.install("toyengine") == {}
    with instrument.observe("toyengine") as seen:
        assert results(module) == EXPECTED
    assert originals(module) == before
    assert seen.events == []
    assert {row["reason"] for row in instrument.table("toyengine")} == {"KVPROBE=off"}


def test_observe_leaves_what_was_there_before(toyengine):
    toyengine()
    module = engine()
    before = originals(module)
    with instrument.observe("toyengine") as seen:
        assert results(module) == EXPECTED
    assert seen.states == {"toyengine.copies": "removed"}
    assert originals(module) == before
    instrument.install("toyengine")
    with instrument.observe("toyengine"):
        pass
    assert results(module) == EXPECTED
    assert str(adapter().state) == "applied"


def test_a_failing_hook_of_ours_does_not_break_the_servers_import(toyengine, monkeypatch):
    toyengine()

    def broken(module):
        raise RuntimeError("mistake")

    monkeypatch.setattr(installation, "_server_imported", broken)
    instrument.install("toyengine")
    assert results(engine()) == EXPECTED


@pytest.mark.parametrize("call", [lambda: instrument.install("nosuch"), lambda: instrument.install(fix="maybe")])
def test_wrong_use_is_one_line(call):
    with pytest.raises(UsageError):
        call()


def test_activation_imports_no_server_and_does_nothing_unasked():
    code = (
        "import sys, kvprobe.instrument as i; i.activate(); i.plugin();"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('wrapt', 'torch', 'vllm', 'numpy', 'packaging', 'nvtx', 'rich')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert out.stdout.strip() == "[]"


def test_the_table_needs_no_server_and_imports_none():
    code = (
        "import sys, kvprobe.instrument as i; rows = i.table();"
        "assert len(rows) >= 1, rows;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm', 'sglang', 'transformers')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
