"""Checks messages of new commits: a subject of at most 72 characters, a blank line, and a body that says why.

python3 .ci/commits.py [BASE]           # those of HEAD that BASE has not; without BASE, that origin's main has not
python3 .ci/commits.py --message FILE   # one that is about to be made: the hook commit-msg

Where the base is not known, as in a shallow clone, it says so, checks nothing and succeeds. Merges are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
TRAILER = re.compile(r"[A-Z][\w-]*: \S")  # Signed-off-by: and the like say who, not why


def wrong(message: str) -> str:
    """What is wrong with a message, in a few words; empty where nothing is."""
    subject, *rest = message.rstrip().splitlines() or [""]
    if not subject.strip():
        return "no subject"
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters, at most {LONGEST}"
    if rest and rest[0].strip():
        return "no blank line after the subject"
    if not any(line.strip() and not TRAILER.match(line) for line in rest):
        return "no body that says why"
    return ""


def git(*words: str) -> str | None:
    """What git prints; None where it fails."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, errors="replace", check=False)
    return done.stdout if done.returncode == 0 else None


def base_of(asked: str) -> str | None:
    """The commit to compare with; None where this clone does not have it."""
    for name in [asked] if asked else ["origin/main", "origin/HEAD"]:
        # without a common ancestor the whole history that there is would count as new
        if git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") and git("merge-base", name, "HEAD"):
            return name
    return None


def main(words: list[str]) -> int:
    """The exit status: 1 where a message is not as it should be."""
    if words[:1] == ["--message"]:
        text = Path(words[1]).read_text(errors="replace").partition("\n# ------------------------ >8 ---")[0]
        said = wrong("\n".join(line for line in text.splitlines() if not line.startswith("#")))
        if said and not re.match(r"Merge |fixup! |squash! |amend! ", text):
            print(f"commit message: {said}", file=sys.stderr)
            return 1
        return 0
    asked = words[0] if words else ""
    base = base_of(asked)
    if base is None:
        print(f"commits: {asked or 'the base of this branch'} is not in this clone: no message was checked")
        return 0
    found = (git("log", "--no-merges", "-z", "--format=%h%n%B", f"{base}..HEAD") or "").split("\0")
    bad = 0
    for commit, _, message in (one.partition("\n") for one in found if one.strip()):
        if said := wrong(message):
            bad += 1
            print(f"{commit} {message.partition(chr(10))[0]}: {said}", file=sys.stderr)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
