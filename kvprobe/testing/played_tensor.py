"""A tensor on the played GPU, and `tensor.data`, by which a tensor goes from one device to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.testing.played_torch import PlayedTorch

__all__ = ["data_property", "tensor_class"]

_OURS = ("inner", "_is_param")  # what a tensor has because it is a played one, or a parameter that is one


def tensor_class(play: PlayedTorch) -> Any:
    """The class of tensors on the played GPU."""
    torch = play.torch

    class PlayedTensor(torch.Tensor):  # type: ignore[misc, name-defined]
        """A tensor on the played GPU; `inner` is the CPU's view of its memory."""

        @staticmethod
        def __new__(cls: Any, inner: Any, requires_grad: bool | None = None) -> Any:
            if requires_grad is not None:  # `type(parameter)(tensor, requires_grad=...)` makes another parameter
                return torch.nn.Parameter(inner, requires_grad)
            made = torch.Tensor._make_subclass(
                cls, inner, False, dispatch_device=True, device_for_backend_keys=play.device
            )
            made.inner = inner
            return made

        __torch_function__ = torch._C._disabled_torch_function_impl

        def __repr__(self, **_: Any) -> str:
            play._drain()
            return f"{repr(self.inner)[:-1]}, device='{play.device}')"

        def __format__(self, spec: str) -> str:
            return format(self.item(), spec) if self.dim() == 0 else format(repr(self), spec)

        def tolist(self) -> Any:
            return self.to("cpu").tolist()

        def numpy(self, *, force: bool = False) -> Any:
            if not force:
                raise TypeError(
                    f"can't convert {play.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
                    "to host memory first."
                )
            return self.to("cpu").numpy()

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            made = memo[id(self)] = play.Tensor(play._on_device(self.inner.clone()).inner)
            made.__dict__.update({name: value for name, value in vars(self).items() if name != "inner"})
            return made.requires_grad_(self.requires_grad)

        def record_stream(self, stream: Any) -> None:
            """Its memory is the played allocator's, which takes it back when nobody refers to it."""

        @classmethod
        def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return play.run(func, args, kwargs or {})

    return PlayedTensor


def data_property(play: PlayedTorch) -> property:
    """`tensor.data`, which may be set to a tensor of another device: the object stays, its content is exchanged."""
    torch, own = play.torch, play.torch.Tensor.data

    def get(tensor: Any) -> Any:
        return play.Tensor(tensor.inner) if isinstance(tensor, play.Tensor) else own.__get__(tensor)

    def put(tensor: Any, value: Any) -> None:
        if not isinstance(tensor, play.Tensor) and not isinstance(value, play.Tensor):
            own.__set__(tensor, value)
            return
        to = play.Tensor(value.inner) if isinstance(value, play.Tensor) else value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            to = torch.nn.Parameter(to, tensor.requires_grad)
        elif tensor.requires_grad:
            to.requires_grad_()
        _exchange(torch, tensor, to)

    return property(get, put)


def _exchange(torch: Any, one: Any, other: Any) -> None:
    """What torch.utils.swap_tensors does, also beside weak references; `one` keeps what was put on it."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    own = {name: value for name, value in vars(one).items() if name not in _OURS}
    one.__dict__, other.__dict__ = {**own, **vars(other)}, vars(one)
    torch._C._swap_tensor_impl(one, other)
