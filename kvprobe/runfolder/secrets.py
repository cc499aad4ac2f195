"""Takes the secrets out of a command line before it is written anywhere.

Hidden (`***`) is what follows an option with a secret's name (`--api-key A B`, up to the next option), such a name and
a colon (`X-Api-Key: A`), `Bearer`, or `-p`; the value of such a name (`HF_TOKEN=x`, `--password=x`, `{"token":"x"}`,
`?key=x`, `X-Api-Key:x`, `-px`); user and password of an address (`https://user:password@host`, `-u user:password`); a
key in PEM; and what begins as well-known tokens do. Where the words are known, a value's spaces do not end it. A name
is a secret's if one of its parts (`-`, `_`, `.` apart) is or ends as below.

The ring's writer (`native/src/secrets.c`) and the start-up hook, which may import nothing, follow the same rules; a
test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["redact", "redact_text"]

WHOLE = ("key", "keys", "auth", "pass", "pwd", "cookie")
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
PREFIXES = ("sk-", "hf_", "nvapi-", "ghp_", "gho_", "github_pat_", "xoxb-", "xoxp-", "glpat-", "AKIA", "eyJhbGciOi")
NOT_PASSWORDS = ("thread", "ipe", "rint", "rint0", "refix", "ath", "arallel", "rofile", "rogress", "lugin", "ort")
SCHEMES = ("bearer", "basic", "digest", "token")
QUOTES = "'\""
NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"


def redact(words: Iterable[str]) -> list[str]:
    """The words of a command without its secrets; tabs and line breaks inside a word become spaces.

    One word alone is taken for a whole command line.
    """
    given, found, hiding = list(words), [], ""
    for word in given:
        pieces = []
        whole = len(given) > 1 and hiding == "-" and not _option(word.strip(QUOTES))  # the word is a secret
        for piece in word.replace("\t", " ").replace("\n", " ").split(" "):
            if whole:
                pieces.append("***" if piece else "")
                continue
            shown, hiding = _piece(piece, hiding)
            pieces.append(shown)
            whole = len(given) > 1 and shown.endswith("=***")
        found.append(" ".join(pieces))
    return found


def redact_text(command: str) -> str:
    """A command line as one text, without its secrets."""
    return redact([command])[0]


def _option(bare: str) -> bool:
    return bare.startswith("-") and not bare.startswith("---")


def _piece(piece: str, hiding: str) -> tuple[str, str]:
    """What is shown of one piece, and what is hidden of those after it.

    "-": all up to the next option, "p" and "u": the next one, if it can be a password, or a user with one; a quote: all
    to the piece in which it stands again.
    """
    bare = piece.strip(QUOTES)
    if hiding and hiding in QUOTES:
        return "***", "" if hiding in piece else hiding
    if not bare:
        return piece, hiding
    if hiding == "-" and piece[0] in QUOTES:
        return "***", "-" if piece[0] in piece[1:] else piece[0]
    if not _option(bare):
        if hiding == "-" or bare.startswith("-----BEGIN"):
            return "***", "-"
        if (hiding == "p" and not _number(bare)) or (hiding == "u" and ":" in bare):
            return "***", ""
    shown, hiding = _values(bare, piece[len(piece.rstrip(QUOTES)) :])
    shown = _addresses(shown)
    if shown != bare or hiding:
        return (piece if shown == bare else shown), hiding
    if len(bare.encode(errors="surrogateescape")) >= 16 and bare.startswith(PREFIXES):
        return "***", ""
    if _option(bare) and "=" not in bare:
        return _of_option(piece, bare)
    return piece, "-" if bare.lower() == "bearer" else ""


def _of_option(piece: str, bare: str) -> tuple[str, str]:
    if _secret(bare):
        return piece, "-"
    if bare == "-p":
        return piece, "p"
    if bare in ("-u", "--user", "--proxy-user"):
        return piece, "u"
    if bare.startswith("-p") and bare[2:] not in NOT_PASSWORDS and not _number(bare[2:]):
        return "-p***", ""
    if bare.startswith("-u") and ":" in bare:
        return "-u***", ""
    return piece, ""


def _number(text: str) -> bool:
    """Whether it is a port, ports or a path: what `-p` means to other programs."""
    return not text.strip("0123456789:.-") or text.startswith(("/", "./"))


def _values(bare: str, closed: str) -> tuple[str, str]:
    """A piece without the values of secret names, and what is hidden after it; `closed`: the quotes at its end."""
    shown, start, at = "", 0, 0
    while at < len(bare):
        end = at
        while end > start and bare[end - 1] in "\"'\\":
            end -= 1
        begin = end
        while begin > start and bare[begin - 1] in NAME:
            begin -= 1
        value = at + 1
        if bare[at] not in ":=" or bare[value : value + 2] == "//" or not _secret(bare[begin:end]):
            at += 1
            continue
        if value == len(bare):
            return shown + bare[start:] + ("***" if bare[at] == "=" else ""), "" if bare[at] == "=" else "-"
        quote = value
        while bare[quote : quote + 1] == "\\":
            quote += 1
        if bare[quote : quote + 1] and bare[quote] in QUOTES:
            until = bare.find(bare[quote], quote + 1)
            shown += bare[start : quote + 1] + "***"
            if until < 0:
                return shown, "" if bare[quote] in closed else bare[quote]
        else:
            until = bare.find("&", value) if "?" in bare[:begin] else -1
            shown += bare[start:value] + "***"
            if until < 0:
                return shown, "-" if bare[value:].lower() in SCHEMES else ""
        start, at = until, until + 1
    return shown + bare[start:], ""


def _addresses(text: str) -> str:
    """Without user and password of addresses."""
    shown, rest = "", text
    while True:
        before, there, rest = rest.partition("://")
        shown += before + there
        if not there:
            return shown
        host = rest.partition("/")[0]
        if "@" in host:
            shown, rest = shown + "***", rest[host.rindex("@") :]


def _secret(name: str) -> bool:
    parts = name.lstrip("-").rstrip(":").lower().replace("_", "-").replace(".", "-").split("-")
    return any(part in WHOLE or part.endswith(ENDINGS) for part in parts)
