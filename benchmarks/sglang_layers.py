"""What a load of SGLang's direct back end costs the scheduler's thread: a job a layer, against SGLang's own calls.

    python benchmarks/sglang_layers.py [--layers 64] [--tokens 512] [--rounds 15]

SGLang's controller, transfer engine and host pools are the published ones, over the embedded host runtime, as in the
tests; its compiled copy functions are empty, so that the arm `own` is the Python around them alone. Printed: CPU time
of the calling thread for one `start_loading`, and for the forward's waits for every layer's event; medians, the arms
taking turns. Copies are 256 bytes a row: what they take is not the thread's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
POOLS = {
    "rows, neighbours": ({"layout": "layer_first"}, False),
    "rows, scattered": ({"layout": "layer_first"}, True),
    "pages of 16, scattered": ({"layout": "page_first_direct", "page_size": 16}, True),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of a load")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ.update(KVPROBE_DEVICE="host", KVHOST_H2D_GBPS="1000", CUDA_DEVICE_MAX_CONNECTIONS="32")
    import pytest

    spec = importlib.util.spec_from_file_location("host_torch", ROOT / "tests" / "patches" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from tests.patches import sglang_host

    sglang_host.LAYERS = options.layers
    tree = module.tree("sglang", sglang_host.VERSION, *sglang_host.FILES)
    for name, (pool, scattered) in POOLS.items():
        with pytest.MonkeyPatch.context() as patched:
            host = module.Host(patched)
            host._device_tensor = host.torch.Tensor  # a subclass's attributes are slower than a real tensor's
            one = sglang_host.Engine(host, tree, patched, 2 * options.tokens, "direct", **pool)
            measure(name, one, scattered, options)
            host.close()


def measure(name, one, scattered, options):
    from kvprobe import instrument
    from kvprobe.instrument.submissions import POOLED
    from tests.patches import sglang_host

    page = one.pool.page_size
    pages = [list(range(at, at + page)) for at in range(0, options.tokens, page)]
    ids = [slot for some in ((pages[::2] + pages[1::2]) if scattered else pages) for slot in some]
    for kind in sglang_host.DIRECT:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang.") and kind in vars(module):
                setattr(module, kind, empty(kind))
    took = {arm: ([], []) for arm in ("own", "pooled")}
    other = one.host.cuda.Stream()
    for number in range(options.rounds + 2):
        for arm, (asked, waited) in took.items():
            if arm == "pooled":
                instrument.install("sglang", fix="auto")
                sglang_host.stand(one, "load", POOLED), sglang_host.stand(one, "store", POOLED)
            for each in range(4):
                start = time.thread_time_ns()
                ack = one.load(ids, ids)
                middle = time.thread_time_ns()
                counter = one.controller.layer_done_counter
                counter.set_consumer(one.producer)
                with one.host.cuda.stream(other):
                    for layer in range(options.layers):
                        counter.wait_until(layer)
                end = time.thread_time_ns()
                ack.finish_event.synchronize()
                one.host.rt.synchronize()
                if number >= 2 and each:
                    asked.append(middle - start), waited.append(end - middle)
            if arm == "pooled":
                instrument.uninstall("sglang")
    for arm, (asked, waited) in took.items():
        print(f"{name:24s} {arm:7s} load {median(asked) / 1e3:8.0f} us   waits {median(waited) / 1e3:7.0f} us")


def empty(name):
    def function(*args, **kwargs):
        return None

    function.__name__ = name
    return function


if __name__ == "__main__":
    main()
