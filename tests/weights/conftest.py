"""Small models, the host runtime's own account of memory, and faults on demand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is a peer: weight offload is tested where it is installed")

from kvprobe.cuda.hostruntime import HostRuntime, host_runtime  # noqa: E402

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Block(torch.nn.Module):
    """A layer with parameters of several sizes, a buffer, and weights in two types."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 3 * width)
        self.down = torch.nn.Linear(3 * width, width)
        self.register_buffer("codes", torch.randint(-128, 127, (width, width), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(width, 1, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + torch.nn.functional.linear(x, (self.codes.float() * self.scale.float() / 1000).to(x.dtype))


class Model(torch.nn.Module):
    """Embedding, layers, a head that shares the embedding's weights."""

    def __init__(self, width: int = 64, layers: int = 16, words: int = 100) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.path = list(range(layers))
        self.fail_after = -1

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for i in self.path:
            x = self.layers[i](x)
            if i == self.fail_after:
                raise RuntimeError("in the middle")
        return self.head(x)


@pytest.fixture
def ids() -> Any:
    return torch.arange(24).reshape(2, 12)


@pytest.fixture
def model() -> Any:
    return Model().eval()


@pytest.fixture(scope="session")
def runtime() -> HostRuntime:
    return host_runtime()


class Account:
    """What the runtime says it holds."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> int:
        return int(getattr(self._runtime.stats, name))

    @property
    def held(self) -> tuple[int, int, int, int]:
        return self.device_bytes, self.pinned_bytes, self.streams, self.events


@pytest.fixture
def account(runtime: HostRuntime) -> Account:
    gc.collect()  # what tests of other modules left is not given back in the middle of this one
    return Account(runtime)


@pytest.fixture
def fail(runtime: HostRuntime) -> Iterator[Any]:
    """Makes the n-th next call of a name, or the n-th next copy, fail."""

    def arm(name: str, number: int = 1, code: int = OUT_OF_MEMORY) -> None:
        if name == "copy":
            runtime.fail_copy(number, code)
        else:
            runtime.fail_call(name, number, code)

    yield arm
    runtime.fail_copy(0)
