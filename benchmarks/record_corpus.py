"""Records every program of the corpus in every format, and what each says it lost.

    python benchmarks/record_corpus.py OUT [--formats run,kineto,nsys,totals] [--only TEXT] [--accounts] [--set SET]

Writes OUT/FORMAT/PROGRAM.{kvprobe.tar.gz | json.gz | sqlite.gz} and PROGRAM.truth.json beside it. `run` starts each
program under `kvprobe run`, `totals` with its `--detail totals`; `kineto` runs them one after another in one process, a
PyTorch profile each; `nsys` records one process of all and cuts its export by the programs' NVTX ranges. With
`--accounts` only the programs are recorded that know their line of the account, and nsys sees into their CUDA graphs;
with `--set fresh`, `blind`, `unseen`, `served`, `sixth` and so on until `twentysixth` the programs that were
written without knowledge of the diagnosis, which all know their line; the twenty-sixth want two GPUs. On a machine
without a GPU only `run` is there.
`benchmarks/diagnosis_truth.py --corpus OUT` grades them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "corpus"))

from programs import PROGRAMS, prepare, run

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "corpus"
NSYS = (
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-compute*/*/host/target-linux-x64/nsys",
)
IMPORTER = (
    "/opt/nvidia/nsight-systems*/*/host-linux-*/QdstrmImporter",
    "/opt/nvidia/nsight-compute*/*/host/linux-desktop-*/QdstrmImporter",
)
SETS = sorted({one.series for one in PROGRAMS.values()})

KEPT = (
    "CUPTI_ACTIVITY_KIND",
    "NVTX_EVENTS",
    "PROFILER_OVERHEAD",
    "StringIds",
    "META_DATA",
    "EXPORT_META",
    "ENUM_CUDA",
    "ENUM_CUPTI",
    "TARGET_INFO_GPU",
    "TARGET_INFO_CUDA_STREAM",
    "TARGET_INFO_SESSION",
    "ThreadNames",
)


def truth(folder: Path, said: dict[str, object]) -> None:
    (folder / f"{said['program']}.truth.json").write_text(json.dumps(said) + "\n")


def record_totals(out: Path, names: list[str]) -> None:
    """As `record_run`, slow calls and sums only."""
    record_run(out, names, "totals")


def record_run(out: Path, names: list[str], detail: str = "copies") -> None:
    """Each program under `kvprobe run`, its folder packed."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        folder = Path(tempfile.mkdtemp()) / name
        command = [
            sys.executable,
            "-m",
            "kvprobe",
            "run",
            "--no-stacks",
            "--detail",
            detail,
            "--report",
            "none",
            "-o",
            str(folder),
            "--",
            sys.executable,
            str(CORPUS / "programs.py"),
            name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
        if line is None:
            print(f"run: {name} failed ({done.returncode}): {done.stderr[-400:]}", file=sys.stderr)
            continue
        for _ in range(100):
            if (folder / "end.json").exists():
                break
            time.sleep(0.02)
        truth(out, json.loads(line))
        with tarfile.open(out / f"{name}.kvprobe.tar.gz", "w:gz") as packed:
            for file in sorted(folder.iterdir()):
                if file.suffix in (".kvp", ".json", ".jsonl"):
                    packed.add(file, f"{name}/{file.name}")
        shutil.rmtree(folder.parent, ignore_errors=True)


def record_kineto(out: Path, names: list[str]) -> None:
    """All programs in this process, a profile each."""
    import torch
    from device import Device

    out.mkdir(parents=True, exist_ok=True)
    torch.zeros(1, device="cuda")
    device = Device()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the profiler's own first time
        device.launch(1_000)
        device.synchronize()
    for name in names:
        try:
            prepare(name, device)
            with torch.profiler.profile(activities=activities) as profile:
                said = run(name, device)
        except Exception as error:  # the other programs are worth having alone
            print(f"kineto: {name} failed: {error!r}", file=sys.stderr)
            continue
        profile.export_chrome_trace(str(out / f"{name}.json"))
        with (out / f"{name}.json").open("rb") as plain, gzip.open(out / f"{name}.json.gz", "wb", 6) as packed:
            shutil.copyfileobj(plain, packed)
        (out / f"{name}.json").unlink()
        truth(out, said)


def everything(out: Path, names: list[str]) -> None:
    """All programs one after another, each in an NVTX range: what nsys records."""
    import nvtx
    from device import Device

    device = Device()
    for name in names:
        try:
            prepare(name, device)
            time.sleep(0.01)
            with nvtx.annotate(name, domain="corpus"):
                truth(out, run(name, device))
                time.sleep(0.002)
        except Exception as error:  # the other programs are worth having alone
            print(f"nsys: {name} failed: {error!r}", file=sys.stderr, flush=True)


def found(patterns: tuple[str, ...]) -> str:
    return next(
        (path for pattern in patterns for path in sorted(map(str, Path("/").glob(pattern[1:])), reverse=True)), ""
    )


def record_nsys(out: Path, names: list[str]) -> None:
    """One process under Nsight Systems; its export cut into one file for each program."""
    out.mkdir(parents=True, exist_ok=True)
    nsys, importer = shutil.which("nsys") or found(NSYS), found(IMPORTER)
    work = Path(tempfile.mkdtemp())
    env = {**os.environ, "LD_LIBRARY_PATH": ""}
    command = [
        nsys,
        "profile",
        "-t",
        "cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node" if all(PROGRAMS[name].line for name in names) else "--cuda-graph-trace=graph",
        "-o",
        str(work / "all"),
        sys.executable,
        __file__,
        str(out),
        "--inside",
        ",".join(names),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if not (work / "all.nsys-rep").exists() and importer:
        beside = f"{Path(importer).parent}:{os.environ.get('NSYS_LIBRARIES', '')}"
        subprocess.run(
            [importer, "-i", work / "all.qdstrm", "-o", work / "all.nsys-rep"],
            capture_output=True,
            env={**os.environ, "LD_LIBRARY_PATH": beside},
            check=False,
        )
    exported = subprocess.run(
        [nsys, "export", "-t", "sqlite", "--force-overwrite=true", "-o", work / "all.sqlite", work / "all.nsys-rep"],
        capture_output=True,
        text=True,
        check=False,
    )
    if not (work / "all.sqlite").exists():
        raise SystemExit(f"nsys: {done.stderr[-500:]} {exported.stderr[-500:]} {sorted(work.iterdir())}")
    for line in done.stderr.splitlines():
        if line.startswith("nsys: "):
            print(line, file=sys.stderr)
    names = [name for name in names if (out / f"{name}.truth.json").exists()]
    with ThreadPoolExecutor() as pool:  # copying, deleting and packing: sqlite3 and zlib give the lock up
        for _ in pool.map(lambda name: cut(work / "all.sqlite", out, name), names):
            pass
    shutil.rmtree(work, ignore_errors=True)


def cut(whole: Path, out: Path, name: str) -> None:
    """The rows of one program's range, in a database of their own."""
    plain = out / f"{name}.sqlite"
    shutil.copyfile(whole, plain)
    db = sqlite3.connect(plain)
    window = db.execute(
        "select start, end from NVTX_EVENTS left join StringIds on id = textId "
        "where coalesce(text, value) = ? and end is not null",
        (name,),
    ).fetchone()
    tables = [row[0] for row in db.execute("select name from sqlite_master where type = 'table'")]
    for table in tables:
        columns = [row[1] for row in db.execute(f'pragma table_info("{table}")')]
        if not table.startswith(KEPT):  # the machine's names and its users' are among the others
            db.execute(f'drop table "{table}"')
        elif window and {"start", "end"} <= set(columns):
            db.execute(f'delete from "{table}" where start < ? or start > ?', window)
    if "CUPTI_ACTIVITY_KIND_CUDA_EVENT" in tables:
        db.execute(
            "delete from CUPTI_ACTIVITY_KIND_CUDA_EVENT where correlationId not in "
            "(select correlationId from CUPTI_ACTIVITY_KIND_RUNTIME)"
        )
    if "META_DATA_CAPTURE" in tables:
        for private in ("ENVIRONMENT", "WORKING_DIR", "USER_NAME", "ARGUMENT"):
            db.execute("delete from META_DATA_CAPTURE where name like ?", (f"%{private}%",))
    used = "select nameId from CUPTI_ACTIVITY_KIND_RUNTIME union select textId from NVTX_EVENTS"
    if "CUPTI_ACTIVITY_KIND_KERNEL" in tables:
        used += " union select shortName from CUPTI_ACTIVITY_KIND_KERNEL"
        used += " union select demangledName from CUPTI_ACTIVITY_KIND_KERNEL"
    db.execute(f"delete from StringIds where id not in ({used}) and value not like 'Command Buffer Full'")
    db.commit()
    db.execute("vacuum")
    db.close()
    with plain.open("rb") as file, gzip.open(out / f"{name}.sqlite.gz", "wb", 6) as packed:
        shutil.copyfileobj(file, packed)
    plain.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--formats", default="")
    parser.add_argument("--only", default="", help="programs whose name contains one of these, separated by commas")
    parser.add_argument("--accounts", action="store_true", help="programs that know their line of the account")
    parser.add_argument("--set", default="corpus", choices=SETS, help="which set of programs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        everything(options.out, options.inside.split(","))
        return
    names = [
        name
        for name, one in PROGRAMS.items()
        if any(part in name for part in options.only.split(","))
        and one.series == options.set
        and bool(one.line) == (options.accounts or options.set != "corpus")
    ]
    names.sort(key=lambda name: PROGRAMS[name].needs_gpu)  # torch comes late into the one process of nsys
    if not Path("/dev/nvidiactl").exists():
        names = [name for name in names if not PROGRAMS[name].needs_gpu]
    formats = options.formats or ("run,kineto,nsys" if Path("/dev/nvidiactl").exists() else "run")
    for form in formats.split(","):
        begin = time.monotonic()
        record = {"run": record_run, "totals": record_totals, "kineto": record_kineto, "nsys": record_nsys}[form]
        like = "run" if form == "totals" else form
        try:
            record(options.out / form, [name for name in names if like in PROGRAMS[name].forms])
        except (Exception, SystemExit) as error:  # the other formats are worth having alone
            print(f"{form}: {error!r}", file=sys.stderr)
        files = [path for path in (options.out / form).glob("*") if not path.name.endswith(".truth.json")]
        size = sum(path.stat().st_size for path in files)
        print(f"{form}: {len(files)} recordings, {size / 1e6:.1f} MB, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
