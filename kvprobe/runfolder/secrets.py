"""Takes the secrets out of a command line before it is written anywhere.

A word is hidden (`***`) where it follows an option with a secret's name (`--api-key A B`, up to the next option) or
`Authorization:` or `Bearer`, is the value of such a name (`HF_TOKEN=x`, `--password=x`), is the user and password of an
address (`https://user:password@host`), or begins as well-known tokens do. A name is a secret's if one of its parts
(`-`, `_`, `.` apart) is or ends as below. The ring's writer (`native/src/secrets.c`) and the start-up hook, which may
import nothing, follow the same rules; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["redact", "redact_text"]

WHOLE = ("key", "keys", "auth", "pwd", "cookie")
ENDINGS = (
    "token",
    "secret",
    "password",
    "passwd",
    "apikey",
    "passphrase",
    "credential",
    "credentials",
    "authorization",
)
PREFIXES = ("sk-", "hf_", "nvapi-", "ghp_", "gho_", "github_pat_", "xoxb-", "glpat-")


def redact(words: Iterable[str]) -> list[str]:
    """The words of a command without its secrets; tabs and line breaks inside a word become spaces."""
    found, hiding = [], False
    for word in words:
        pieces = []
        for piece in word.replace("\t", " ").replace("\n", " ").split(" "):
            shown, hiding = _piece(piece, hiding)
            pieces.append(shown)
        found.append(" ".join(pieces))
    return found


def redact_text(command: str) -> str:
    """A command line as one text, without its secrets."""
    return redact([command])[0]


def _piece(piece: str, hiding: bool) -> tuple[str, bool]:
    """What is shown of one piece, and whether the pieces after it are a secret's."""
    bare = piece.strip("'\"")
    if not bare:
        return piece, hiding
    if hiding and not bare.startswith("-"):
        return "***", True
    name, equals, _ = bare.partition("=")
    if equals and _secret(name):
        return f"{name}=***", False
    scheme, there, rest = bare.partition("://")
    host, slash, path = rest.partition("/")
    if there and "@" in host:
        return f"{scheme}://***@{host.rpartition('@')[2]}{slash}{path}", False
    if len(bare.encode(errors="surrogateescape")) >= 16 and bare.startswith(PREFIXES):
        return "***", False
    named = (bare.endswith(":") or bare.startswith("-")) and not equals and _secret(bare.rstrip(":"))
    return piece, named or bare.lower() == "bearer"


def _secret(name: str) -> bool:
    parts = name.lstrip("-").lower().replace("_", "-").replace(".", "-").split("-")
    return any(part in WHOLE or part.endswith(ENDINGS) for part in parts)
