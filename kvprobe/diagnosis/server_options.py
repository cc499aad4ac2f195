"""Options of servers and libraries that a change names: those of the programs that a recording names, else all."""

from __future__ import annotations

from collections.abc import Mapping

from kvprobe.recordings.model import Recording

__all__ = ["with_options"]

# What tells a program, in lower case, in the names of a recording: its commands, its ranges, its functions.
SIGNS = {"vLLM": ("vllm",), "SGLang": ("sglang",), "DataLoader": ("dataloader", "num_workers")}


def with_options(recording: Recording, text: str, options: Mapping[str, str]) -> str:
    """A change, and after it the options by which these programs make it.

    Args:
        recording: names its programs by command, range or function, or names none.
        text: the change, for any program; a sentence without its full stop.
        options: name of a program, a key of SIGNS -> a sentence about its option, without its full stop.
    """
    names = "\n".join([*recording.names, *(one.command or "" for one in recording.source)]).lower()
    named = [one for one in options if any(sign in names for sign in SIGNS[one])]
    commands = any(one.command for one in recording.source) or bool((recording.processes["command"] > 0).any())
    shown = named or ([] if commands else list(options))
    return ". ".join([text, *(options[one] for one in shown)])
