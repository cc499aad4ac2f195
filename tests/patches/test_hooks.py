"""What every hook promises: unknown arguments pass, names bound elsewhere are found, -v lists all that is touched."""

import ast
import sys
import types
from pathlib import Path

import pytest

import kvprobe.patches
from kvprobe.instrument import installation
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.calls import TimedCalls, timed
from kvprobe.instrument.hooks import CircuitBreaker, Patcher

FILES = sorted(Path(kvprobe.patches.__path__[0]).glob("*.py"))


def hooks(path):
    """Functions that take `call` first: they stand around a server's function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            annotated = [getattr(a.annotation, "id", "") for a in node.args.args if a.arg == "call"]
            wraps = names[:1] == ["call"] and annotated == ["Call"] and not node.name.startswith("_")
            if wraps and len(names) > 1 and names[1] not in ("path", "error", "engine_"):
                yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_hook_takes_arguments_that_it_does_not_know(path):
    for node in hooks(path):
        inner = node.name in ("submit", "watched", "unwatched")  # called by hooks, not by servers
        assert inner or (node.args.vararg and node.args.kwarg), f"{path.name}:{node.lineno} {node.name}"


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ("self, job_id, spec", True),
        ("self, job_id, spec, expedited=False", True),
        ("self, job_id, spec, *, expedited=False, **more", True),
        ("self, job_id, src, dst", True),
        ("self, job, spec", False),
        ("self, job_id, spec, expedited", False),
        ("self, job_id", False),
    ],
)
def test_signatures_are_compared_name_by_name(found, fits):
    module = types.ModuleType("toy")
    exec(f"class Handler:\n    def transfer_async({found}): pass\n", module.__dict__)
    target = Target("toy", "Handler.transfer_async", ("job_id", "spec"), otherwise=(("job_id", "src", "dst"),))
    assert (target.problem(module) is None) == fits


def test_an_adapter_touches_nothing_that_it_does_not_list():
    module = types.ModuleType("toy")
    exec("def listed(): pass\ndef unlisted(): pass\n", module.__dict__)
    patcher = Patcher(CircuitBreaker("toy", lambda reason: None), lambda path: path == "listed")
    patcher.wrap(module, "listed", lambda call: call())
    with pytest.raises(ValueError, match="toy:unlisted is not among the targets"):
        patcher.wrap(module, "unlisted", lambda call: call())


def test_what_only_looks_on_sees_every_call_and_can_change_none():
    module, seen, broken = types.ModuleType("toy"), [], []
    exec("def double(n, *, plus=0):\n    if n < 0: raise ValueError(n)\n    return 2 * n + plus\n", module.__dict__)
    own, patcher = module.double, Patcher(CircuitBreaker("toy", broken.append))

    def note(began_ns, result, args, kwargs):
        seen.append((result, args, kwargs))
        assert began_ns > 0 and result != 8

    patcher.watch(module, "double", note)
    assert module.double(1, plus=3) == 5 and seen == [(5, (1,), {"plus": 3})]
    with pytest.raises(ValueError, match="-1"):  # the function's own: nothing to note, and nothing is wrong
        module.double(-1)
    assert len(seen) == 1 and not broken
    assert module.double(4) == 8 and len(broken) == 1  # the note failed: it steps aside
    assert module.double(2) == 4 and len(seen) == 2
    patcher.undo()
    assert module.double is own


class Twice(TimedCalls):
    name = "toy.twice"
    timed = (timed("toy.home", "outer", ("n",), "load"), timed("toy.home", "inner", ("n",), "load"))

    def describe(self, entry, args, kwargs, result):
        return {"bytes": args[0]}


@pytest.fixture
def toy():
    """`toy.home` with two functions, one calling the other; `toy.user` and `elsewhere` imported them by name."""
    made = {name: types.ModuleType(name) for name in ("toy", "toy.home", "toy.user", "elsewhere")}
    sys.modules.update(made)
    exec("def inner(n): return n\ndef outer(n): return inner(n)\n", made["toy.home"].__dict__)
    exec("from toy.home import inner as renamed, outer\n", made["toy.user"].__dict__)
    exec("from toy.home import outer\n", made["elsewhere"].__dict__)
    yield made
    for name in made:
        del sys.modules[name]


def test_names_that_were_imported_before_are_found_and_put_back(toy):
    home, user, elsewhere = toy["toy.home"], toy["toy.user"], toy["elsewhere"]
    own = home.inner, home.outer
    adapter = Twice()
    adapter.instrument(home)
    assert adapter.applied
    assert user.outer is home.outer is elsewhere.outer is not own[1]
    assert user.renamed is home.inner is not own[0]
    late = types.ModuleType("toy.late")
    sys.modules["toy.late"] = late
    exec("from toy.home import outer\n", late.__dict__)
    adapter.uninstrument()
    del sys.modules["toy.late"]
    assert (home.inner, home.outer) == own
    assert user.outer is late.outer is elsewhere.outer is own[1]
    assert user.renamed is own[0]


def test_bytes_of_a_call_inside_another_are_counted_once(toy):
    from kvprobe.instrument import event_log

    adapter = Twice()
    adapter.instrument(toy["toy.home"])
    with event_log.subscribed() as events:
        toy["toy.user"].outer(640)
        toy["toy.user"].renamed(5)
    adapter.uninstrument()
    calls = [(e["call"], e.get("bytes", 0), e.get("inside")) for e in events if e["kind"] == "call"]
    assert calls == [("inner", 0, "outer"), ("outer", 640, None), ("inner", 5, None)]


def test_the_table_says_which_option_an_adapter_waits_for():
    rows = {row["adapter"]: row["option"] for row in installation.table()}
    assert rows["vllm.weight_prefetch"] == "--offload-backend prefetch"
