"""What every adapter promises, whichever server it serves."""

import pytest

from kvprobe.instrument import installation, registry

ADAPTERS = [kind for server in registry.SERVERS for kind in registry.adapter_classes(server)]


@pytest.mark.parametrize("kind", ADAPTERS, ids=lambda kind: kind.name)
def test_it_touches_its_own_server_alone(kind):
    package = registry.SERVERS[kind.server].package
    for target in kind.targets:
        assert target.module.split(".")[0] == package, (
            f"{kind.name} touches {target}, which is not in {package}, "
            "the package that its line in SERVERS names: an adapter comes in when that is imported"
        )


@pytest.mark.parametrize("kind", ADAPTERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("version", ["0.0.1", "99.0", "not a version"])
def test_a_version_outside_its_range_is_left_alone(kind, version):
    state = kind.forecast((kind.distributions[0], version))
    assert state.state in ("skipped", "not needed")
    assert version in state.reason or "already upstream" in state.reason


@pytest.mark.parametrize("kind", ADAPTERS, ids=lambda kind: kind.name)
def test_a_module_that_changed_shape_is_left_alone(kind):
    """A module of the right name in which nothing is where it was."""
    import types

    adapter = kind()
    adapter.state.state = "waiting"
    module = types.ModuleType(kind.targets[0].module)
    before = dict(vars(module))
    adapter.instrument(module)
    assert str(adapter.state).startswith("skipped: ")
    assert dict(vars(module)) == before


def test_names_are_unique_and_the_table_lists_all():
    names = [kind.name for kind in ADAPTERS]
    assert len(set(names)) == len(names)
    assert [row["adapter"] for row in installation.table()] == names
    assert all(row["state"] in ("would apply", "skipped", "not needed") for row in installation.table())


def test_the_command_prints_every_adapter_as_text_and_as_json():
    import json

    from click.testing import CliRunner

    from kvprobe.commands.patches import command

    text = CliRunner().invoke(command, ["-v"])
    found = json.loads(CliRunner().invoke(command, ["--json"]).output)["adapters"]
    assert text.exit_code == 0
    assert all(kind.name in text.output for kind in ADAPTERS)
    assert [row["adapter"] for row in found] == [kind.name for kind in ADAPTERS]
    assert CliRunner().invoke(command, ["-v", "--server", "vllm"]).exit_code == 0


def test_what_is_not_covered_is_said_by_name():
    from click.testing import CliRunner

    from kvprobe.commands.patches import command

    said = CliRunner().invoke(command, []).output
    for name in ("llama.cpp", "TensorRT-LLM", "FlexKV", "Dynamo"):
        assert name in said
