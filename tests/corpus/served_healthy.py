"""Served programs that are healthy: KV ahead in batches, deep queues, an HTTP server, mirrored KV, forked graphs."""

from __future__ import annotations

import ctypes as ct
import http.client
import select
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from accounts import Pool, going, paced, stamp
from device import D2H, H2D, Device
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, served
from unseen_copies import D2D, same


@served(
    line=COMPUTING,
    like=("descriptor_bound_batch", "link_bound", "load_not_ordered", "weights_not_overlapped", "redundant_loads"),
)
def kv_of_the_next_request_by_one_batch_beside_this_one(d: Device) -> Truth:
    """The next request's ten blocks come by one batch call while this one computes for three times as long."""
    pool, each, request = Pool(d, d.bytes_of(50)), 10, 0

    def bring(request: int) -> None:
        places = pool.places(
            [(request * each + 3 * i) % pool.count for i in range(each)], [request % 2 * each + i for i in range(each)]
        )
        d.batch([to for to, _ in places], [home for _, home in places], pool.size, d.copies[0])
        d.record(request % 8, d.copies[0])

    bring(0)
    d.sync(d.copies[0])
    d.spent.restart()
    for request in going():
        if request:
            d.record(16 + request % 8, d.compute)  # who had the other slots has computed
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[16 + request % 8], 0))
        bring(request + 1)
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[request % 8], 0))
        for _ in range(3):
            d.launch(500_000)
        paced(d, request, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.synchronize()
    home = d.host + ((request + 1) * each + 3 * (each - 1)) % pool.count * pool.size
    same(d, d.device + ((request + 1) % 2 * each + each - 1) * pool.size, home, pool.size)
    return {}


@served(
    line=COMPUTING,
    like=("launch_queue_saturation", "fence_before_copies", "synchronisation", "gpu_starved", "python_or_gil_bound"),
)
def five_hundred_kernels_ahead_that_never_fill_the_queue(d: Device) -> Truth:
    """Kernels of 0.15 ms are launched five hundred ahead of the device, whose queue takes twice as many."""
    for group in going():
        for _ in range(100):
            d.launch(150_000)
        d.record(group, d.compute)
        if group > 3:
            d.sync_event(group - 4)
    d.sync(d.compute)
    d.spent.stop()
    return {}


class Decoder(BaseHTTPRequestHandler):
    """Answers a prompt with what twelve steps decoded."""

    protocol_version = "HTTP/1.0"
    device: Device
    step = 0

    def do_POST(self) -> None:
        d, prompt = self.device, self.rfile.read(int(self.headers["Content-Length"]))
        for i in range(12):
            Decoder.step += 1
            stamp(d, Decoder.step % 8 * 4096, 512, Decoder.step)
            d.copy(d.device, d.host + Decoder.step % 8 * 4096, 4096, H2D, d.compute)
            d.launch(1_200_000)
            d.record(i, d.compute)
            if i > 1:
                d.sync_event(i - 2)
        d.sync(d.compute)
        self.send_response(200)
        self.send_header("Content-Length", str(len(prompt)))
        self.end_headers()
        self.wfile.write(prompt)

    def log_message(self, *_: object) -> None:
        pass


@served(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "cpu_starved", "python_or_gil_bound", "synchronisation", "slow_tier"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def an_http_server_that_is_asked_now_and_then(d: Device) -> Truth:
    """An HTTP server waits for a connection 20 to 60 ms long, decodes twelve steps for it, two ahead, and answers."""
    pauses = (40, 20, 60, 35, 50, 25, 45, 30, 55, 20) * 4

    def ask() -> None:
        for pause in pauses:
            time.sleep(pause / 1_000)
            client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            client.request("POST", "/", b"?" * 256)
            client.getresponse().read()
            client.close()

    Decoder.device = d
    with HTTPServer(("127.0.0.1", 0), Decoder) as server:
        thread = in_thread(ask)
        d.spent.restart()
        for _ in pauses:
            with d.spent.on(NOTHING_TO_DO):
                select.select([server], [], [])
            server.handle_request()
        d.spent.stop()
        thread.join()
    return {}


@served(
    line=COMPUTING,
    like=("store_not_ordered", "link_bound", "fence_before_copies", "head_of_line_copies", "synchronisation"),
    also=("wasted_stores",),
    needs_gpu=True,
)
def kv_mirrored_to_the_host_beside_replayed_graphs(d: Device) -> Truth:
    """Behind each replay of 1.5 ms what it made goes out, 24 MiB on a stream of its own, while the next ones run."""
    pool, each, sets = Pool(d, d.bytes_of(150)), 3, 3

    def step_once() -> None:
        for _ in range(6):
            d.launch(250_000)

    graph = d.graph(step_once)
    d.spent.restart()
    for step in going():
        mine = step % sets
        if step >= sets:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[100 + mine], 0))
        d.replay(graph, 1_500_000)
        d.order(d.copies[1], d.compute, step % 60)
        for i in range(each):
            home = d.host + (step * each + i) % pool.count * pool.size
            d.copy(home, d.device + (mine * each + i) * pool.size, pool.size, D2H, d.copies[1])
        d.record(100 + mine, d.copies[1])
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    return {}


@served(
    line=COMPUTING,
    like=("small_copies", "redundant_loads", "unmerged_neighbours", "synchronisation", "gpu_starved"),
)
def inputs_packed_into_one_copy_and_spread_on_the_device(d: Device) -> Truth:
    """A step's inputs go in one copy of 48 KiB out of a ring; six copies within the device spread them; it computes."""
    size, part = 48 * KiB, 8 * KiB
    for step in going():
        stamp(d, step % 8 * size, size, step)
        d.copy(d.device, d.host + step % 8 * size, size, H2D, d.compute)
        for i in range(6):
            d.copy(d.device + (1 + 2 * i) * MiB, d.device + i * part, part, D2D, d.compute)
        for _ in range(5):
            d.launch(400_000)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + 11 * MiB, d.host + step % 8 * size + 5 * part, part)
    return {}


@served(
    line=COMPUTING,
    like=("weights_not_overlapped", "load_not_ordered", "link_bound", "redundant_loads", "synchronisation"),
    needs_gpu=True,
)
def a_graph_that_forks_to_bring_the_next_layer(d: Device) -> Truth:
    """One graph holds four layers; beside each kernel of 0.5 ms a branch copies the next layer's weights in 0.3 ms."""
    pool, layers, side = Pool(d, d.bytes_of(300)), 4, d.copies[0]
    events = [d.event() for _ in range(2 * layers)]

    def after(later: int, earlier: int, event: int) -> None:
        d.check(d.lib.cudaEventRecord(event, earlier))
        d.check(d.lib.cudaStreamWaitEvent(later, event, 0))

    def step_once() -> None:
        for layer in range(layers):
            after(side, d.compute, events[2 * layer])
            pool.fetch((layer + 1) % 2, (layer + 1) % layers, side)
            d.launch(500_000)
            after(d.compute, side, events[2 * layer + 1])

    pool.fetch(0, 0, d.compute)
    d.sync(d.compute)
    graph = d.graph(step_once)
    d.spent.restart()
    for step in going():
        d.replay(graph, layers * 500_000)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device, d.host, pool.size)
    same(d, d.device + pool.size, d.host + 3 * pool.size, pool.size)
    return {}


@served(
    line=COMPUTING,
    like=("allocation_on_hot_path", "pinning_stall", "first_calls", "pageable_memory", "redundant_loads"),
)
def pools_that_grow_for_the_first_requests_then_serve(d: Device) -> Truth:
    """The first four requests pin 12 MiB each, a hundredth of the time; all others load from that beside kernels."""
    size, block, pools = 12 * MiB, (4 if d.gpu else 1) * MiB, list[int]()
    for request in going():
        if request < 4:
            pools.append(d.made("cudaHostAlloc", size, 0))
            ct.memmove(pools[-1], d.host + request * size, size)
        home = pools[request % 4] + request // 4 % 3 * block
        d.record(request % 8, d.compute)
        if request:  # its slot's last user ends with the request before the last
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[(request - 1) % 8], 0))
        d.copy(d.device + request % 2 * block, home, block, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], 16 + request % 8)
        for _ in range(3):
            d.launch(500_000)
        paced(d, request, 2)
    d.sync(d.compute)
    d.spent.stop()
    for at in pools:
        d.check(d.lib.cudaFreeHost(at))
    return {}
