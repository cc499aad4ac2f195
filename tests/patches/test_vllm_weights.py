"""vLLM 0.32's own PrefetchOffloader over the host runtime: its copies and waits are seen, its results unchanged."""

import importlib
import logging
import sys
import types

import pytest

import kvprobe.instrument as instrument

VERSION = "0.33.0"


def stub(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or stub(parent), child, module)
    return module


def load(root, name):
    spec = importlib.util.spec_from_file_location(name, root / (name.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(sys.modules.get(parent) or stub(parent), child, module)
    spec.loader.exec_module(module)
    return module


class Offloader:
    """The real offloader with `layers` modules of two parameters, its static buffers in the runtime's memory."""

    def __init__(self, host, root, layers=4, size=256 << 10):
        torch = host.torch
        sys.path.insert(0, str(root))
        stub("vllm.envs", VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=True, VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=False)
        log = logging.getLogger("stub")
        log.info_once = log.info
        stub("vllm.logger", init_logger=lambda name: log)
        stub("vllm.utils.platform_utils", is_pin_memory_available=lambda: True, is_uva_available=lambda: True)
        stub("vllm.utils.torch_utils", get_dtype_size=lambda dtype: dtype.itemsize)
        load(root, "vllm.model_executor.offloader.base")
        stub("vllm.model_executor.offloader.prefetch_ops")
        self.module = module = load(root, "vllm.model_executor.offloader.prefetch")
        module.torch = host.as_torch()
        host.cuda.is_current_stream_capturing = lambda: False
        rt, event, stream = host.rt, host.cuda.Event, host.cuda.Stream
        stream.record_event = lambda self, one: one.record(self)
        type(host.cuda.current_stream()).record_event = lambda self, one: one.record(self)

        class Buffer:
            """A static GPU buffer: `copy_` is one asynchronous copy on the current stream, as torch's is."""

            def __init__(self, source):
                self.memory = host.tensor((size,), torch.uint8, device=True)
                self.source = source

            def copy_(self, source, non_blocking=False):
                rt.memcpy_async(self.memory.data_ptr(), source.data_ptr(), size, "h2d", host.current[-1])

        self.offloader = made = object.__new__(module.PrefetchOffloader)
        made.copy_stream, made.prefetch_step = stream(), 2
        made.module_offloaders = []
        for index in range(layers):
            one = object.__new__(module._ModuleOffloader)
            sources = [host.tensor((size,), torch.uint8, device=False).fill_(index + k + 1) for k in range(2)]
            one._param_offloaders = {
                str(k): types.SimpleNamespace(_cpu_storage=source, _gpu_buffer=Buffer(source))
                for k, source in enumerate(sources)
            }
            one._buffer_pool, one.copy_stream, one.layer_idx = object(), made.copy_stream, index
            one._copy_done_event, one._event_valid_for_eager, one._prefetch_in_capture = event(), False, False
            made.module_offloaders.append(one)
        self.host = host

    def forward(self, compute_ns):
        """What the hooked forwards do, layer after layer."""
        layers = len(self.offloader.module_offloaders)
        for index in range(layers):
            self.offloader._wait_for_layer(index)
            self.host.rt.launch_delay(self.host.compute, compute_ns)
            self.offloader._start_prefetch((index + self.offloader.prefetch_step) % layers)


@pytest.mark.usefixtures("clean_modules")
def test_every_layers_copy_and_wait_is_told(host, wheel_tree):
    here = host(KVHOST_H2D_GBPS="0.5", KVHOST_CLOCK="virtual")
    made = Offloader(here, wheel_tree("vllm", VERSION, "vllm/"))
    with instrument.observe("vllm") as seen:
        for index in range(2):
            made.offloader._start_prefetch(index)
        for _ in range(3):
            made.forward(compute_ns=1000)  # nothing to hide behind: each layer waits
            here.rt.synchronize()
        for _ in range(3):
            made.forward(compute_ns=8_000_000)
            here.rt.synchronize()
        made.forward(1000)
        here.rt.synchronize()
    assert seen.states["vllm.weight_prefetch"] == "removed"
    layers = [call for call in seen.calls if call["call"] == "weights.layer"]
    assert len(layers) >= 24
    assert {call["layer"] for call in layers} == {0, 1, 2, 3}
    assert all(call["bytes"] == 512 << 10 and call["copies"] == 2 for call in layers)
    exposed, hidden = layers[3:11], layers[15:23]
    assert sum(call["wait_ns"] for call in exposed) > 5 * sum(call["wait_ns"] for call in hidden)
    for one in made.offloader.module_offloaders:
        for parameter in one._param_offloaders.values():
            assert here.torch.equal(parameter._gpu_buffer.memory.as_subclass(here.torch.Tensor), parameter._cpu_storage)
