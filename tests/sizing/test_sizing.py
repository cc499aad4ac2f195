"""What a recording says of the size of a pool: against pools that are played, and where it must not say anything."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvprobe.cli import main
from kvprobe.recordings.model import CallKind, Direction, Recording, Table
from kvprobe.recordings.parquet import write
from kvprobe.reporting.sized import sentences
from kvprobe.reuse.sample import LOADED, STORED
from kvprobe.sizing import of_recording
from kvprobe.sizing.curve import curve_of
from kvprobe.sizing.uses import BY_ADDRESS, BY_BYTES, uses_of

MB = 1 << 20
SATURATED = Path(__file__).parents[1] / "gpu" / "data" / "nsys_saturated.sqlite.gz"


def played(blocks: list[int], size: int) -> list[int]:
    """What an LRU pool of that size made of each question: LOADED or STORED."""
    pool: OrderedDict[int, None] = OrderedDict()
    out = []
    for block in blocks:
        out.append(LOADED if block in pool else STORED)
        pool[block] = None
        pool.move_to_end(block)
        if len(pool) > size:
            pool.popitem(last=False)
    return out


def noted(
    blocks: list[int], size: int, server: str = "vllm", what: list[int] | None = None, **more: object
) -> Recording:
    """The recording of a pool of that size, every block followed, 1 ms between questions."""
    recording = Recording([], names=["", server, "pool"])
    what = what or played(blocks, size)
    count = len(blocks)
    whose = {"process": np.zeros(count), "server": np.full(count, 1), "source": np.full(count, 2)}
    recording.tables["block_uses"] = Table(
        "block_uses",
        {"time_ns": np.arange(count) * 1_000_000, **whose, "block": np.array(blocks), "what": np.array(what)},
    )
    one = {"time_ns": 0, "process": 0, "server": 1, "source": 2, "followed": 1.0, "blocks": size, "block_bytes": MB}
    one |= {"loaded": what.count(LOADED), "stored": what.count(STORED)}
    recording.tables["block_pools"] = Table("block_pools", {name: np.array([value]) for name, value in one.items()})
    columns = {"time_ns": 0, "process": 0, "server": 1, "source": 2, "requests": 1, **more}
    recording.tables["offload"] = Table(
        "offload",
        {**{name: np.array([-1]) for name in recording.offload}, **{n: np.array([v]) for n, v in columns.items()}},
    )
    return recording


def zipf(count: int = 20_000, blocks: int = 2_000) -> list[int]:
    weights = np.arange(1, blocks + 1) ** -0.9
    return np.random.default_rng(3).choice(blocks, count, p=weights / weights.sum()).tolist()


def test_each_size_has_the_hit_share_of_a_pool_that_is_played() -> None:
    blocks = zipf()
    (found,) = of_recording(noted(blocks, 100))
    for point in found.points:
        assert point.hit_share == pytest.approx(played(blocks, point.blocks).count(LOADED) / len(blocks), abs=1e-12)
        assert point.loaded_bytes == pytest.approx(point.hit_share * len(blocks) * MB)
        assert point.loaded_bytes + point.stored_bytes == len(blocks) * MB
    assert found.now is not None and found.now.hit_share == found.hit_share


def test_misses_are_told_apart() -> None:
    blocks = zipf()
    what = played(blocks, 100)
    thrown = [number for number, one in enumerate(what) if one == LOADED][::10]
    for number in thrown:
        what[number] = STORED  # thrown away by somebody, and stored again
    (found,) = of_recording(noted(blocks, 100, what=what))
    assert found.early_share == pytest.approx(len(thrown) / len(blocks))
    assert found.first_share == pytest.approx(len(set(blocks)) / len(blocks))
    assert found.first_share + found.too_small_share + found.early_share == pytest.approx(1 - found.hit_share)


def test_a_loop_larger_than_the_pool_is_a_matter_of_capacity_and_one_pass_is_not() -> None:
    (loop,) = of_recording(noted([*range(300)] * 5, 200))
    assert (loop.hit_share, loop.too_small_share) == (0, pytest.approx(0.8))
    assert loop.advised is not None and loop.advised.blocks == 300 and loop.advised.hit_share == pytest.approx(0.8)
    (once,) = of_recording(noted([*range(1_500)], 200))
    assert (once.first_share, once.too_small_share, once.advised) == (1, 0, None)
    assert "only 0 blocks were requested more than once: record for longer" in once.undecided


def test_what_the_recording_is_too_short_for_is_undecided() -> None:
    (found,) = of_recording(noted(zipf(), 5_000))
    assert found.now is not None and "which do not fill such a pool" in found.now.undecided
    assert found.advised is not None and found.advised.blocks <= 2_000 and not found.advised.undecided
    assert "undecided" not in sentences(found)[1]


def test_what_is_counted_over_all_blocks_is_not_called_a_sample() -> None:
    recording = noted(zipf(), 100)
    pools = recording.block_pools
    pools["followed"][:], pools["loaded"][:], pools["stored"][:] = 0.5, 1_000, 3_000
    (found,) = of_recording(recording)
    assert sentences(found)[0] == (
        "Requests asked for 4,000 blocks, and 25% of them were found. Both are counted over all blocks; all other "
        "shares are from a sample of 50% of the blocks."
    )


def test_time_saved_and_the_break_even_length_come_from_measured_rates() -> None:
    recording = noted(
        zipf(), 500, hit_tokens=16_000, loaded_blocks=1_000, waited_ns=20_000_000, prefill_ns_per_token=5_000.0
    )
    tokens = np.arange(1, 41) * 16
    took = 200_000 + tokens * 1_000  # 200 us and 1 us for each token, of 64 KiB
    recording.tables["transfers"] = Table(
        "transfers",
        {"start_ns": np.arange(40) * 10**8, "end_ns": np.arange(40) * 10**8 + took, "bytes": tokens << 16,
         "direction": np.full(40, Direction.H2D), "ok": np.ones(40)},
    )  # fmt: skip
    (found,) = of_recording(recording)
    assert found.rates.saved_ns == pytest.approx(16 * 5_000 - 20_000)
    assert found.points[-1].saved_ns == pytest.approx(found.points[-1].hit_share * 20_000 * 60_000)
    assert found.break_even_tokens == pytest.approx(200_000 / (5_000 - 1_000), rel=0.01)
    (slow,) = of_recording(recording, prefill_ns=900.0)
    assert slow.break_even_tokens == float("inf") and slow.pays is False
    assert "No size pays" in " ".join(sentences(slow))
    json.dumps(slow.to_json())


def test_without_rates_it_says_what_is_lacking() -> None:
    (found,) = of_recording(noted(zipf(), 100))
    assert found.advised is not None and found.advised.saved_ns is None and found.break_even_tokens is None
    assert "because how many tokens a block holds is not told" in sentences(found)[-2]


@pytest.mark.parametrize(
    ("server", "option"),
    [
        ("vllm", '--kv-offloading-size 1 (GiB), or in kv_connector_extra_config {"cpu_bytes_to_use": 314572800}'),
        ("sglang", "--hicache-size 1 (GB, a rank)"),
        ("lmcache", "LMCACHE_MAX_LOCAL_CPU_SIZE=0.3 in the environment"),
        ("kvprobe", "kvprobe.BlockCache(300)"),
        ("another", ""),
    ],
)
def test_the_advice_names_the_servers_own_option(server: str, option: str) -> None:
    (found,) = of_recording(noted([*range(300)] * 5, 200, server))
    assert found.option.startswith(option) and bool(found.option) == bool(option)


def copies(blocks: list[int], size: int) -> tuple[Recording, list[int]]:
    """The same as copies between a GPU and places of a pool, by addresses alone; and what each question became."""
    recording = Recording([])
    pool: OrderedDict[int, int] = OrderedDict()
    free, what, place = [*range(size)], played(blocks, size), []
    for block in blocks:
        if block not in pool:
            pool[block] = free.pop() if free else pool.popitem(last=False)[1]
        pool.move_to_end(block)
        place.append((1 << 40) + pool[block] * MB)
    host, gpu = np.array(place, dtype=np.uint64), np.full(len(blocks), 1 << 50, dtype=np.uint64)
    load = np.array(what) == LOADED
    at = np.arange(len(blocks)) * 1_000_000
    recording.tables["calls"] = Table(
        "calls",
        {"start_ns": at, "end_ns": at + 1_000, "process": np.zeros(len(at)), "kind": np.full(len(at), CallKind.COPY),
         "direction": np.where(load, Direction.H2D, Direction.D2H), "bytes": np.full(len(at), MB),
         "src": np.where(load, host, gpu), "dst": np.where(load, gpu, host)},
    )  # fmt: skip
    return recording, what


def test_addresses_tell_what_a_smaller_pool_would_find_and_say_so_of_a_larger_one() -> None:
    blocks = zipf()
    recording, what = copies(blocks, 400)
    (uses,) = uses_of(recording)
    assert (uses.how, uses.pool_blocks, uses.loaded) == (BY_ADDRESS, 400, what.count(LOADED))
    curve = curve_of(uses)
    for size in (50, 100, 200, 400):
        assert curve.hit_share(size) == pytest.approx(played(blocks, size).count(LOADED) / len(blocks), abs=0.002)
    (found,) = of_recording(recording)
    assert found.advised is None and "addresses do not tell a block that comes back" in found.undecided
    assert all(point.undecided for point in found.points if point.blocks > 400)


def test_where_the_bytes_were_looked_at_blocks_that_come_back_are_known() -> None:
    blocks = zipf()
    recording, what = copies(blocks, 400)
    load, calls = np.array(what) == LOADED, recording.calls
    block = np.array(blocks, dtype=np.uint64) + np.uint64(1)
    held: dict[int, int] = {}
    before = []  # a store's look comes before the copy: of what its place held
    for place, stands in zip(np.where(load, calls["src"], calls["dst"]).tolist(), block.tolist(), strict=True):
        before.append(held.get(place, 0))
        held[place] = stands
    seen = load | (np.array(before) > 0)
    looks = {name: calls[name][seen] for name in ("process", "direction", "src", "dst", "bytes")}
    recording.tables["contents"] = Table(
        "contents",
        {**looks, "time_ns": calls["start_ns"][seen], "hash": np.where(load, block, np.array(before))[seen],
         "looked": np.full(int(seen.sum()), MB), "blank": np.zeros(int(seen.sum()))},
    )  # fmt: skip
    (uses,) = uses_of(recording)
    assert uses.how == BY_BYTES
    for size in (100, 400, 1_000):
        share = played(blocks, size).count(LOADED) / len(blocks)
        assert curve_of(uses).hit_share(size) == pytest.approx(share, abs=0.025)  # what is held at the end was not seen
    (found,) = of_recording(recording)
    assert found.advised is not None and found.advised.blocks > 400


def test_the_command_prints_and_its_exit_code_tells_whether_anything_is_decided(tmp_path, capsys) -> None:
    write(noted(zipf(), 100), tmp_path / "long")
    write(noted([*range(500)], 100), tmp_path / "short")
    assert main(["size", str(tmp_path / "long")]) == 0
    said = capsys.readouterr().out
    assert "vllm pool" in said and "advised" in said and "--kv-offloading-size" in said
    assert main(["size", "--json", str(tmp_path / "long")]) == 0
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert pool["advised"]["blocks"] in [point["blocks"] for point in pool["points"]]
    assert main(["size", str(tmp_path / "short")]) == 1
    assert "It is undecided which size the pool should have: only 0 blocks" in capsys.readouterr().out


def test_a_recording_without_blocks_is_undecided(capsys) -> None:
    assert main(["size", str(SATURATED)]) == 1
    said = capsys.readouterr().out
    assert "Undecided: the recording does not show which blocks" in said
    assert "shows no pool that copies store to and load from again" in said and "kvprobe.BlockCache" in said
