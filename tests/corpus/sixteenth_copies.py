"""Sixteenth programs whose kernels wait for copies: logits, slabs, a prompt, neighbours, tokens of experts."""

from __future__ import annotations

import ctypes as ct
import random

from accounts import Pool, Stretches, paced_and_read, turns
from device import D2H, H2D, Device
from fresh_copies import clear
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    INSIDE_GPU,
    NOT_NEEDED,
    SUBMITTING,
    KiB,
    MiB,
    Truth,
    sixteenth,
)
from unseen_copies import D2D, same


@sixteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "python_or_gil_bound"),
)
def logits_of_a_teacher_brought_between_a_student_s_forward_pass_and_its_loss(d: Device) -> Truth:
    """A student's forward pass takes 0.3 ms, then its batch's kept logits come, 0.7 ms of the link, then 0.4 ms remain.

    The logits come in one copy on the student's own stream, between the forward pass and the loss, so no kernel runs
    for 0.7 ms of each 1.4 ms. Batches are submitted two ahead. Those of seven batches take turns in one place, so that
    each load brings other bytes than are there.
    """
    pool, moves, batch = Pool(d, d.bytes_of(700)), Stretches(d), 0
    kept = min(pool.count - 1, 7)
    for batch in turns():
        d.launch(300_000)
        moves.begin()
        pool.fetch(0, batch % kept, d.compute)
        moves.end()
        for _ in range(2):
            d.launch(200_000)
        paced_and_read(d, batch, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + batch % kept * pool.size + end, 64 * KiB)
    return {}


@sixteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "synchronisation", "store_not_ordered", "launch_queue_saturation"),
)
def slabs_of_a_simulated_box_that_come_and_go_around_each_sweep_over_them(d: Device) -> Truth:
    """A box is larger than the device: a slab comes in 0.3 ms, is swept over in 0.4 ms, and goes home in 0.3 ms.

    All three stand on one stream and there is one place for a slab, so a copy runs and no kernel for 0.6 ms of each
    1 ms. Seven slabs take turns, and a sweep rewrites the whole slab, so every load and every store is needed.
    """
    pool, moves, sweep = Pool(d, d.bytes_of(300)), Stretches(d), 0
    slabs = min(pool.count - 1, 7)
    for sweep in turns():
        home = d.host + sweep % slabs * pool.size
        moves.begin()
        d.copy(d.device, home, pool.size, H2D, d.compute)
        moves.end()
        for _ in range(2):
            d.launch(200_000)
        clear(d, d.device, sweep % 251, pool.size, d.compute)
        moves.begin()
        d.copy(home, d.device, pool.size, D2H, d.compute)
        moves.end()
        paced_and_read(d, sweep, moves, each=2, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for last in (sweep - 1, sweep):
        end = d.host + (last % slabs + 1) * pool.size - 64
        if ct.string_at(end, 64) != bytes([last % 251]) * 64:
            raise RuntimeError("a slab came home with other bytes than its sweep has left")
    return {}


@sixteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def a_prompt_s_embedding_sent_again_before_each_denoising_step_of_its_picture(d: Device) -> Truth:
    """A picture has 25 denoising steps of 0.45 ms, and before each its prompt's embedding comes, 0.5 ms of the link.

    It comes from one place to one place on the model's stream, and nobody changes it on either side until the next
    picture begins, whose prompt lies elsewhere. So 24 of 25 loads bring what is there: 0.48 ms of each 0.95 ms.
    """
    steps, pool, step = 25, Pool(d, d.bytes_of(500)), 0
    prompts, again, needed = min(pool.count - 1, 5), Stretches(d), Stretches(d)
    for step in turns():
        stretch = again if step % steps else needed
        stretch.begin()
        pool.fetch(0, step // steps % prompts, d.compute)
        stretch.end()
        for _ in range(3):
            d.launch(150_000)
        paced_and_read(d, step, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + step // steps % prompts * pool.size + end, 64 * KiB)
    return {"redundant_loads": again.ns}


class Neighbours:
    """The features of a graph's nodes in pinned memory, 3 KiB each, and which nodes a batch has sampled.

    Attributes:
        nodes: how many there are; most: how many a batch may have, of which two batches fit a stream.
    """

    size, apart, nodes, most = 3 * KiB, 4 * KiB, 4_999, 440

    def __init__(self, d: Device) -> None:
        self.d = d
        self.order = random.Random(141).sample(range(self.nodes), self.nodes)

    def home(self, batch: int, i: int, count: int) -> int:
        """Where the features of the i-th node of a batch are."""
        return self.d.host + self.order[(batch * count + i) % self.nodes] * self.apart

    def place(self, batch: int, i: int) -> int:
        """Where they go to; two batches take turns, and no two nodes lie side by side."""
        return self.d.device + (batch % 2 * self.most + i) * 2 * self.apart

    def bring(self, batch: int, count: int, stream: int) -> None:
        """Each node's features by a copy of their own."""
        places = [(self.place(batch, i), self.home(batch, i, count)) for i in range(count)]
        self.d.rapid(places, self.size, H2D, stream)


@sixteenth(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where a recorder makes each call longer than its copy takes
    also=("weights_not_overlapped", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "allocation_on_hot_path", "aliased_stream"),
)
def features_of_sampled_neighbours_brought_node_by_node_before_each_convolution(d: Device) -> Truth:
    """A graph network samples neighbours, and before each batch of 0.9 ms the features of each come, 3 KiB a node.

    Each node's are a copy on the model's stream, which takes the GPU above 1 us, of which the link needs 0.06 us. How
    long 300 take is measured first, behind a kernel, and so many come that they take 0.75 ms, 440 at most. They are
    submitted a batch ahead, for which the thread has 1.6 ms, and two batches' fit the stream.
    """
    graph, waits, batch, took = Neighbours(d), Stretches(d), 0, 0
    for probe in range(3):
        d.launch(3_000_000)
        waits.begin()
        graph.bring(probe, 300, d.compute)
        waits.end()
        d.sync(d.compute)
        took, waits.ns = waits.read(), 0
    count = min(max(300 * 750_000 // max(took, 1), 20), graph.most)
    d.spent.restart()
    for batch in turns():
        waits.begin()
        graph.bring(batch, count, d.compute)
        waits.end()
        for _ in range(3):
            d.launch(300_000)
        paced_and_read(d, batch, waits)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, waits.read())
    d.spent.stop()
    for i in (0, count // 2, count - 1):
        same(d, graph.place(batch, i), graph.home(batch, i, count), graph.size)
    return {"small_copies": max(waits.ns - int((batch + 1) * count * graph.size / d.bytes_per_us * 1_000), 0)}


class Routed:
    """Tokens' activations in sixteen pieces, the place where experts have them in their own order, and where they end.

    Attributes:
        size: bytes of a piece; order: which piece goes to which expert's place.
    """

    pieces = 16

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, 32 * MiB if d.gpu else 256 * KiB
        self.tokens, self.experts, self.ends = (d.made("cudaMalloc", self.pieces * self.size) for _ in range(3))
        self.order = random.Random(142).sample(range(self.pieces), self.pieces)

    def gather(self) -> None:
        """Each piece to its expert's place."""
        for place, piece in enumerate(self.order):
            self.d.copy(
                self.experts + place * self.size, self.tokens + piece * self.size, self.size, D2D, self.d.compute
            )

    def put_back(self) -> None:
        """Each piece to where it belongs among the results."""
        for place, piece in enumerate(self.order):
            self.d.copy(self.ends + piece * self.size, self.experts + place * self.size, self.size, D2D, self.d.compute)

    def free(self) -> None:
        """All memory goes."""
        for at in (self.tokens, self.experts, self.ends):
            self.d.check(self.d.lib.cudaFree(at))


@sixteenth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
)
def tokens_copied_within_the_device_to_their_experts_and_back_around_each_layer(d: Device) -> Truth:
    """Before the experts compute, sixteen pieces of 32 MiB are copied into their order, and afterwards back again.

    All 32 copies are within the device, on the model's stream, one after another. How long they take is measured first,
    and the experts compute for 0.8 of that between them. Nothing crosses the link until the program ends.
    """
    routed, moves, layer, took = Routed(d), Stretches(d), 0, 0
    for _ in range(4):
        moves.begin()
        routed.gather()
        routed.put_back()
        moves.end()
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    d.spent.restart()
    for layer in turns():
        for piece in (0, routed.pieces - 1):
            clear(d, routed.tokens + (piece + 1) * routed.size - 4 * KiB, (layer + piece) % 251, 4 * KiB, d.compute)
        moves.begin()
        routed.gather()
        moves.end()
        d.launch(max(took * 4 // 5, 20_000))
        moves.begin()
        routed.put_back()
        moves.end()
        paced_and_read(d, layer, moves, each=2, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    for piece in (0, routed.pieces - 1):
        d.copy(d.host, routed.ends + (piece + 1) * routed.size - 512, 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([(layer + piece) % 251]) * 512:
            raise RuntimeError("a token's piece has come back to another place")
    routed.free()
    return {}
