"""transformers' offloaded cache and continuous batching, real code on a CPU: same tokens, every move seen."""

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument.calls import TimedCalls

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
