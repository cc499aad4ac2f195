"""The steps that an adapter told, read back."""

import json

from kvprobe.runfolder.step_lines import one_by_one


def told_in(folder):
    """Steps as they were told, by the names of their requests, and who ended."""
    (path,) = folder.glob("steps-*.jsonl")
    names, told, ended = {}, [], []
    lines = [one for line in path.read_text().splitlines() for one in one_by_one(json.loads(line))]
    for line in lines:
        if line["kind"] == "request":
            names[line["n"]] = line["request"]
        elif line["kind"] == "step":
            of = [names[n] for n in line["requests"]]
            told.append((line["step"], line["phase"], of, line["tokens"], line["computed"]))
        elif line["kind"] == "ended":
            ended.append(names[line["n"]])
    return told, ended
