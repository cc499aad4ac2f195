"""Fourteenth programs whose kernels wait for copies: prompts, partitions, ghost rows, frames, a tree, tiles."""

from __future__ import annotations

import ctypes as ct

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
    fourteenth,
)
from unseen_copies import D2D, same


@fourteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def embeddings_of_a_prompt_and_of_none_sent_again_before_each_denoising_step_of_an_image(d: Device) -> Truth:
    """A denoiser takes 24 steps for an image, and before each the embeddings of its prompt and of no prompt are sent.

    Each goes to a slot of its own and takes the link 0.2 ms, and a step's kernels take 0.45 ms, all on one stream. No
    kernel writes the slots. That of no prompt is the same for all images, and that of a prompt is new in the first of
    its 24 steps alone: all other loads bring what is there, nearly 0.4 ms of each 0.85 ms.
    """
    pool, steps, step = Pool(d, d.bytes_of(200)), 24, 0
    prompts, again, needed = min(pool.count - 2, 7), Stretches(d), Stretches(d)

    def prompt(number: int) -> int:
        return 1 + number // steps % prompts

    pool.fetch(0, 0, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        kind = again if step % steps else needed
        kind.begin()
        pool.fetch(1, prompt(step), d.compute)
        kind.end()
        again.begin()
        pool.fetch(0, 0, d.compute)
        again.end()
        for _ in range(2):
            d.launch(225_000)
        paced_and_read(d, step, again, each=2, lag=2)
        needed.read(1)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    for slot, block in ((0, 0), (1, prompt(step))):
        same(d, d.device + slot * pool.size + end, d.host + block * pool.size + end, 64 * KiB)
    return {"redundant_loads": again.ns}


@fourteenth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # both directions at once may be slower than one
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "store_not_ordered", "pageable_memory", "launch_queue_saturation"),
)
def partitions_of_a_graph_s_embeddings_exchanged_both_ways_before_their_edges_are_trained(d: Device) -> Truth:
    """A trainer has one partition of a graph's nodes on the device; for the next edges it leaves and another one comes.

    The old one leaves on one stream for its place in pinned memory while the new one comes on another to a second
    place, each 0.5 ms of the link. Both begin when the edges before are trained, and the next edges, 0.6 ms, wait for
    both. Five partitions take turns, and each is changed before it leaves.
    """
    pool, out, into, moves, turn = Pool(d, d.bytes_of(500)), d.copies[4], d.copies[6], Stretches(d), 0
    count = min(pool.count - 1, 5)
    mark = pool.size - 64 * KiB  # where training leaves its trace

    def place(number: int) -> int:
        return d.device + number % 2 * pool.size

    def home(number: int) -> int:
        return d.host + number % count * pool.size

    for turn in turns():
        d.record(turn % 16, d.compute)
        moves.begin()
        for stream in (out, into):
            d.check(d.lib.cudaStreamWaitEvent(stream, d.events[turn % 16], 0))
        if turn:
            d.copy(home(turn - 1), place(turn - 1), pool.size, D2H, out)
        d.copy(place(turn), home(turn), pool.size, H2D, into)
        d.order(d.compute, out, 16 + turn % 16)
        d.order(d.compute, into, 32 + turn % 16)
        moves.end()
        for _ in range(2):
            d.launch(300_000)
        clear(d, place(turn) + mark, turn % 251, 4 * KiB, d.compute)
        paced_and_read(d, turn, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    if ct.string_at(home(turn - 1) + mark, 64) != bytes([(turn - 1) % 251]) * 64:
        raise RuntimeError("a partition came back other than it was trained")
    same(d, place(turn) + mark + 4 * KiB, home(turn) + mark + 4 * KiB, 32 * KiB)
    return {}


class Ghosts:
    """Rows of 8 KiB at the faces of a domain: what it tells its neighbours, and what they have told it.

    Attributes:
        rows: of what the neighbours tell, which take turns.
    """

    size, apart, rows = 8 * KiB, 17 * 512, 1_499

    def __init__(self, d: Device) -> None:
        self.d, self.mine, self.theirs = d, 20 * MiB, 30 * MiB

    def told(self, row: int) -> tuple[int, int]:
        """Where a row of the domain's own goes, and where it is."""
        at = self.mine + row * self.apart
        return self.d.host + at, self.d.device + at

    def heard(self, step: int, row: int, half: int) -> tuple[int, int]:
        """Where a ghost row comes to, and where it is."""
        number = (step * half + row) % self.rows
        return self.d.device + self.theirs + row * self.apart, self.d.host + number * self.apart

    def exchange(self, step: int, half: int, stream: int) -> None:
        """So many rows go out and so many come in, one copy for each."""
        self.d.rapid([self.told(row) for row in range(half)], self.size, D2H, stream)
        self.d.rapid([self.heard(step, row, half) for row in range(half)], self.size, H2D, stream)

    def compute(self, step: int, half: int) -> None:
        """The domain's own rows become new ones."""
        clear(self.d, self.d.device + self.mine, step % 251, half * self.apart, self.d.compute)

    def check(self, step: int, half: int) -> None:
        """Raises unless the rows of this step were exchanged: what was computed in the step before, and what came."""
        for row in (0, half - 1):
            if ct.string_at(self.told(row)[0], self.size) != bytes([(step - 1) % 251]) * self.size:
                raise RuntimeError("the neighbours were told another row")
            same(self.d, *self.heard(step, row, half), self.size)


@fourteenth(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where a recorder makes each call longer than its copy takes
    also=("weights_not_overlapped", "gpu_starved", "python_or_gil_bound", "wasted_stores", "unmerged_neighbours"),
    like=("redundant_loads", "pageable_memory", "allocation_on_hot_path", "aliased_stream", "link_bound"),
)
def ghost_rows_of_a_simulated_domain_exchanged_one_by_one_before_each_time_step(d: Device) -> Truth:
    """Before each time step of 0.8 ms a domain tells its neighbours its outer rows and takes theirs, 8 KiB each.

    Each row is a copy on the model's stream, which takes the GPU 2 or 3 us, of which the link needs 0.15 us. How long
    100 take is measured first, behind a kernel, and so many are exchanged that they take 0.7 ms, 320 at most. They are
    submitted a step ahead, for which the thread has 1.5 ms, and two steps' fit the stream.
    """
    ghosts, waits, step, took = Ghosts(d), Stretches(d), 0, 0
    for probe in range(4):
        d.launch(3_000_000)
        waits.begin()
        ghosts.exchange(probe, 50, d.compute)
        waits.end()
        d.sync(d.compute)
        took, waits.ns = waits.read(), 0
    half = min(max(50 * 700_000 // max(took, 1), 20), 160)
    ghosts.compute(4, half)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        waits.begin()
        ghosts.exchange(step + 5, half, d.compute)
        waits.end()
        ghosts.compute(step + 5, half)
        for _ in range(2):
            d.launch(400_000)
        paced_and_read(d, step, waits)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, waits.read())
    d.spent.stop()
    ghosts.check(step + 5, half)
    each = 2 * half * ghosts.size
    return {"small_copies": max(waits.ns - int((step + 1) * each / d.bytes_per_us * 1_000), 0)}


@fourteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "store_not_ordered", "synchronisation", "aliased_stream"),
)
def frames_drawn_on_the_only_surface_which_the_last_one_has_to_leave_first(d: Device) -> Truth:
    """A frame is drawn in 0.4 ms on the one surface that there is, and leaves it on a side stream, 0.55 ms of the link.

    The next frame may not be drawn before, by an event of the side stream, though its kernels are submitted two ahead:
    for 0.55 ms of each 0.95 ms a copy runs and no kernel. Each frame is another one, and goes to one of three places.
    """
    size, leaving, waits, frame = d.bytes_of(550), d.copies[7], Stretches(d), 0

    def home(number: int) -> int:
        return d.host + number % 3 * size

    for frame in turns():
        waits.begin()
        if frame:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[(frame - 1) % 16], 0))
        waits.end()
        for _ in range(2):
            d.launch(200_000)
        clear(d, d.device, frame % 251, size, d.compute)
        d.order(leaving, d.compute, 16 + frame % 16)
        d.copy(home(frame), d.device, size, D2H, leaving)
        d.record(frame % 16, leaving)
        paced_and_read(d, frame, waits, lag=2)
    d.sync(leaving)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    for last in range(max(frame - 2, 0), frame + 1):
        for at in (home(last), home(last) + size - 64):
            if ct.string_at(at, 64) != bytes([last % 251]) * 64:
                raise RuntimeError("another frame left than was drawn")
    return {}


class Tree:
    """States of a search tree's nodes, four parts of each in memory of its own on the device.

    Attributes:
        nodes: whose states there is room for; they take turns.
    """

    nodes, parts = 5, 4

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (192 if d.gpu else 1) * MiB
        self.at = d.made("cudaMalloc", self.nodes * self.parts * self.size)

    def place(self, node: int, part: int) -> int:
        """Where a part of a node's state is."""
        return self.at + (node % self.nodes * self.parts + part) * self.size

    def branch(self, node: int) -> None:
        """A node's state becomes that of the one before it."""
        for part in range(self.parts):
            self.d.copy(self.place(node, part), self.place(node - 1, part), self.size, D2D, self.d.compute)

    def play(self, node: int) -> None:
        """A node's own move: a page of each part is another one."""
        for part in range(self.parts):
            clear(self.d, self.place(node, part) + node % 64 * 4 * KiB, node % 251, 4 * KiB, self.d.compute)

    def check(self, node: int) -> None:
        """Raises unless a node has its own move and those of the nodes before it."""
        for made in (node, node - 1, node - 2):
            for part in range(self.parts):
                self.d.copy(self.d.host, self.place(node, part) + made % 64 * 4 * KiB, 512, D2H, self.d.compute)
                self.d.sync(self.d.compute)
                if ct.string_at(self.d.host, 512) != bytes([made % 251]) * 512:
                    raise RuntimeError("a node's state is not that of the node that it came from")


@fourteenth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
)
def a_branch_of_a_search_tree_that_begins_as_a_whole_copy_of_its_parent_s_state(d: Device) -> Truth:
    """For each branch that a search opens, the state of its parent is copied within the device, four parts of 192 MiB.

    The copies stand on the model's stream before the kernel that plays the branch's move. How long they take is
    measured first, and the kernel computes for 0.8 of that. Nothing crosses the link.
    """
    tree, moves, node, took = Tree(d), Stretches(d), 0, 0
    for node in range(1, 5):
        moves.begin()
        tree.branch(node)
        moves.end()
        tree.play(node)
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    d.spent.restart()
    for turn in turns():
        node = turn + 5
        moves.begin()
        tree.branch(node)
        moves.end()
        tree.play(node)
        d.launch(max(took * 4 // 5, 20_000))
        paced_and_read(d, turn, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    tree.check(node)
    d.check(d.lib.cudaFree(tree.at))
    return {}


@fourteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "aliased_stream"),
)
def tiles_of_a_large_latent_that_come_are_decoded_and_leave_on_one_stream(d: Device) -> Truth:
    """A latent too large for the device is decoded tile by tile: a tile comes in 0.2 ms, its pixels leave in 0.3 ms.

    Between the two are kernels of 0.4 ms, and all stand on one stream, two tiles ahead: 0.5 ms of each 0.9 ms is a
    copy's. Seven tiles take turns in one slot, and each tile's pixels are new, so all copies are needed.
    """
    tile, pixels, moves, step = d.bytes_of(200), d.bytes_of(300), Stretches(d), 0
    tiles = min((d.size // 2) // tile, 7)
    made, left = d.device + tile, d.host + d.size // 2

    def home(number: int) -> int:
        return d.host + number % tiles * tile

    for step in turns():
        moves.begin()
        d.copy(d.device, home(step), tile, H2D, d.compute)
        moves.end()
        for _ in range(2):
            d.launch(200_000)
        clear(d, made, step % 251, pixels, d.compute)
        moves.begin()
        d.copy(left + step % 2 * pixels, made, pixels, D2H, d.compute)
        moves.end()
        paced_and_read(d, step, moves, each=2, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for last in (step - 1, step):
        if ct.string_at(left + last % 2 * pixels + pixels - 64, 64) != bytes([last % 251]) * 64:
            raise RuntimeError("another tile left than was decoded")
    same(d, d.device + tile - 64 * KiB, home(step) + tile - 64 * KiB, 64 * KiB)
    return {}


@fourteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "small_copies", "load_not_ordered", "aliased_stream", "launch_queue_saturation"),
)
def logits_of_a_teacher_that_come_more_slowly_than_their_student_learns(d: Device) -> Truth:
    """A student learns for 0.25 ms from a teacher's logits, which were kept in pinned memory and take the link 0.6 ms.

    They come through three slots on a side stream, as far ahead as slots are free. The link is never idle and yet the
    student has learnt all there is: for 0.35 ms of each 0.6 ms a copy runs and no kernel. Four batches' logits take
    turns in three slots, so that each load brings other bytes than are there.
    """
    pool, coming, waits, batch = Pool(d, d.bytes_of(600)), d.copies[8], Stretches(d), 0
    slots, kept = 3, min(pool.count - 1, 4)
    for batch in turns():
        if batch >= slots:
            d.check(d.lib.cudaStreamWaitEvent(coming, d.events[32 + (batch - slots) % 16], 0))
        pool.fetch(batch % slots, batch % kept, coming)
        waits.begin()
        d.order(d.compute, coming, batch % 16)
        waits.end()
        d.launch(250_000)
        d.record(32 + batch % 16, d.compute)
        paced_and_read(d, batch, waits, lag=3)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    for last in (batch - 1, batch):
        same(d, d.device + last % slots * pool.size + end, d.host + last % kept * pool.size + end, 64 * KiB)
    return {}
