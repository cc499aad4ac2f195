"""The scanner and the measuring of queues under AddressSanitizer and UndefinedBehaviorSanitizer: not one report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.native import build
from tests.native import fuzz_trace

HERE = Path(__file__).parent
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")

# Random and damaged traces through the ordinary way in, in pieces so small that events are cut everywhere.
DRIVER = """
import random, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from kvprobe.errors import RecordingError
from kvprobe.recordings import trace_library, trace_text
trace_library._LIBRARY = Path(sys.argv[1])
import kineto_text
from test_triage import mutate
from kvprobe.recordings.quick_triage import quick_triage
assert trace_library.native_library() is not None
path = Path(sys.argv[4])
natively = saturated = 0
for seed in range(64):
    kineto_text.random_trace(path, seed, 200)
    if seed % 2:
        path.write_bytes(mutate(path.read_bytes(), random.Random(seed)))
    found = []
    for chunk in (1 << 19, 700):
        trace_text._CHUNK = chunk
        try:
            found.append(quick_triage(path, on_a_thread=False))
        except RecordingError:
            found.append(None)
    told = [one and (one.verdict, one.reason, one.lost_ns) for one in found]
    assert told[0] == told[1], seed
    natively += told[0] is not None
    saturated += told[0] is not None and told[0][0] == "found"
for text in (
    '{"traceEvents":[{"ph":"X","cat":"cuda_runtime","name":"INVALID","ts":1,"args":{"correlation":1}}' + "]" * 9,
    '{"traceEvents":[' + '{"ph":"X","cat":"kernel","ts":1e30,"dur":-1,"args":{"stream":99999999999,"device":-7}},' * 9,
    '{"traceEvents":[{"ph":"X","cat":"kernel","name":"' + "\\\\\\\\" * 999 + '","ts":1}]}',
    '{"traceEvents":[{"ph":"X","cat":"kernel","ts":9223372036854775807,"dur":9223372036854775807}]}',
    '{"traceEvents":[]}',
):
    path.write_text(text)
    quick_triage(path)
print("natively", natively, "saturated", saturated)
"""


@pytest.mark.slow
def test_no_report_for_random_and_damaged_traces(tmp_path):
    library = tmp_path / "libkvprobe_trace.so"
    sources = sorted((build.NATIVE / "trace").glob("*.c"))
    command = [*build.compiler(), "-std=gnu11", "-g", "-O1", "-fPIC", "-shared", *SANITIZERS, "-o", str(library)]
    built = subprocess.run([*command, *map(str, sources), "-lm"], capture_output=True, text=True, check=False)
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip(f"the compiler has no {SANITIZERS[0]}")
    assert built.returncode == 0, built.stderr
    asked = [*build.compiler(), "-print-file-name=libasan.so"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler's sanitizer cannot be preloaded")
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "PYTHONMALLOC": "malloc",  # so that every piece of text ends where its memory does
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=66",
        "LSAN_OPTIONS": "exitcode=0",  # the interpreter leaks; what of it is ours is looked for below
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, library, HERE, HERE.parent / "recordings", tmp_path / "t.json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    for report in ("ERROR: AddressSanitizer", "runtime error:", "kvt_"):
        assert report not in done.stderr, done.stderr[-6000:]
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr[-6000:]}"
    _, natively, _, saturated = done.stdout.split()
    assert int(natively) > 36 and int(saturated) > 1


def test_no_report_for_what_libfuzzer_makes_of_small_recordings(tmp_path):
    """A short form of `make fuzz-native`."""
    said = fuzz_trace.build(program := tmp_path / "fuzz_trace")
    if "no clang" in said or "sanitize" in said or "clang_rt" in said:
        pytest.skip(said.splitlines()[0])
    assert not said
    for kind, start in fuzz_trace.seeds(tmp_path).items():
        done = fuzz_trace.run(program, tmp_path, 1000, fuzz_trace.LIMITS[kind], start, seed=1)
        assert done.returncode == 0, done.stderr[-6000:]
        (runs,) = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        assert int(runs) >= 1000
