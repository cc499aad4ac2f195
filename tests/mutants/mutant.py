"""One deliberate bug: what it replaces in which line of which file, under a name that outlives other changes."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A file of the repository with one line changed.

    Attributes:
        file: from the repository's root.
        line: its number, from 1.
        what: the operator that made it.
        old, new: the line, without its indentation.
        name: from the file, the text of the line, and which of equal ones it is: the number of the line is not in it.
        text: the whole file.
    """

    file: str
    line: int
    what: str
    old: str
    new: str
    name: str
    text: str = dataclasses.field(repr=False)

    @property
    def digest(self) -> str:
        """Of its name and of the whole file that it makes: another one where anything in the file is another."""
        return hashlib.sha256(f"{self.name}|{self.text}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.name} {self.file}:{self.line} {self.what}: {self.old}  ->  {self.new or '(nothing)'}"


class Namer:
    """Gives the mutants of one file their names."""

    def __init__(self, file: str) -> None:
        """Of this file."""
        self._stem, self._met = Path(file).stem, {}  # type: ignore[var-annotated]

    def name(self, what: str, old: str, new: str) -> str:
        """The next one of this kind."""
        key = f"{what}|{old}|{new}"
        self._met[key] = number = self._met.get(key, -1) + 1
        return f"{self._stem}-{hashlib.sha256(f'{key}|{number}'.encode()).hexdigest()[:6]}"
