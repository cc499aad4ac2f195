"""The JSON Schema of everything that `--json` prints, made from the types of `kvprobe/output`.

python docs/schema.py            # prints it
python docs/schema.py --write    # puts it into docs/kvprobe.schema.json, unless that needs a major version
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvprobe.output import VERSION_KEY, schema

FILE = Path(__file__).with_name("kvprobe.schema.json")


def text() -> str:
    """The file as the types have it."""
    return json.dumps(schema(), indent=1) + "\n"


def major(one: dict[str, Any]) -> int:
    """The first number of a schema's version."""
    return int(str(one[VERSION_KEY]).partition(".")[0])


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What whoever reads by the old schema would miss or misread in a document of the new one; a line each."""
    out = [f"kvprobe {name} prints no JSON any more" for name in old["documents"] if name not in new["documents"]]
    for name in set(old["documents"]) & set(new["documents"]):
        out += _changed(old["documents"][name], new["documents"][name], f"kvprobe {name}")
    for name, was in old["$defs"].items():
        now = new["$defs"].get(name)
        if now is not None:
            out += _changed(was, now, name)
        elif f'#/$defs/{name}"' in json.dumps(new):
            out.append(f"{name} is gone, and something refers to it")
    return sorted(out)


def _changed(was: dict[str, Any], now: dict[str, Any], where: str) -> list[str]:
    """The same of one type: keys gone or no more certain to be there, other types, words of an enum gone."""
    out = []
    for key, kind in was.get("properties", {}).items():
        if key == VERSION_KEY:
            continue
        if key not in now.get("properties", {}):
            out.append(f"{where}: {key} is gone")
        else:
            out += _changed(kind, now["properties"][key], f"{where}: {key}")
    out += [f"{where}: {key} may be absent" for key in was.get("required", ()) if key not in now.get("required", ())]
    out += [f"{where}: the word {word} is gone" for word in was.get("enum", ()) if word not in now.get("enum", ())]
    for key in ("type", "$ref"):
        if was.get(key) != now.get(key):
            out.append(f"{where}: {key} was {was.get(key)}, now {now.get(key)}")
    for key in ("items", "additionalProperties"):
        before, after = was.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            out += _changed(before, after, f"{where}: each")
        elif before != after:
            out.append(f"{where}: {key} was {before}, now {after}")
    if was.get("anyOf", []) != now.get("anyOf", []):
        out.append(f"{where}: was one of {was.get('anyOf')}, now of {now.get('anyOf')}")
    return out


if __name__ == "__main__":
    if "--write" not in sys.argv[1:]:
        print(text(), end="")
    else:
        before = json.loads(FILE.read_text()) if FILE.exists() else None
        found = breaks(before, schema()) if before is not None else []
        if before is not None and found and major(schema()) <= major(before):
            sys.exit("\n".join([*found, "step the major version in kvprobe/output/document.py, or put it back"]))
        FILE.write_text(text())
