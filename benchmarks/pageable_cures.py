"""Programs that copy pageable memory, with and without `kvprobe run --fix auto` in turn: time, results, memory.

    python benchmarks/pageable_cures.py [--device cuda|host] [--rounds 3] [--only NAME ...] [--json FILE]

Each program computes with weights that stay in CPU memory, prints a digest of all its results, and knows nothing of
kvprobe: `to` moves one weight after another with `Tensor.to`, as accelerate's hooks do; `accelerate` is a model under
`accelerate.cpu_offload` as it is (left out where that is not installed); `mapped` reads its weights from a mapped file,
as llama.cpp and safetensors do; `stores` brings large results back; `pinned` is healthy: its weights are pinned. With
`--device host` one loop runs over the host runtime, whose pageable copies are given a sixth of the link's rate: that
shows that this script works, and nothing about speed.

Exit code 1: a result differs, more is locked than KVPROBE_LOCKED_BYTES allows, one of the pageable programs is less
than 2 times as fast (the median step of the second half), or `pinned` is more than 1% slower.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import hashlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTH, BATCH, STEPS = 12, 4096, 16, 40  # 12 weights of 32 MiB in 16 bits
WANTED, HEALTHY_COST = 2.0, 1.01

# ---- the programs ----------------------------------------------------------------------------------------------------


def run_steps(step: Callable[[], bytes]) -> None:
    """Time each step and print a digest of what they gave."""
    digest, took = hashlib.sha256(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        result = step()
        took.append(time.perf_counter() - start)
        digest.update(result)
    print(json.dumps({"steps_s": took, "digest": digest.hexdigest()}))


def torch_weights(where: str) -> tuple[list[Any], Any]:
    """Weights in CPU memory, the same in each process, and what goes in at the first."""
    import torch

    made = torch.Generator().manual_seed(7)
    weights = [torch.randn(WIDTH, WIDTH, generator=made).div_(WIDTH**0.5).half() for _ in range(LAYERS)]
    given = torch.randn(BATCH, WIDTH, generator=made).half()
    if where == "pinned":
        weights = [weight.pin_memory() for weight in weights]
    if where == "mapped":
        bytes_each = WIDTH * WIDTH * 2
        with tempfile.NamedTemporaryFile(delete=False) as file:
            for weight in weights:
                file.write(weight.numpy().tobytes())
        storage = torch.UntypedStorage.from_file(file.name, shared=False, nbytes=LAYERS * bytes_each)
        flat = torch.tensor([], dtype=torch.half).set_(storage)
        weights = list(flat.view(LAYERS, WIDTH, WIDTH).unbind())
        Path(file.name).unlink()
    return weights, given.cuda()


def digest_of(tensor: Any) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())


def weights_to_gpu(where: str) -> None:
    """Each layer: its weight goes to the GPU, blocking, and is multiplied."""
    import torch

    weights, given = torch_weights(where)

    def step() -> bytes:
        x = given
        for weight in weights:
            x = torch.relu(x @ weight.to("cuda", non_blocking=where == "pinned"))
        return digest_of(x)

    run_steps(step)


def accelerate_offload() -> None:
    """A model under accelerate's `cpu_offload`."""
    import torch
    from accelerate import cpu_offload

    weights, given = torch_weights("pageable")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False).half() for _ in weights))
    for layer, weight in zip(model, weights, strict=True):
        layer.weight.data = weight
    cpu_offload(model, execution_device=torch.device("cuda:0"))
    with torch.no_grad():
        run_steps(lambda: digest_of(model(given)))


def stores() -> None:
    """Large results come back to fresh pageable memory."""
    weights, given = torch_weights("pageable")
    on_gpu = [weight.cuda() for weight in weights]

    def step() -> bytes:
        back = [(weight * 2).cpu() for weight in on_gpu]
        return digest_of(given) + b"".join(hashlib.sha256(one.numpy()[::97].tobytes()).digest() for one in back)

    run_steps(step)


def host_loop() -> None:
    """Loads and stores of 4 MiB over the runtime that $CURES_RUNTIME names."""
    lib = ct.CDLL(os.environ["CURES_RUNTIME"])
    lib.cudaMemcpyAsync.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_int, ct.c_void_p]
    size, device, stream = 4 << 20, ct.c_void_p(), ct.c_void_p()
    assert lib.cudaMalloc(ct.byref(device), ct.c_size_t(size)) == 0
    assert lib.cudaStreamCreateWithFlags(ct.byref(stream), 1) == 0
    there, back = bytearray(os.urandom(1) * size), bytearray(size)
    turn = 0

    def step() -> bytes:
        nonlocal turn
        result = b""
        for _ in range(4):
            turn += 1
            there[:: 1 << 12] = bytes([turn % 256]) * (size >> 12)
            source, target = (ct.addressof(ct.c_char.from_buffer(one)) for one in (there, back))
            assert lib.cudaMemcpyAsync(device, source, size, 1, stream) == 0
            assert lib.cudaMemcpyAsync(target, device, size, 2, stream) == 0
            result += bytes(back[:: 1 << 12])
        return result

    run_steps(step)


PROGRAMS: dict[str, Callable[[], None]] = {
    "to": lambda: weights_to_gpu("pageable"),
    "mapped": lambda: weights_to_gpu("mapped"),
    "accelerate": accelerate_offload,
    "stores": stores,
    "pinned": lambda: weights_to_gpu("pinned"),
    "host": host_loop,
}

# ---- the measurement -------------------------------------------------------------------------------------------------


def run_program(name: str, fix: str, folder: Path) -> dict[str, Any]:
    """One run of one program: its steps, its digest, and what kvprobe says that it did."""
    command = [sys.executable, "-m", "kvprobe", "run", "--fix", fix, "--report", "none", "--no-stacks", "-o"]
    command += [str(folder), "--", sys.executable, __file__, "--program", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{name} under --fix {fix} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    events = [line for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    decided = [one for one in map(json.loads, events) if one.get("adapter") == "kvprobe.staging"]
    locked = [re.search(r"through (\d+) MiB", one["why"]) for one in decided]
    said["locked_bytes"] = max((int(found[1]) << 20 for found in locked if found), default=0)
    said["decisions"] = [f"{one['what']}: {one['why']}" for one in decided]
    said["steady_s"] = statistics.median(said["steps_s"][STEPS // 2 :])
    return dict(said)


def compare(name: str, rounds: int, allowed: int) -> tuple[dict[str, Any], list[str]]:
    """Both ways in turn, and what is wrong with the outcome."""
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for fix in ("off", "auto"):
                runs[fix].append(run_program(name, fix, Path(folder) / f"{fix}-{turn}"))
    steady = {fix: statistics.median(one["steady_s"] for one in these) for fix, these in runs.items()}
    whole = {fix: statistics.median(sum(one["steps_s"]) for one in these) for fix, these in runs.items()}
    digests = {one["digest"] for these in runs.values() for one in these}
    locked = max(one["locked_bytes"] for one in runs["auto"])
    faster = steady["off"] / steady["auto"]
    problems = []
    if len(digests) > 1:
        problems.append(f"{name}: results differ")
    if locked > allowed:
        problems.append(f"{name}: {locked:,} bytes locked, {allowed:,} allowed")
    if name not in ("pinned", "host") and faster < WANTED:
        problems.append(f"{name}: {faster:.2f} times as fast, {WANTED} wanted")
    if name == "pinned" and 1 / faster > HEALTHY_COST:
        problems.append(f"{name}: {100 / faster - 100:.1f}% slower")
    print(
        f"{name:11} step {steady['off'] * 1e3:8.2f} ms as it is, {steady['auto'] * 1e3:8.2f} under auto: {faster:5.2f}x"
        f" (whole run {whole['off'] / whole['auto']:5.2f}x)  results {'equal' if len(digests) == 1 else 'DIFFER'}"
        f"  locked {locked >> 20} MiB"
    )
    for line in runs["auto"][-1]["decisions"]:
        print(f"{'':12}{line}")
    outcome = {"steady_s": steady, "whole_s": whole, "faster": faster, "equal": len(digests) == 1, "locked": locked}
    return {**outcome, "runs": runs}, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "host"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--program", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.program:
        PROGRAMS[asked.program]()
        return 0
    names = [name for name in PROGRAMS if name != "host"]
    if asked.device == "host":
        names = ["host"]
        os.environ["CURES_RUNTIME"] = str(ROOT / "kvprobe" / "native" / "lib" / "libkvprobe_hostrt.so")
        os.environ |= {"KVHOST_H2D_GBPS": "6", "KVHOST_D2H_GBPS": "6", "KVHOST_PAGEABLE_GBPS": "1"}
    elif importlib.util.find_spec("accelerate") is None:
        names.remove("accelerate")
        print("accelerate  left out: it is not installed")
    allowed = int(os.environ.get("KVPROBE_LOCKED_BYTES") or 16 << 20)
    outcomes, problems = {}, []
    for name in asked.only or names:
        outcomes[name], wrong = compare(name, asked.rounds, allowed)
        problems += wrong
    if asked.json:
        asked.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    for line in problems:
        print(f"NOT AS WANTED  {line}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
