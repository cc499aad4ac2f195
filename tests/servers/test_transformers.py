"""transformers' offloaded cache and continuous batching, real code on a CPU: same tokens, every move seen."""

import json
import time

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import event_log
from kvprobe.instrument.calls import TimedCalls
from kvprobe.runfolder.step_lines import one_by_one

pytestmark = pytest.mark.servers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class NoStream:
    """CPU only: `Cache.update` hard-codes CUDA's default stream."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: NoStream())
    cache = transformers.DynamicCache(config=model.config, offloading=True)
    cache.prefetch_stream = NoStream()
    ids = torch.arange(8).reshape(1, 8)
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False, eos_token_id=None
    )


def test_the_offloaded_cache_is_seen_and_gives_the_same_tokens(model, monkeypatch):
    plain = generate(model, monkeypatch)
    before = dict(vars(transformers.cache_utils.Cache))
    for _ in range(2):
        with instrument.observe("transformers") as seen:
            assert torch.equal(generate(model, monkeypatch), plain)
        assert dict(vars(transformers.cache_utils.Cache)) == before
    calls = [c for c in seen.calls if c["adapter"] == "transformers.cache"]
    stores = [c for c in calls if c["direction"] == "store"]
    assert len(stores) == 4 * 4  # layers x forwards
    assert all(c["dur_ns"] > 0 for c in calls)
    # The whole history moves for every token: 8, 9, 10, 11 tokens x 2 heads x 8 wide x 4 bytes, keys and values.
    assert [c["bytes"] for c in stores] == [2 * tokens * 2 * 8 * 4 for tokens in (8, 9, 10, 11) for _ in range(4)]


def test_a_hook_that_fails_changes_no_token(model, monkeypatch):
    plain = generate(model, monkeypatch)

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(TimedCalls, "_emit", broken)
    with instrument.observe("transformers") as seen:
        assert torch.equal(generate(model, monkeypatch), plain)
    assert seen.states["transformers.cache"].startswith("failed: ")


def test_continuous_batching_swaps_are_seen_and_tokens_stay(model, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: empty(*a, **{**k, "pin_memory": False} if "pin_memory" in k else k)
    )
    model.set_attn_implementation("sdpa")
    prompts = [[i + 1] * 20 for i in range(6)]
    generation = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)
    common = {"page_size": 16, "max_batch_tokens": 256, "safety_margin": 0.0, "allow_block_sharing": False}

    def run(**options):
        batching = transformers.ContinuousBatchingConfig(**common, **options)
        found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
        return [result.generated_tokens for _, result in sorted(found.items())]

    plain = run(num_blocks=200)
    with instrument.observe("transformers") as seen:
        assert run(num_blocks=12, cpu_offload_space=0.01) == plain
    assert seen.states["transformers.continuous_batching"] == "removed"
    moved = {d: sum(c["bytes"] for c in seen.calls if c["direction"] == d) for d in ("load", "store")}
    assert moved["store"] > 0
    assert moved["load"] == moved["store"]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_steps_of_generate_are_its_tokens_and_the_tokens_stay_the_same(model, monkeypatch, tmp_path, rows):
    ids = torch.arange(8 * rows).reshape(rows, 8)

    def made():
        return model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None)

    plain = made()
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    own = dict(vars(transformers.GenerationMixin))
    with instrument.observe("transformers") as seen:
        before = time.monotonic_ns()
        assert torch.equal(made(), plain) and torch.equal(made(), plain)
        after = time.monotonic_ns()
    assert dict(vars(transformers.GenerationMixin)) == own
    assert seen.states["transformers.steps"].startswith("removed")
    event_log.flush()
    (file,) = tmp_path.glob("steps-*.jsonl")
    lines = [one for line in file.read_text().splitlines() for one in one_by_one(json.loads(line))]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [one["step"] for one in steps] == list(range(10))
    assert [one["phase"] for one in steps] == 2 * ["prefill", *4 * ["decode"]]
    assert [one["computed"] for one in steps] == 2 * [8, *4 * [1]]
    assert all(one["tokens"] == 1 and len(one["requests"]) == rows for one in steps)
    times = [at for one in steps for at in (one["begin_ns"], one["t_ns"])]
    assert before <= times[0] and times == sorted(times) and times[-1] <= after
    assert (
        sum(line["kind"] == "arrived" for line in lines) == 2 * rows == sum(line["kind"] == "ended" for line in lines)
    )


def test_a_generate_that_fails_fails_as_ever(model, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))

    def broken(ids, scores, **more):
        raise ValueError("the user's own")

    with instrument.observe("transformers") as seen:
        with pytest.raises(ValueError, match="the user's own"):
            model.generate(torch.arange(8).reshape(1, 8), max_new_tokens=5, logits_processor=[broken])
        assert seen.states["transformers.steps"] == "applied"
