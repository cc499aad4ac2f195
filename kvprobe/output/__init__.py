"""Everything that `--json` prints: a type a document, one table of them, one version, one schema.

A new document is a TypedDict beside its like and one line in DOCUMENTS.
"""

from __future__ import annotations

import inspect
from typing import Any

from kvprobe.output import machine, recorded, requests, verify
from kvprobe.output.document import SCHEMA_VERSION, VERSION_KEY, Document

__all__ = ["DOCUMENTS", "SCHEMA_VERSION", "VERSION_KEY", "Document", "schema", "schema_of"]

REPORT = Document("report", recorded.ReportJson)
STATS = Document("stats", recorded.StatsJson)
TRIAGE = Document("triage", recorded.TriageJson)
REDUCE = Document("reduce", recorded.ReduceJson)
DIFF = Document("diff", recorded.DiffJson)
CHECK = Document("check", recorded.CheckJson)
SIZE = Document("size", recorded.SizeJson)
REQUESTS = Document("requests", requests.RequestsCommandJson)
TRY = Document("try", recorded.TryJson)
VERIFY = Document("verify", verify.VerifyCommandJson)
DESCRIBED = Document("causes", recorded.CausesJson)
ANSWER = Document("mcp", recorded.AnswerJson)
TOP = Document("top", machine.TopJson, indent=1)
DEMO = Document("demo", machine.DemoJson, indent=1)
DOCTOR = Document("doctor", machine.DoctorJson, indent=1)
CALIBRATE = Document("calibrate", machine.CalibrateJson, indent=1)
BENCH = Document("bench", machine.BenchJson, indent=1)
OVERHEAD = Document("bench overhead", machine.OverheadJson, indent=1)
PATCHES = Document("patches", machine.PatchesJson, indent=2)
WEIGHTS = Document("weights", machine.WeightsJson)

# By the words of the command, in the order of the schema.
DOCUMENTS: dict[str, Document[Any]] = {
    one.command: one
    for one in (
        REPORT,
        STATS,
        TRIAGE,
        REDUCE,
        DIFF,
        CHECK,
        SIZE,
        REQUESTS,
        TRY,
        VERIFY,
        DESCRIBED,
        ANSWER,
        TOP,
        DEMO,
        DOCTOR,
        CALIBRATE,
        BENCH,
        OVERHEAD,
        PATCHES,
        WEIGHTS,
    )
}

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VERSION_SCHEMA = {"type": "string", "pattern": rf"^{SCHEMA_VERSION.split('.')[0]}\.\d+$"}


def schema() -> dict[str, Any]:
    """The JSON Schema of all documents: types under `$defs`, and for each command what it prints under `documents`."""
    made, types = _components([one.kind for one in DOCUMENTS.values()])
    documents = dict(zip(DOCUMENTS, made, strict=True))
    for reference in documents.values():
        _with_version(types[reference["$ref"].rpartition("/")[2]])
    return {
        "$schema": DIALECT,
        "title": "What kvprobe prints with --json",
        VERSION_KEY: SCHEMA_VERSION,
        "anyOf": list(documents.values()),
        "documents": documents,
        "$defs": dict(sorted(types.items())),
    }


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema of what one command prints.

    Raises:
        KeyError: it prints no JSON.
    """
    return schema_of_type(DOCUMENTS[command].kind, f"What kvprobe {command} prints with --json", versioned=True)


def schema_of_type(kind: Any, title: str, *, versioned: bool = False) -> dict[str, Any]:
    """The JSON Schema of a type, complete in itself."""
    (made,), types = _components([kind])
    root = types.pop(made["$ref"].rpartition("/")[2])
    if versioned:
        _with_version(root)
    return {"$schema": DIALECT, **root, "title": title, "$defs": types}


def _components(kinds: list[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """References to these types, and the types by name; descriptions without the indent of the code."""
    import msgspec

    made, types = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for one in types.values():
        if "description" in one:
            one["description"] = inspect.cleandoc(one["description"])
    return made, types


def _with_version(root: dict[str, Any]) -> None:
    root["properties"] = {VERSION_KEY: _VERSION_SCHEMA, **root["properties"]}
    root["required"] = [VERSION_KEY, *root.get("required", ())]
