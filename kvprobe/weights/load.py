"""`load(folder)`: a transformers checkpoint straight to where its weights will live, never held twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvprobe.cuda import Runtime, find_runtime
from kvprobe.errors import KvprobeError
from kvprobe.weights.checkpoint import files_of
from kvprobe.weights.offload import Coding, WeightOffload, device_of, need_torch
from kvprobe.weights.plan import Limit, Plan, make_plan


def load(
    folder: str | Path,
    *,
    gpu_fraction: float | None = None,
    gpu_bytes: int | None = None,
    window: str | int = "auto",
    device: str = "auto",
    runtime: Runtime | None = None,
    model: Any = None,
    wire: str = "raw",
) -> WeightOffload:
    """Loads a local checkpoint (config.json and safetensors) with its weights partly in CPU memory.

    The model is built without weights, its layers get their places on the GPU and in pinned memory, and each tensor is
    read from the file into its place, one at a time: no more memory is used than the places themselves take.

    Args:
        folder: of the checkpoint.
        gpu_fraction: as for `offload`; with 1 all weights go to the GPU and nothing is hooked.
        gpu_bytes: as for `offload`.
        window: as for `offload`.
        device: as for `offload`.
        runtime: as for `offload`.
        model: a model built under `hollow()`; default: the causal language model that config.json names, of
            transformers.
        wire: as for `offload`.

    Returns:
        The offload; its `model` is in eval mode.

    Raises:
        UsageError: no checkpoint there, a limit that cannot be kept.
        KvprobeError: the checkpoint is damaged, incomplete or of another model; no transformers.
    """
    torch = need_torch()
    folder = Path(folder)
    limit = Limit(gpu_fraction, gpu_bytes)
    files = files_of(folder)
    if model is None:
        model = _build(folder)
    with torch.inference_mode(False), torch.no_grad():
        empty = _give_memory(model)
        runtime = runtime or find_runtime(device_of(device))
        coding = Coding.of(wire, runtime)
        plan = Plan(0, 0) if gpu_fraction == 1 else make_plan(model, limit, window, coding.staging)
        held = WeightOffload(model, plan, runtime if plan.units else None, None, coding, hollow=empty)
        try:
            if not plan.units and runtime.provider == "cuda":
                model.to("cuda")  # pages that were never written cost a copy but no memory
            _fill(model, files)
            held.pack()
        except BaseException:
            held.remove()
            raise
    model.eval()
    return held


@contextlib.contextmanager
def hollow() -> Iterator[None]:
    """Inside, modules are built with parameters that have a shape and no memory; buffers are real."""
    import torch

    original = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        original(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            kind = type(parameter)
            module._parameters[name] = kind(parameter.to("meta"), requires_grad=parameter.requires_grad)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original


def _build(folder: Path) -> Any:
    """The model that config.json describes, without weights."""
    try:
        import transformers
    except ImportError:
        raise KvprobeError("loading a checkpoint needs transformers in this environment") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise KvprobeError(f"{folder / 'config.json'} cannot be read: {str(error).splitlines()[0]}") from None
    try:
        with hollow():
            return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or "auto")
    except (ValueError, KeyError) as error:
        raise KvprobeError(f"transformers cannot build {config.model_type!r}: {str(error).splitlines()[0]}") from None


def _give_memory(model: Any) -> set[int]:
    """Memory for parameters that have none, untouched until it is written; returns the ids of these parameters."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                if id(parameter) not in made:
                    memory = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                    made[id(parameter)] = type(parameter)(memory, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    for buffer_name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise KvprobeError(f"buffer {buffer_name} has no value: build the model under kvprobe.weights.hollow()")
    return {id(parameter) for parameter in made.values()}


def _fill(model: Any, files: list[Path]) -> None:
    """Reads every tensor into its place."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise KvprobeError("loading a checkpoint needs safetensors in this environment") from None
    places = dict(model.named_parameters(remove_duplicate=False))
    places |= dict(model.named_buffers(remove_duplicate=False))
    missing = {id(parameter): name for name, parameter in model.named_parameters()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    place = places.get(key)
                    if place is None:
                        place = places.get(prefix + key, places.get(key.removeprefix(prefix)))
                    if place is None:
                        continue
                    value = tensors.get_tensor(key)
                    if value.shape != place.shape:
                        raise KvprobeError(
                            f"{file}: {key} has shape {tuple(value.shape)}, the model "
                            f"{tuple(place.shape)}: checkpoint and config do not fit"
                        )
                    place.detach().copy_(value)
                    missing.pop(id(place), None)
        except SafetensorError as error:
            raise KvprobeError(f"{file} is damaged or half written ({error}): fetch the checkpoint again") from None
    if missing:
        first = next(iter(missing.values()))
        raise KvprobeError(
            f"the checkpoint lacks {len(missing)} tensors of this model, the first is {first}: fetch it "
            "again, or load it with from_pretrained and use offload()"
        )
