"""Parameters whose changes are always seen: an in-place change through `.data` counts like any other.

torch counts in-place changes of a tensor (`_version`), but `param.data` is an alias with a count of its own, so
`param.data.add_(1)` passes unseen. While a parameter is offloaded its class is a subclass of its own class in which
`data` is `detach()`, an alias that shares the count.
"""

from __future__ import annotations

import functools
from typing import Any

from kvprobe.errors import KvprobeError


@functools.cache
def _data() -> Any:
    import torch

    return torch._C.TensorBase.data


def bind(tensor: Any, memory: Any) -> None:
    """Makes a tensor's bytes those of `memory`, without counting it as a change."""
    _data().__set__(tensor, memory)


def _get(self: Any) -> Any:
    return self.detach()


def _set(self: Any, value: Any) -> None:
    """`param.data = value`: new bytes for the same weights, wherever they live; another shape is another model."""
    import torch

    if value.shape != self.shape or value.dtype != self.dtype:
        raise KvprobeError(
            f"an offloaded parameter of {tuple(self.shape)} {self.dtype} cannot become "
            f"{tuple(value.shape)} {value.dtype}: call remove() first, then change it"
        )
    with torch.no_grad():
        self.detach().copy_(value)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """A copy is an ordinary parameter with bytes of its own."""
    import torch

    if id(self) not in memo:
        copy = self.detach().clone()
        memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
    return memo[id(self)]


@functools.cache
def _watched(kind: type) -> type:
    import torch

    body: dict[str, Any] = {"data": property(_get, _set), "__deepcopy__": _deepcopy}
    if kind is torch.Tensor:
        body["__torch_function__"] = torch._C._disabled_torch_function_impl
    return type(kind.__name__, (kind,), body)


def watch(tensor: Any) -> Any:
    """Swaps the class of a tensor for its watched one and returns the class to give to `unwatch`."""
    kind: Any = type(tensor)
    tensor.__class__ = _watched(kind)
    return kind


def unwatch(tensor: Any, kind: type) -> None:
    """Gives a tensor its class back."""
    tensor.__class__ = kind
