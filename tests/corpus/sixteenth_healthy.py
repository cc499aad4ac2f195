"""Sixteenth programs that are healthy: logits, slabs, neighbours, prompts, a game, a database, counters, typing."""

from __future__ import annotations

import ctypes as ct
import multiprocessing as mp
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, Device, now
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, sixteenth
from sixteenth_copies import Neighbours
from sixteenth_host import Game, Passages, descents_in
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


@sixteenth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "redundant_loads", "load_not_ordered", "aliased_stream"),
    also=("unmerged_neighbours",),
)
def logits_of_a_teacher_brought_a_batch_before_the_student_s_loss_needs_them(d: Device) -> Truth:
    """A student's forward pass takes 1.2 ms, the rest of its step 1.4 ms; a batch's kept logits take the link 0.5 ms.

    They come on a side stream to one of two places, as soon as the batch that had it is over, which is 3.8 ms before
    they are needed. The link is busy for a fifth of the time, always beside kernels. Those of seven batches take turns.
    """
    pool, loads, batch = Pool(d, d.bytes_of(500)), d.copies[4], 0
    kept = min(pool.count - 1, 7)

    def ask(number: int) -> None:
        if number >= 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (number - 2) % 16], 0))
        pool.fetch(number % 2, number % kept, loads)
        d.record(number % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for batch in turns():
        ask(batch + 1)
        for _ in range(2):
            d.launch(600_000)
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[batch % 16], 0))
        for _ in range(2):
            d.launch(700_000)
        d.record(32 + batch % 16, d.compute)
        paced(d, batch, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    end = pool.size - 64 * KiB
    for last in (batch, batch + 1):
        same(d, d.device + last % 2 * pool.size + end, d.host + last % kept * pool.size + end, 64 * KiB)
    return {}


@sixteenth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "store_not_ordered", "load_not_ordered", "redundant_loads"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def slabs_of_a_simulated_box_that_come_and_go_beside_the_sweeps_over_others(d: Device) -> Truth:
    """A box is larger than the device: a slab comes in 0.3 ms, is swept over in 2.4 ms, and goes home in 0.3 ms.

    There are four places. The next slab comes on one side stream while this one is swept over, and the last one goes on
    another, so both are done 2 ms before anybody waits for them. Seven slabs take turns, and a sweep rewrites all of a
    slab; a slab has been home for four sweeps when it comes again.
    """
    pool, loads, stores, sweep = Pool(d, d.bytes_of(300)), d.copies[4], d.copies[9], 0
    slabs, places = 7, 4

    def home(number: int) -> int:
        return d.host + number % slabs * pool.size

    def ask(number: int) -> None:
        if number >= places:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[64 + (number - places) % 16], 0))
        d.copy(d.device + number % places * pool.size, home(number), pool.size, H2D, loads)
        d.record(number % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for sweep in turns():
        ask(sweep + 1)
        place = d.device + sweep % places * pool.size
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[sweep % 16], 0))
        for _ in range(3):
            d.launch(800_000)
        clear(d, place, sweep % 251, pool.size, d.compute)
        d.order(stores, d.compute, 32 + sweep % 16)
        d.copy(home(sweep), place, pool.size, D2H, stores)
        d.record(64 + sweep % 16, stores)
        paced(d, sweep, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    d.sync(stores)
    for last in (sweep - 1, sweep):
        if ct.string_at(home(last) + pool.size - 64, 64) != bytes([last % 251]) * 64:
            raise RuntimeError("a slab came home with other bytes than its sweep has left")
    end = pool.size - 64 * KiB
    same(d, d.device + (sweep + 1) % places * pool.size + end, home(sweep + 1) + end, 64 * KiB)
    return {}


@sixteenth(
    line=COMPUTING,
    like=("small_copies", "gpu_starved", "launch_queue_saturation", "weights_not_overlapped", "python_or_gil_bound"),
)
def features_of_a_hundred_neighbours_brought_one_by_one_beside_a_long_batch(d: Device) -> Truth:
    """A graph network's batch takes 5 ms, and the features of the next one's hundred neighbours come meanwhile.

    Each node's 3 KiB are a copy of their own on a side stream, 0.2 ms for all, behind the batch that has had their
    place. The calls take the thread 0.5 ms or so, and it runs two batches ahead: no kernel waits for a copy, nor for
    the thread.
    """
    graph, loads, batch, count = Neighbours(d), d.copies[7], 0, 100

    def ask(number: int) -> None:
        if number >= 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (number - 2) % 16], 0))
        graph.bring(number, count, loads)
        d.record(number % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for batch in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[batch % 16], 0))
        for _ in range(5):
            d.launch(1_000_000)
        d.record(32 + batch % 16, d.compute)
        ask(batch + 1)
        paced(d, batch, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    for last in (batch, batch + 1):
        for i in (0, count - 1):
            same(d, graph.place(last, i), graph.home(last, i, count), graph.size)
    return {}


@sixteenth(
    line=COMPUTING,
    like=("redundant_loads", "weights_not_overlapped", "link_bound", "load_not_ordered", "small_copies"),
    also=("unmerged_neighbours",),
)
def a_prompt_s_embedding_sent_once_for_its_picture_while_the_last_is_denoised(d: Device) -> Truth:
    """A picture has 20 denoising steps of 1 ms, and its prompt's embedding, 0.5 ms of the link, comes a picture ahead.

    It comes on a side stream to one of two places, behind the picture that has had it, and is there 19 ms before its
    first step. Five prompts take turns, so that each load brings another one than is there.
    """
    steps, pool, loads, step = 20, Pool(d, d.bytes_of(500)), d.copies[2], 0
    prompts = min(pool.count - 1, 5)

    def ask(picture: int) -> None:
        if picture >= 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (picture - 2) % 16], 0))
        pool.fetch(picture % 2, picture % prompts, loads)
        d.record(picture % 16, loads)

    ask(0)
    d.sync(loads)
    d.spent.restart()
    for step in turns():
        picture = step // steps
        if step % steps == 0:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[picture % 16], 0))
            ask(picture + 1)
        d.launch(1_000_000)
        if step % steps == steps - 1:
            d.record(32 + picture % 16, d.compute)
        paced(d, step, 3)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    end = pool.size - 64 * KiB
    for last in (step // steps, step // steps + 1):
        same(d, d.device + last % 2 * pool.size + end, d.host + last % prompts * pool.size + end, 64 * KiB)
    return {}


@sixteenth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "small_copies", "cpu_starved"),
    also=("wasted_stores",),
)
def leaves_of_a_game_s_tree_chosen_in_python_while_two_evaluations_are_ahead(d: Device) -> Truth:
    """A network judges a batch of positions in 6 ms, and Python walks down a game's tree for 1.6 ms for each batch.

    The values that it gives the tree are two batches old: it has waited for that batch, and another two are on the
    device while it walks. So the device has 6 ms of kernels or more whenever it begins, and it needs 1.6 ms.
    """
    game, count, step, at, walks, lasted = Game(), descents_in(1_600), 0, 0, 0, list[int]()
    d.spent.restart()
    for step in turns():
        begin = now()
        for leaf in range(count):
            game.descend((step + leaf) % 7 / 7)
        lasted.append(now() - begin)
        walks += count
        ids = step % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, step)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    plain_only(d, sorted(lasted)[-2] < 6_000_000, f"the walks of a batch took {sorted(lasted)[-2]} ns")
    if game.visits[0] != walks:
        raise RuntimeError("a walk has not passed through the tree")
    return {}


def make_the_passages(_: Device) -> None:
    """The database, and how long it takes to answer."""
    MADE["passages"] = Passages()


@sixteenth(
    line=COMPUTING,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_passages,
)
def passages_asked_of_a_database_by_a_thread_while_the_batch_before_is_embedded(d: Device) -> Truth:
    """A batch of passages is embedded in 6 ms, and another thread asks sqlite for a later one's meanwhile, for 1.6 ms.

    The thread that launches takes the passages that were asked for two batches before, and there are two batches on
    the device when it does. A batch's copy is 12 KiB and stands before its kernels.
    """
    passages, batch, at = MADE.pop("passages"), 0, 0
    count, asked, lasted = passages.asked_in(1_600), deque[Future[bytes]](), list[int]()

    def ask(number: int) -> bytes:
        begin = now()
        found = b""
        for i in range(count):
            found = passages.ask(number * 7 + i * 131)
        lasted.append(now() - begin)
        return found

    with ThreadPoolExecutor(1) as pool:
        for number in range(2):
            asked.append(pool.submit(ask, number))
        asked[-1].result()
        d.spent.restart()
        for batch in turns():
            asked.append(pool.submit(ask, batch + 2))
            home = d.host + batch % 8 * passages.size
            ct.memmove(home, asked.popleft().result(), passages.size)
            d.copy(d.device, home, passages.size, H2D, d.compute)
            for _ in range(3):
                d.launch(2_000_000)
            at = token(d, batch)
            paced(d, batch, 2)
        d.sync(d.compute)
        d.spent.stop()
    told(at, batch)
    passages.end()
    plain_only(d, max(lasted) < 12_000_000, f"a batch's passages took {max(lasted)} ns")
    right = passages.bodies[(batch * 7 + (count - 1) * 131) % passages.count]
    home = d.host + batch % 8 * passages.size
    if ct.string_at(home, passages.size) != right:
        raise RuntimeError("the database has answered with another passage")
    same(d, d.device, home, passages.size)
    return {}


@sixteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def requests_that_a_gateway_counts_in_an_eventfd_sixty_milliseconds_apart(d: Device) -> Truth:
    """A thread of a gateway leaves a request and adds one to an eventfd, each 60 ms, and an answer takes 6 ms.

    For nine tenths of the time nobody has asked for anything that was not answered, and the thread that serves stands
    in the eventfd's `read`. No queue forms: each request is answered 50 ms before the next one comes.
    """
    count, left, counter = 24, deque[bytes](), os.eventfd(0)
    done, at = 0, 0

    def leave() -> None:
        due = time.monotonic()
        for number in range(count):
            due += 0.06
            time.sleep(max(due - time.monotonic(), 0))
            left.append(number.to_bytes(4, "little") * 1_024)
            os.eventfd_write(counter, 1)

    d.spent.restart()
    thread = in_thread(leave)
    while done < count:
        with d.spent.on(NOTHING_TO_DO):
            came = os.eventfd_read(counter)
        for _ in range(came):
            request, home = left.popleft(), d.host + done % 8 * 4 * KiB
            if request[:4] != done.to_bytes(4, "little"):
                raise RuntimeError("a request came out of its turn")
            ct.memmove(home, request, len(request))
            d.copy(d.device, home, len(request), H2D, d.compute)
            for _ in range(3):
                d.launch(2_000_000)
            at = token(d, done)
            d.sync(d.compute)
            told(at, done)
            done += 1
    d.spent.stop()
    thread.join()
    os.close(counter)
    same(d, d.device, d.host + (done - 1) % 8 * 4 * KiB, 4 * KiB)
    return {}


@sixteenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores", "small_copies"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def words_suggested_to_somebody_who_types_and_posts_a_semaphore_with_each_key(d: Device) -> Truth:
    """Somebody types a key each 50 to 90 ms, and for each a small model suggests words, in eight kernels of 1 ms.

    A semaphore of `multiprocessing` is posted with each key, and the thread that suggests stands in its `acquire` for
    six sevenths of the time. It is done with a key 40 ms before the next one is pressed, and nothing else is asked.
    """
    count, key, at, right = 21, 0, 0, 0
    pressed, keys = mp.get_context("fork").Semaphore(0), bytearray(count)

    def press() -> None:
        for number in range(count):
            time.sleep((70, 50, 90, 60, 80)[number % 5] / 1_000)
            keys[number] = 97 + number
            pressed.release()

    d.spent.restart()
    thread = in_thread(press)
    for key in range(count):
        with d.spent.on(NOTHING_TO_DO):
            pressed.acquire()
        home = d.host + MiB + key % 4 * 4 * KiB
        ct.memmove(home, bytes([keys[key]]) * 512, 512)
        d.copy(d.device, home, 512, H2D, d.compute)
        for _ in range(8):
            d.launch(1_000_000)
        at = token(d, key)
        d.sync(d.compute)
        told(at, key)
        right += keys[key] == 97 + key
    d.spent.stop()
    thread.join()
    if right != count:
        raise RuntimeError("words were suggested for another key than was pressed")
    same(d, d.device, d.host + MiB + key % 4 * 4 * KiB, 512)
    return {}
