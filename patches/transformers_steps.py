"""transformers: the steps of `generate`, each row of a batch as a request. Measured only.

`generate` chooses tokens in a loop that asks at its top whether anything is left to do. Between two such questions lies
one token of every row; the first one also takes the prompt. Where the loop defers its look at the tokens it runs ahead
of the GPU, and the time of a step is that of its thread. Beams and assisted decoding have other loops: not told.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import ModuleType
from typing import Any

from kvprobe.instrument import step_log
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.hooks import Call, Patcher

_MODULE = "transformers.generation.utils"


class _Generation:
    """A call of `generate` that is running."""

    __slots__ = ("alike", "began_ns", "prompt", "requests", "steps")

    def __init__(self, name: str, rows: int, prompt: int, began_ns: int) -> None:
        self.requests = (name,) if rows == 1 else tuple(f"{name}.{row}" for row in range(rows))
        self.prompt, self.began_ns = prompt, began_ns
        self.steps = -1  # the first question comes before the first token
        self.alike: step_log.AlikeSteps | None = None  # those that decode


class Steps(Adapter):
    """The loop of greedy search and sampling."""

    name = "transformers.steps"
    summary = (
        "Tells the steps of generate (greedy search and sampling): the rows of its batch, the prompt's length, times."
    )
    targets = (
        Target(_MODULE, "GenerationMixin.generate", None),
        Target(_MODULE, "GenerationMixin._sample", None),
        Target(_MODULE, "GenerationMixin._has_unfinished_sequences", None),
    )

    def __init__(self) -> None:
        super().__init__()
        self._names, self._numbers = itertools.count(), itertools.count()
        self._mine = threading.local()

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the loop, and what it asks."""
        patcher.wrap(module.GenerationMixin, "generate", self.generated)
        patcher.wrap(module.GenerationMixin, "_sample", self.sampled)
        patcher.watch(module.GenerationMixin, "_has_unfinished_sequences", self.asked)

    def generated(self, call: Call, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `generate`: its requests arrive."""
        outer = getattr(self._mine, "arrived_ns", None)
        self._mine.arrived_ns = time.monotonic_ns()
        try:
            return call()
        finally:
            self._mine.arrived_ns = outer

    def sampled(self, call: Call, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `_sample`: from the prompt to the last token."""
        rows, prompt = (args[0] if args else kwargs["input_ids"]).shape
        if not step_log.wanted():
            return call()
        outer = getattr(self._mine, "open", None)
        mine = self._mine.open = _Generation(f"generate-{next(self._names)}", rows, prompt, time.monotonic_ns())
        arrived_ns = getattr(self._mine, "arrived_ns", None) or mine.began_ns
        for one in mine.requests:
            step_log.mark_request(one, "arrived", arrived_ns)
        try:
            return call()
        finally:
            self._mine.open = outer
            for one in mine.requests:
                step_log.mark_request(one, "ended")

    def asked(self, now_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `_has_unfinished_sequences`: every row had its next token when that was asked."""
        mine: _Generation | None = getattr(self._mine, "open", None)
        if mine is not None:
            if mine.steps > 0:
                if mine.alike is None:
                    mine.alike = step_log.AlikeSteps("decode", mine.requests, 1, 1, "transformers")
                mine.alike.add(mine.began_ns, now_ns, next(self._numbers))
            elif not mine.steps:
                times = mine.began_ns, now_ns
                step_log.told(times, next(self._numbers), "prefill", mine.requests, 1, mine.prompt, "transformers")
            if mine.steps >= 0:
                mine.began_ns = now_ns
            mine.steps += 1
