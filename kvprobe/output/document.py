"""A document that a command prints with `--json`: its type, how it is written, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["SCHEMA_VERSION", "VERSION_KEY", "Document"]

# Of all documents together: what goes away or changes its type steps the first number, what is added the second.
SCHEMA_VERSION = "1.2"
VERSION_KEY = "kvprobe_json"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Document(Generic[_T]):
    """What one command prints.

    Attributes:
        command: its words after `kvprobe`, such as "bench overhead".
        kind: the type of what is printed, a TypedDict.
        indent: of the text; None: all on one line.
    """

    command: str
    kind: type[_T]
    indent: int | None = None

    def content(self, what: _T) -> dict[str, Any]:
        """What is printed: the version first; what is no finite number is null, as JSON has no other."""
        assert isinstance(what, Mapping)
        whole = {VERSION_KEY: SCHEMA_VERSION, **what}
        found: dict[str, Any] = json.loads(json.dumps(whole, default=_plain), parse_constant=lambda _: None)
        return found

    def text(self, what: _T) -> str:
        """The same as JSON."""
        assert isinstance(what, Mapping)
        whole = {VERSION_KEY: SCHEMA_VERSION, **what}
        try:
            return json.dumps(whole, default=_plain, indent=self.indent, allow_nan=False)
        except ValueError:
            return json.dumps(self.content(what), indent=self.indent)

    def print(self, what: _T) -> None:
        """Writes it to stdout."""
        import click

        click.echo(self.text(what))


def _plain(value: Any) -> Any:
    """What the readers hand over that JSON does not know: numpy's numbers and arrays; else its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
