"""accelerate's and diffusers' offloading of small random models, real code on a CPU: same output, copies named."""

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument.calls import TimedCalls

pytestmark = pytest.mark.servers
torch = pytest.importorskip("torch")


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()


def accelerated():
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(network(), execution_device=torch.device("cpu"))


def grouped():
    pytest.importorskip("diffusers")
    from diffusers.hooks import apply_group_offloading

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model = Model().eval()
    apply_group_offloading(model, onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    return model


CASES = [("accelerate", "accelerate.hooks", accelerated), ("diffusers", "diffusers.group_offload", grouped)]


@pytest.mark.parametrize(("server", "adapter", "make"), CASES)
def test_output_is_the_same_and_every_forward_is_seen(server, adapter, make):
    x = torch.randn(3, 16)
    model = make()
    with torch.no_grad():
        plain = model(x)
        for _ in range(2):
            with instrument.observe(server) as seen:
                assert torch.equal(model(x), plain)
            assert seen.states[adapter] == "removed"
            loads = [c for c in seen.calls if c["direction"] == "load" and c["bytes"]]
            assert loads
            assert all(c["dur_ns"] > 0 and "pageable" in c["cause"] for c in loads)
    if server == "accelerate":
        assert sorted(c["bytes"] for c in loads) == sorted([(16 * 32 + 32) * 4, (32 * 8 + 8) * 4])
        assert all(c["blocking_copies"] == c["pageable_copies"] == c["copies"] == 2 for c in loads)
    else:
        assert [c["bytes"] for c in loads] == [(16 * 16 + 16) * 4] * 4


def test_a_model_that_is_moved_as_a_whole_is_seen():
    """diffusers' enable_model_cpu_offload; the meta device takes the GPU's place."""
    accelerate = pytest.importorskip("accelerate")
    model, hook = accelerate.cpu_offload_with_hook(network(), execution_device=torch.device("meta"))
    with instrument.observe("accelerate") as seen:
        for _ in range(2):
            assert model(torch.empty(3, 16, device="meta")).shape == (3, 8)
        with pytest.raises(NotImplementedError):  # torch's own: nothing comes back from the meta device
            hook.offload()
    moved = [(c["copies"], c["bytes"], c["pageable_copies"]) for c in seen.calls if c["call"].startswith("CpuOffload")]
    assert moved == [(4, 4 * (16 * 32 + 32 + 32 * 8 + 8), 4), (0, 0, 0)]


@pytest.mark.parametrize(("server", "adapter", "make"), CASES)
def test_a_hook_that_fails_changes_no_output(server, adapter, make, monkeypatch):
    x = torch.randn(3, 16)
    model = make()

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(TimedCalls, "_emit", broken)
    with torch.no_grad():
        plain = model(x)
        with instrument.observe(server) as seen:
            for _ in range(3):
                assert torch.equal(model(x), plain)
    assert seen.states[adapter].startswith("failed: ")
