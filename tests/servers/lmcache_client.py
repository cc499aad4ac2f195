"""A client of `lmcache server`, made of what vLLM's worker and scheduler use: stores, looks up, loads, compares.

Run as `python lmcache_client.py PORT MODE NAME`, MODE being `engine_driven` or `lmcache_driven`, NAME what the ids of
its requests begin with. It writes a line of JSON: the hits of every look-up, digests of what was loaded into other
blocks, and whether each byte of it is as it was stored.
"""

import hashlib
import json
import sys
import time

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)

LAYERS, BLOCKS, HEADS, BLOCK, HEAD = 4, 128, 2, 16, 64
CHUNK = 32  # tokens; as the server's --chunk-size
PROMPTS, PROMPT = 6, 128  # so many prompts, so many tokens each


def until(what, found):
    """Polls as vLLM's engine does, step by step; a server that never answers fails."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        answer = found()
        if answer is not None:
            return answer
        time.sleep(0.002)
    raise SystemExit(f"no answer to {what}")


class Client:
    """vLLM's two sides of the connection, over one KV cache in CPU memory."""

    def __init__(self, port, mode):
        shape = (2, BLOCKS, BLOCK, HEADS, HEAD)
        self.caches = {f"layer.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(LAYERS)}
        strategy = ParallelStrategy(False, 1, 0, 1, 1, 1)
        extra, context = {"lmcache.mp.mp_transfer_mode": mode, "lmcache.mp.mq_timeout": 60.0}, zmq.Context.instance()
        url, model = f"tcp://127.0.0.1:{port}", "model"
        self.worker = LMCacheMPWorkerAdapter(url, context, model, BLOCK, strategy, extra_config=extra)
        self.scheduler = LMCacheMPSchedulerAdapter([url], context, model, BLOCK, strategy)
        self.worker.register_kv_caches(self.caches, layout_hints={"kv_layout": "NHD"})
        torch.manual_seed(7)
        for cache in self.caches.values():
            cache[:, : BLOCKS // 2] = torch.randn(2, BLOCKS // 2, BLOCK, HEADS, HEAD).to(torch.bfloat16)

    def blocks(self, first):
        return list(range(first, first + PROMPT // BLOCK))

    def bytes_of(self, blocks):
        parts = [cache[:, blocks].contiguous().view(torch.uint8) for cache in self.caches.values()]
        return b"".join(part.numpy().tobytes() for part in parts)

    def store(self, request, tokens, first):
        op = LoadStoreOp(tokens, [self.blocks(first)], 0, PROMPT)
        self.worker.batched_submit_store_requests([request], [op], self.worker.create_recorded_event())
        until("store", lambda: self.worker.get_finished({request})[0] or None)

    def hits(self, request, tokens):
        self.scheduler.maybe_submit_lookup_request(request, tokens)
        return until("lookup", lambda: self.scheduler.check_lookup_result(request))

    def load(self, request, tokens, first):
        op = LoadStoreOp(tokens, [self.blocks(first)], 0, PROMPT)
        self.worker.batched_submit_retrieve_requests([request], [op], self.worker.create_recorded_event())
        until("load", lambda: self.worker.get_finished(set())[1] or None)
        assert not self.worker.get_failed_request_ids(), "the load failed"

    def end(self, request):
        self.scheduler.cleanup_lookup_result(request)
        self.scheduler.end_session(request)

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


def main(port, mode, name):
    client = Client(port, mode)
    told = {"context": type(client.worker.transfer_ctx).__name__, "hits": [], "digests": [], "equal": []}
    prompts = [[1000 * i + j for j in range(PROMPT)] for i in range(PROMPTS)]
    size = PROMPT // BLOCK
    for i, tokens in enumerate(prompts):
        told["hits"].append(client.hits(f"{name}-cold-{i}", tokens))  # nothing there: computed, and then stored
        client.store(f"{name}-cold-{i}", tokens, i * size + 1)  # block 0 is vLLM's null block
        client.end(f"{name}-cold-{i}")
    for i, tokens in enumerate(prompts[: PROMPTS // 2]):  # the other half is never asked for again
        told["hits"].append(client.hits(f"{name}-warm-{i}", tokens))
        to = BLOCKS // 2 + i * size
        client.load(f"{name}-warm-{i}", tokens, to)
        client.end(f"{name}-warm-{i}")
        arrived = client.bytes_of(client.blocks(to))
        told["digests"].append(hashlib.sha256(arrived).hexdigest())
        told["equal"].append(arrived == client.bytes_of(client.blocks(i * size + 1)))
    client.scheduler.reset_cache()  # as vLLM's /reset_prefix_cache: what nobody loaded was stored for nothing
    told["hits"].append(client.hits(f"{name}-gone", prompts[0]))
    client.end(f"{name}-gone")
    client.close()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
