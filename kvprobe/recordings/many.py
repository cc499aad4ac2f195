"""Many recordings reduced to one summary: over this machine's cores, or over a Ray cluster, each where it lies.

A worker that is killed loses nothing: what it had is reduced again, and named where that fails, too.
"""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, RecordingError, UsageError
from kvprobe.recordings import reduce
from kvprobe.recordings.model import Recording
from kvprobe.recordings.summary import TOP, Summary

__all__ = ["reduce_inputs", "reduce_one"]

Progress = Callable[[str, float], None]
Summarize = Callable[[Recording, str, int], Summary]
TRIES = 3  # of one input whose worker was killed
SUMMARY_SUFFIX = ".kvsum"


def reduce_one(path: str, keep: int = TOP, summarize: Summarize = reduce.summarize) -> Summary:
    """Reads and reduces one input, or reads a summary; one that cannot be read becomes a summary that says so."""
    from kvprobe.recordings import open_recording

    try:
        with _local(path) as local:
            if local.path.name.endswith(SUMMARY_SUFFIX):
                return _read_summary(local.path)
            return summarize(open_recording([local.path]), local.label, keep)
    except (KvprobeError, OSError) as error:
        return Summary(keep=keep, failed={path: str(error)})


def _read_summary(path: Path) -> Summary:
    try:
        return Summary.from_bytes(path.read_bytes())
    except ValueError as error:
        raise RecordingError(f"{path}: not a summary that this kvprobe reads ({error})") from error


class _local:
    """A path as a local file: what lies elsewhere (s3://, gs://, ...) is fetched with fsspec and removed afterwards."""

    def __init__(self, path: str) -> None:
        self.given = path
        name = Path(path.rstrip("/")).name.split(".")[0]
        self.label = os.fsencode(name).decode(errors="backslashreplace")  # so that two that are not UTF-8 stay two
        self.path = Path(path)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> _local:
        if "://" in self.given:
            fsspec = _fsspec(self.given)
            self._folder = tempfile.TemporaryDirectory(prefix="kvprobe-")
            self.path = Path(self._folder.name) / (Path(self.given.rstrip("/")).name or "input")
            try:
                system, inside = fsspec.core.url_to_fs(self.given)
                system.get(inside, str(self.path), recursive=system.isdir(inside))
            except Exception as error:  # whatever a storage's client raises
                self._folder.cleanup()
                raise RecordingError(f"{self.given}: cannot be fetched ({error})") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _fsspec(path: str) -> Any:
    try:
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise RecordingError(f"{path}: reading it takes fsspec: pip install 'kvprobe[ray]'") from error


def _expand(paths: Iterable[str]) -> list[str]:
    """The recordings and summaries in folders, each a task of its own."""
    from kvprobe.recordings import expand_deeply

    out: list[str] = []
    for text in paths:
        if "*" in text and "://" in text:
            system, inside = _fsspec(text).core.url_to_fs(text)
            out += [system.unstrip_protocol(name) for name in sorted(system.glob(inside))]
        elif "://" in text:
            out.append(text)
        else:
            summaries = sorted(Path(text).glob(f"**/*{SUMMARY_SUFFIX}")) if Path(text).is_dir() else []
            found = expand_deeply(Path(text))
            out += [str(one.resolve()) for one in summaries]
            out += [str(one.resolve()) for one in found if not summaries or one != Path(text)]
    return list(dict.fromkeys(out))


def reduce_inputs(
    paths: Sequence[str | os.PathLike[str]],
    ray_address: str | None = None,
    *,
    workers: int | None = None,
    keep: int = TOP,
    progress: Progress | None = None,
    summarize: Summarize = reduce.summarize,
) -> Summary:
    """Reduces many inputs to one summary.

    Args:
        paths: files and folders of any known format, and summaries; with fsspec also URLs (`s3://bucket/run/*.json.gz`).
        ray_address: a Ray cluster ("auto", "ray://host:10001", or "local" to start one here), each of whose machines
            reduces what it finds at the paths; None uses this machine's cores.
        workers: processes to use without Ray; by default one a core.
        keep: how many blocked calls are kept.
        progress: called with what is being done and the fraction done.
        summarize: how a recording is reduced: a function of a module, called with it, its name and `keep`.

    Raises:
        UsageError: no input, or Ray was asked for and is not installed.
        RecordingError: none of the inputs could be read.
    """
    given = [os.fspath(path) for path in paths]
    if not given:
        raise UsageError("no recording was given: name at least one file or folder")
    if ray_address is not None:
        results = _over_ray(given, ray_address, keep, summarize)
    else:
        results = _over_cores(_expand(given), workers or len(os.sched_getaffinity(0)), keep, summarize)
    total, done, held = Summary(keep=keep), 0, list[tuple[str, Summary]]()
    for count, path, summary in results:
        if path.endswith(SUMMARY_SUFFIX):
            held.append((path, summary))
        else:
            _absorb(total, path, summary)
        done += 1
        if progress is not None:
            progress("reducing recordings", done / count)
    # the largest first, so that what it has of the others is known whatever the order in which they came
    for path, summary in sorted(held, key=lambda one: (-len(one[1].parts), sorted(one[1].parts), one[0])):
        _absorb(total, path, summary)
    if not total.inputs:
        path, reason = next(iter(total.failed.items()))
        said = reason if path in reason else f"{path}: {reason}"
        raise RecordingError(reason if done == 1 else f"none of {done} inputs could be read; {said}")
    return total


def _absorb(total: Summary, path: str, summary: Summary) -> None:
    try:
        total.absorb(summary)
    except ValueError as error:
        total.failed[path] = f"{path}: not counted: {error}"


def _over_cores(inputs: list[str], workers: int, keep: int, summarize: Summarize) -> Iterator[tuple[int, str, Summary]]:
    """How many there are, and path and summary of one after another as they come."""
    task = partial(reduce_one, keep=keep, summarize=summarize)
    if min(workers, len(inputs)) == 1:
        yield from ((len(inputs), path, task(path)) for path in inputs)
        return
    left = dict.fromkeys(inputs, 0)
    while left:
        # Of a pool that a killed worker broke nobody can say whose work it was: the suspects go one at a time.
        alone = any(left.values())
        # Spawned, not forked: the parent may have threads (a progress bar, BLAS).
        with ProcessPoolExecutor(1 if alone else workers, mp_context=get_context("spawn")) as pool:
            jobs: dict[Future[Summary], str] = {}
            for path in list(left)[:1] if alone else list(left):
                jobs[pool.submit(task, path)] = path
            for future in as_completed(jobs):
                path = jobs[future]
                try:
                    summary = future.result()
                except BrokenProcessPool:
                    left[path] += 1
                    if left[path] < TRIES:
                        continue
                    summary = _given_up(path, keep)
                del left[path]
                yield len(inputs), path, summary


def _given_up(path: str, keep: int) -> Summary:
    said = f"its worker was killed {TRIES} times, perhaps for lack of memory: reduce it by itself"
    return Summary(keep=keep, failed={path: said})


def _found_here(paths: list[str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Inputs that this machine sees at the paths, and what tells one file that two machines see from two files."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for path in _expand(path for path in paths if "://" in path or Path(path).exists()):
        if "://" in path:
            found.append((path, (path,)))
            continue
        at = os.stat(path)  # noqa: PTH116
        found.append((path, (path, at.st_ino, at.st_size, at.st_mtime_ns)))
    return found


def _reduce_named(path: str, keep: int, summarize: Summarize) -> Summary:
    """`reduce_one` on a machine of a cluster, whose name goes with what failed."""
    summary = reduce_one(path, keep, summarize)
    summary.failed = {f"{socket.gethostname()}:{name}": reason for name, reason in summary.failed.items()}
    return summary


def _over_ray(paths: list[str], address: str, keep: int, summarize: Summarize) -> Iterator[tuple[int, str, Summary]]:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("reducing over Ray takes Ray: pip install 'kvprobe[ray]'") from error
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # whatever Ray raises, plain Exception among it
            what = "a cluster could not be started here" if address == "local" else "no cluster answers at that address"
            raise UsageError(f"--ray {address}: {what} ({error})") from error
    try:
        on_node = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        paths = [path if "://" in path else str(Path(path).absolute()) for path in paths]
        look = ray.remote(num_cpus=0)(_found_here)
        seen: dict[tuple[Any, ...], tuple[str, str]] = {}
        asked = [look.options(scheduling_strategy=on_node(node, soft=False)).remote(paths) for node in nodes]
        for node, answer in zip(nodes, asked, strict=True):
            for path, what in ray.get(answer):
                seen.setdefault(what, (node, path))
        absent = [path for path in paths if not any(_within(one, path) for _, one in seen.values())]
        count = len(seen) + len(absent)
        for path in absent:
            yield count, path, Summary(keep=keep, failed={path: f"{path}: no machine of the cluster has it"})
        task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_reduce_named)
        waiting = list(seen.values())[::-1]
        running: dict[Any, str] = {}
        room = 4 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        while waiting or running:
            while waiting and len(running) < room:  # so that no more answers wait here than are being merged
                node, path = waiting.pop()
                # another machine, where this one is gone: it may see the same file
                running[task.options(scheduling_strategy=on_node(node, soft=True)).remote(path, keep, summarize)] = path
            ready, _ = ray.wait(list(running), num_returns=1)
            path = running.pop(ready[0])
            try:
                yield count, path, ray.get(ready[0])
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                yield count, path, Summary(keep=keep, failed={path: f"its worker was lost {TRIES} times ({said})"})
    finally:
        if started:
            ray.shutdown()


def _within(path: str, given: str) -> bool:
    return (
        path == given or "*" in given or path.startswith(given.rstrip("/") + "/") or Path(given).resolve() == Path(path)
    )
