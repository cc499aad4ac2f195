"""Offloaded models compute what untouched ones do, within the memory allowed, whatever happens to them."""

from __future__ import annotations

import copy
import gc
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvprobe.errors import CudaError, KvprobeError, UsageError  # noqa: E402
from kvprobe.weights import offload  # noqa: E402


def logits(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids)


def host(model: Any, fraction: float = 0.5, **how: Any) -> Any:
    return offload(model, gpu_fraction=fraction, device="host", **how)


@pytest.mark.parametrize("window", ["auto", 0, 1, 2, "100KiB"])
@pytest.mark.parametrize("fraction", [0.95, 0.9, 0.7, 0.5, 0.3, 0.1])
def test_same_logits_bit_for_bit_and_memory_within_the_limit(model, ids, account, fraction, window):
    wanted = logits(model, ids)
    before = account.device_bytes
    try:
        held = host(model, fraction, window=window)
    except UsageError as error:
        assert "raise gpu_fraction" in str(error) and (fraction, window) in [(0.1, 1), (0.1, 2)]
        return
    with held:
        assert held.active and held.plan.units
        for _ in range(3):
            assert torch.equal(logits(model, ids), wanted)
            assert account.device_bytes - before == held.gpu_bytes <= held.plan.limit_bytes


def test_fraction_one_touches_nothing(model, account):
    def hooks() -> list[Any]:
        return [(dict(m._forward_hooks), dict(m._forward_pre_hooks), m.forward.__func__) for m in model.modules()]

    before, where, names = hooks(), {k: v.data_ptr() for k, v in model.state_dict().items()}, set(vars(model))
    held = account.held
    with offload(model, gpu_fraction=1) as one:
        assert not one.active and one.gpu_bytes == 0
        assert hooks() == before and set(vars(model)) == names and account.held == held
        assert {k: v.data_ptr() for k, v in model.state_dict().items()} == where


def test_a_limit_above_the_model_offloads_nothing(model):
    assert not offload(model, gpu_bytes=1 << 30, device="host").active


def test_remove_gives_the_untouched_model_back_and_leaks_nothing(model, ids, account):
    wanted, kinds = logits(model, ids), {k: type(v) for k, v in model.named_parameters()}
    objects = {k: id(v) for k, v in (*model.named_parameters(), *model.named_buffers())}
    before = account.held
    held = host(model, 0.3)
    logits(model, ids)
    held.remove()
    held.remove()
    gc.collect()
    assert account.held == before
    assert {k: type(v) for k, v in model.named_parameters()} == kinds
    assert {k: id(v) for k, v in (*model.named_parameters(), *model.named_buffers())} == objects
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert torch.equal(logits(model, ids), wanted)
    with host(model, 0.6):
        assert torch.equal(logits(model, ids), wanted)


def test_a_model_cannot_be_offloaded_twice_at_once(model):
    with host(model), pytest.raises(UsageError, match="offloaded already"):
        host(model)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gpu_fraction": 0},
        {"gpu_fraction": 1.2},
        {"gpu_bytes": 0},
        {"gpu_fraction": 0.5, "gpu_bytes": 5},
        {"gpu_fraction": 0.5, "window": -1},
        {"gpu_fraction": 0.5, "window": "much"},
        {"gpu_fraction": 0.5, "device": "x"},
    ],
)
def test_what_cannot_be_is_one_clear_error(model, how):
    with pytest.raises(UsageError) as caught:
        offload(model, **{"device": "host", **how})
    assert "\n" not in str(caught.value)


# -- how a model is called -----------------------------------------------------------------------------------------


def test_layers_called_twice_skipped_and_reordered(model, ids):
    paths = ([0, 1, 1, 2, 3, 0, 4, 5, 6, 7, 7], [7, 6, 5, 4, 3, 2, 1, 0], [2, 5], list(range(8)), [3, 3, 3], [])
    wanted = []
    for path in paths:
        model.path = path
        wanted.append(logits(model, ids))
    for window in (0, 1, 3):
        with host(model, 0.6, window=window):
            for _ in range(2):
                for path, right in zip(paths, wanted, strict=True):
                    model.path = path
                    assert torch.equal(logits(model, ids), right)


def test_a_repeated_order_is_foreseen(model, ids):
    model.path = [0, 1, 1, 2, 3, 0, 4, 5, 6, 7, 7]
    with host(model, 0.5, window=1) as held:
        logits(model, ids), logits(model, ids)
        misses = held._window.misses
        logits(model, ids), logits(model, ids)
        assert held._window.misses == misses


def test_a_single_layer_called_on_its_own(model, ids):
    x = torch.randn(2, 3, 64)
    wanted = [layer(x) for layer in model.layers]
    with host(model, 0.3), torch.no_grad():
        for layer, right in zip(model.layers, wanted, strict=True):
            assert torch.equal(layer(x), right)


def test_an_exception_in_the_middle_leaves_the_model_usable(model, ids):
    wanted = logits(model, ids)
    with host(model, 0.3) as held:
        for at in range(16):
            model.fail_after = at
            with pytest.raises(RuntimeError, match="in the middle"):
                logits(model, ids)
            model.fail_after = -1
            assert torch.equal(logits(model, ids), wanted)
        with pytest.raises(IndexError):
            logits(model, torch.tensor([[5000]]))
        for layer in model.layers:  # fails inside the layer itself
            with pytest.raises(RuntimeError):
                layer(torch.randn(3, 5))
        assert torch.equal(logits(model, ids), wanted)
        assert not any(slot.busy for slot in held._window.slots)


def test_grad_no_grad_and_inference_mode(model, ids):
    wanted = logits(model, ids)
    with host(model, 0.3):
        assert torch.equal(model(ids), wanted)
        with torch.inference_mode():
            assert torch.equal(model(ids), wanted)
        assert torch.equal(model(ids), wanted)
    with torch.inference_mode(), host(model, 0.3):
        assert torch.equal(model(ids), wanted)


def test_two_threads_are_told_off(model, ids):
    from concurrent.futures import ThreadPoolExecutor

    with host(model), ThreadPoolExecutor(1) as pool:
        model.layers[3].register_forward_pre_hook(lambda *_: pool.submit(logits, model, ids).result())
        with pytest.raises(KvprobeError, match="two threads"):
            logits(model, ids)


# -- changed weights -----------------------------------------------------------------------------------------------


def change_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def change_one_element(model: Any) -> None:
    model.layers[1].up.weight.data[3, 5] = 7.0


def change_set_data(model: Any) -> None:
    for layer in model.layers:
        layer.down.weight.data = torch.full_like(layer.down.weight, 0.01)


def change_no_grad(model: Any) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer.codes.neg_()
            layer.up.bias.add_(1)


def change_load_state_dict(model: Any) -> None:
    torch.manual_seed(5)
    state = model.state_dict()
    model.load_state_dict({k: torch.rand_like(v) if v.is_floating_point() else v for k, v in state.items()})


@pytest.mark.parametrize(
    "change", [change_data, change_one_element, change_set_data, change_no_grad, change_load_state_dict]
)
@pytest.mark.parametrize("window", [0, 1, 2])
def test_parameters_changed_in_place_are_used(model, ids, change, window):
    other = copy.deepcopy(model)
    with host(model, 0.4, window=window):
        assert torch.equal(logits(model, ids), logits(other, ids))
        for _ in range(2):
            change(model), change(other)
            assert torch.equal(logits(model, ids), logits(other, ids))
    assert torch.equal(logits(model, ids), logits(other, ids))


def test_a_parameter_of_another_shape_is_one_clear_error(model, ids):
    wanted = logits(model, ids)
    with host(model, 0.3):
        with pytest.raises(KvprobeError, match=r"remove\(\) first"):
            model.layers[0].up.weight.data = torch.zeros(3)
        assert torch.equal(logits(model, ids), wanted)


def test_training_steps_equal_those_of_the_untouched_model(model, ids):
    def run(fraction: float) -> list[Any]:
        trained = copy.deepcopy(model).train()
        with host(trained, fraction, window=1):
            optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                loss = trained(ids).square().mean()
                loss.backward()
                optimizer.step()
        return [loss.detach(), *(p.detach() for p in trained.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(0.4), run(1), strict=True))


def test_buffers_written_in_a_forward_are_kept():
    def run(fraction: float) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(32) for _ in range(8))).train()
        with offload(model, gpu_fraction=fraction, device="host", window=1), torch.no_grad():
            for _ in range(3):
                model(torch.randn(16, 32))
        return model.state_dict()

    right = run(1)
    assert right["3.running_mean"].abs().sum() > 0
    assert all(torch.equal(value, right[name]) for name, value in run(0.6).items())


def test_a_change_between_forward_and_backward_is_one_clear_error(model, ids):
    with host(model, 0.4, window=1) as held:
        loss = model(ids).sum()
        held.plan.units[0].modules[0].up.weight.data.zero_()
        with pytest.raises((KvprobeError, RuntimeError), match=r"modified|changed"):
            loss.backward()


def test_state_dict_and_deepcopy_are_whole(model, ids):
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    right = logits(model, ids)
    with host(model, 0.3):
        logits(model, ids)
        found = model.state_dict()
        assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    with host(model, 0.3) as held:
        weight = copy.deepcopy(held.plan.units[0].modules[0].up.weight)
        assert type(weight) is torch.nn.Parameter
    assert torch.equal(logits(model, ids), right)


# -- shared, odd and large weights ---------------------------------------------------------------------------------


def test_shared_bytes_are_counted_and_moved_once(ids):
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(6)]
    layers[4].weight = layers[1].weight  # one parameter, two layers
    layers[5].weight.data = layers[2].weight.data.t()  # two parameters, the same bytes
    model = torch.nn.Sequential(*layers)
    x = torch.randn(3, 64)
    wanted = logits(model, x)
    with offload(model, gpu_fraction=0.5, device="host", window=0) as held:
        assert held.plan.total_bytes == 4 * 64 * 64 * 4
        assert torch.equal(logits(model, x), wanted)
        with torch.no_grad():
            layers[4].weight.zero_()
        assert not layers[1].weight.any()
        assert torch.equal(logits(model, x), torch.zeros(3, 64))
    assert layers[5].weight.data_ptr() == layers[2].weight.data_ptr() and layers[4].weight is layers[1].weight


def test_layers_are_spread_evenly():
    from kvprobe.weights.plan import spread

    for count in range(1, 60):
        for chosen in range(1, count + 1):
            found = spread(count, chosen)
            gaps = [b - a for a, b in pairwise(found)]
            assert len(set(found)) == chosen and found[0] >= 0 and found[-1] < count
            assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_model_without_blocks_is_cut_at_its_leaves():
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(50, 50) for _ in range(3))
            self.attention = torch.nn.MultiheadAttention(50, 5, batch_first=True)
            self.scale = torch.nn.ParameterList([torch.rand(50)])

        def forward(self, x: Any) -> Any:
            x = self.c(self.b(self.a(x)))
            return self.attention(x, x, x)[0] * self.scale[0]

    model, x = Odd().eval(), torch.randn(2, 4, 50)
    wanted = logits(model, x)
    with offload(model, gpu_fraction=0.8, device="host") as held:
        assert held.plan.units
        assert torch.equal(logits(model, x), wanted)


def test_every_type_of_element_survives():
    types = [
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.int64,
        torch.complex64,
    ]

    class Bytes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, kind in enumerate(types):
                raw = torch.randint(0, 2, (67 * kind.itemsize,), dtype=torch.uint8).view(kind)
                self.register_buffer(f"b{i}", raw)
            self.register_buffer("strided", torch.randn(8, 9)[::2, 1::3])

        def forward(self, x: Any) -> Any:
            return [b.clone() for b in self.buffers()]

    model = torch.nn.Sequential()
    model.layers = torch.nn.ModuleList(Bytes() for _ in range(4))
    wanted = [layer(0) for layer in model.layers]
    with offload(model, gpu_fraction=0.6, device="host"):
        for layer, right in zip(model.layers, wanted, strict=True):
            for a, b in zip(layer(0), right, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# -- no room, failing calls ----------------------------------------------------------------------------------------


def untouched(model: Any, ids: Any, wanted: Any) -> None:
    assert torch.equal(logits(model, ids), wanted)
    assert not any(m._forward_hooks for m in model.modules())
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("number", [1, 2])
def test_no_room_on_the_gpu_leaves_the_model_as_it_was(model, ids, account, fail, number):
    wanted, before = logits(model, ids), account.held
    fail("cudaMalloc", number)
    with pytest.raises(KvprobeError, match="lower gpu_fraction"):
        host(model)
    gc.collect()
    assert account.held == before
    untouched(model, ids, wanted)


def test_no_pinned_memory_falls_back_and_says_so(model, ids, fail):
    wanted = logits(model, ids)
    fail("cudaHostAlloc")
    with host(model) as held:
        assert held.pinned_bytes == 0 and "could not be pinned" in held.notes[0]
        for _ in range(3):
            assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("name", ["cudaStreamCreateWithPriority", "cudaEventCreateWithFlags"])
def test_a_failing_call_at_the_start_leaves_the_model_as_it_was(model, ids, fail, name):
    wanted = logits(model, ids)
    fail(name)
    with pytest.raises(CudaError):
        host(model)
    untouched(model, ids, wanted)


@pytest.mark.parametrize("window", [0, 1])
def test_a_failing_copy_is_one_error_and_the_next_forward_is_right(model, ids, fail, window):
    wanted = logits(model, ids)
    with host(model, 0.4, window=window) as held:
        for number in range(1, 12, 3):
            fail("copy", number, 1)
            with pytest.raises(CudaError):
                for _ in range(3):
                    logits(model, ids)
            assert torch.equal(logits(model, ids), wanted)
            assert torch.equal(logits(model, ids), wanted)
            assert not any(slot.busy for slot in held._window.slots)


# -- how it works --------------------------------------------------------------------------------------------------


def test_one_copy_a_layer_and_nothing_is_copied_that_is_there(model, ids, account):
    with host(model, 0.5, window=1) as held:
        logits(model, ids)
        held._settle()
        before = account.copies_submitted
        for _ in range(4):
            logits(model, ids)
        held._settle()
        assert account.copies_submitted - before == 4 * len(held.plan.units)


def test_another_window_over_the_same_layers(model, ids, account):
    wanted = logits(model, ids)
    with host(model, 0.6, window=3) as held:
        units = [unit.name for unit in held.plan.units]
        for window in (3, 0, 1, 2):
            held.set_window(window)
            for _ in range(3):
                assert torch.equal(logits(model, ids), wanted)
        with pytest.raises(UsageError, match="are allowed"):
            held.set_window(7)
        assert torch.equal(logits(model, ids), wanted)
        assert [unit.name for unit in held.plan.units] == units
        assert set(held.profile().measured) == {"0", "1", "2", "3"}


def test_torch_compile_keeps_going(model, ids):
    with torch.no_grad():
        wanted = torch.compile(copy.deepcopy(model), backend="eager")(ids)
        with host(model, 0.4) as held:
            compiled = torch.compile(model, backend="eager")
            for _ in range(4):
                assert torch.equal(compiled(ids), wanted)
            assert held._window.copies > 4
