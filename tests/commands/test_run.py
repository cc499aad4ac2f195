"""`kvprobe run`: the command is its own, everything it does is counted, and what was not seen is said."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.commands import _watching
from kvprobe.diagnosis import FULL_QUEUE, diagnose, examine
from kvprobe.errors import UsageError
from kvprobe.instrument.carried import kvprobe_startup
from kvprobe.native import build
from kvprobe.probe import stacks
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import Recording
from kvprobe.recordings.occupancy import occupancy

from .watched import COPIES, HOSTRT, KVPROBE, clean_environment, run_watched, wait_for_end


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    build.build()


def copies_of(recording: Recording) -> tuple[int, int]:
    """Calls and bytes of cudaMemcpyAsync."""
    totals = recording.totals
    rows = [i for i in range(totals.rows) if recording.text(int(totals["name"][i])) == "cudaMemcpyAsync"]
    return int(totals["calls"][rows].sum()), int(totals["bytes"][rows].sum())


def states(recording: Recording) -> list[str]:
    return sorted(recording.text(int(i)) for i in recording.processes["state"])


# ---- the command is its own ------------------------------------------------------------------------------------------


def test_pid_input_output_and_exit_code_are_the_commands_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = "echo $$; cat; echo oops >&2; exit 7"
    process = subprocess.Popen(
        [*KVPROBE, "run", "--exec", "-o", folder, "--", "sh", "-c", script],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate("hello\n")
    assert (out, err, process.returncode) == (f"{process.pid}\nhello\n", "oops\n", 7)
    assert wait_for_end(folder)["status"] == 7


def test_a_program_with_a_shared_address_sanitizer_runs_and_is_counted(tmp_path: Path) -> None:
    source, program = tmp_path / "some.c", tmp_path / "some"
    source.write_text(
        "#include <stddef.h>\nint cudaMemcpyAsync(void *, const void *, size_t, int, void *);\n"
        "int cudaMalloc(void **, size_t), cudaHostAlloc(void **, size_t, unsigned);\n"
        "int main(void) {\n    void *gpu, *cpu;\n"
        "    if (cudaMalloc(&gpu, 64) || cudaHostAlloc(&cpu, 64, 0)) return 1;\n"
        "    for (int i = 0; i < 50; i++)\n        if (cudaMemcpyAsync(gpu, cpu, 64, 1, NULL)) return 1;\n"
        "    return 7;\n}\n"
    )
    runtime = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    command = [*build.compiler(), "-fsanitize=address", "-o", str(program), str(source), *runtime]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no -fsanitize=address")
    quiet = {"ASAN_OPTIONS": "detect_leaks=0"}  # its own options stay
    done = run_watched(tmp_path / "run", str(program), **quiet)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert copies_of(open_recording(tmp_path / "run")) == (50, 3200)


def test_a_run_inside_a_run_and_a_process_without_descriptors_are_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(COPIES + "copies(11)\n")
    inner = [*KVPROBE, "run", "-o", str(tmp_path / "inner"), "--", sys.executable, str(program)]
    done = run_watched(tmp_path / "outer", *inner)
    assert copies_of(open_recording(tmp_path / "inner"))[0] == 11
    (warning,) = (line for line in wait_for_end(tmp_path / "outer")["warnings"] if "inside this one" in line)
    assert f"recorded what it started, into {tmp_path / 'inner'};" in warning and "loaded kvprobe" not in done.stderr
    program.write_text(
        COPIES + f"import resource\nctypes.CDLL({str(HOSTRT)!r})\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\ncopies(11)\n"
    )
    run_watched(tmp_path / "few", sys.executable, str(program))
    (warning,) = wait_for_end(tmp_path / "few")["warnings"]
    assert "it could not make its ring file (Too many open files)" in warning


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_signals_reach_the_command_and_its_death_is_reported(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(
        COPIES + "copies(11)\nprint('ready', flush=True)\nimport signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('now', flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen(
        [*KVPROBE, "run", "--exec", "-o", folder, "--", sys.executable, program],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "now\n":
        pass
    process.send_signal(number)
    process.wait()
    process.stdout.close()
    assert process.returncode == -number
    end = wait_for_end(folder)
    recording = open_recording(folder)
    assert copies_of(recording) == (11, 11 * 64)
    if end["status"] is not None:  # kernels before 6.15 tell a stranger nothing
        assert states(recording) == [f"killed by {number.name}"]
        assert any(number.name in note for note in recording.notes)
    else:
        assert states(recording) == ["ended without its exit handlers"]
    assert (folder / "report.html").stat().st_size > 1000


def test_the_command_finds_no_child_no_descriptor_and_no_ignored_signal_of_ours(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import os, json, signal
try:
    os.wait(); child = True
except ChildProcessError:
    child = False
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)}
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
theirs = set()
for fd in os.listdir(folder := f"/proc/{os.environ['KVPROBE_OBSERVER']}/fd"):
    try:
        theirs.add(os.readlink(f"{folder}/{fd}"))
    except OSError:  # it was closed meanwhile
        pass
print(json.dumps([child, fds, sorted((mine & theirs) - {"/dev/null"}), os.getsid(0) == os.getsid(int(os.environ["KVPROBE_OBSERVER"])),
                  open("/proc/self/status").read().split("SigIgn:")[1].split()[0]]))
""")  # noqa: E501
    plain = subprocess.run(
        [sys.executable, program],
        env=clean_environment(KVPROBE_OBSERVER=str(os.getpid())),
        capture_output=True,
        text=True,
        check=True,
    )
    done = run_watched(tmp_path / "run", sys.executable, program)
    assert done.returncode == 0, done.stderr
    child, fds, shared, same_session, ignored = json.loads(done.stdout)
    assert not child and not shared and not same_session
    assert [fds, ignored] == [json.loads(plain.stdout)[1], json.loads(plain.stdout)[4]]


def test_a_broken_pipe_ends_the_command_as_in_a_shell(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            '"$@" | head -1; echo ${PIPESTATUS[0]}',
            "-",
            *KVPROBE,
            "run",
            "-o",
            tmp_path / "run",
            "--",
            "yes",
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "y\n141\n"


def test_what_is_in_ld_preload_stays_first(tmp_path: Path) -> None:
    other = shutil.copy(build.LIB / "libkvprobe.so", tmp_path / "other.so")
    done = run_watched(tmp_path / "run", "sh", "-c", "echo $LD_PRELOAD", LD_PRELOAD=str(other))
    assert re.fullmatch(rf"{re.escape(str(other))}:\S*libkvprobe_interpose.so\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--", "no-such-command-at-all"], 127, "not found on PATH"),
        (["--", "/"], 126, "is a folder"),
        ([], 2, "no command was given"),
        (["--max-size", "lots", "--", "true"], 2, "not a size"),
        (["--report", "/no/such/folder/x.html", "--", "true"], 2, "does not exist"),
        (["--report", "/dev/null", "--", "true"], 2, "not a regular file"),
        (["-o", "/proc/nothing", "--", "true"], 2, "cannot be made"),
        (["--fix", "maybe", "--", "true"], 2, "maybe"),
    ],
)
def test_wrong_usage_is_one_line_and_runs_nothing(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = subprocess.run(
        [*KVPROBE, "run", *arguments],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_it_neither_overwrites_nor_mixes_runs(tmp_path: Path) -> None:
    assert run_watched(tmp_path / "run", "true").returncode == 0
    again = run_watched(tmp_path / "run", "true")
    assert again.returncode == 2 and "not empty" in again.stderr
    wait_for_end(tmp_path / "run")


def test_in_a_folder_that_was_deleted_a_command_runs_as_without_it(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = 'mkdir "$1"; cd "$1"; rmdir "$1"; shift; exec "$@"'
    shell = ["sh", "-c", script, "sh", str(gone), *KVPROBE, "run"]
    command = ["--exec", "-o", str(tmp_path / "run"), "--", "sh", "-c", "exit 7"]
    done = subprocess.run([*shell, *command], env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    wait_for_end(tmp_path / "run")
    done = subprocess.run([*shell, "--", "true"], env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "has been deleted" in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_runs_that_begin_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    for folder in (tmp_path / "made", tmp_path / "there"):
        if folder.name == "there":
            folder.mkdir()
        assert _watching.new_folder(folder, "kvprobe", "one") == folder
        with pytest.raises(UsageError, match="another run"):
            _watching.new_folder(folder, "kvprobe", "two")


def test_a_folder_that_is_refused_keeps_its_permissions(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "file").touch()
    assert run_watched(shared, "true").returncode == 2
    assert shared.stat().st_mode & 0o7777 == 0o1777


# ---- everything is counted -------------------------------------------------------------------------------------------


def test_children_by_every_way_to_start_one_are_counted(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(COPIES)
    program = tmp_path / "program.py"
    program.write_text("""
import multiprocessing, os, subprocess, sys, worker
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        p = multiprocessing.get_context(method).Process(target=worker.copies, args=(10,))
        p.start(); p.join(); assert p.exitcode == 0
    code = "import worker; worker.copies(%d)"
    subprocess.run([sys.executable, "-c", code % 100], check=True)
    subprocess.run([sys.executable, "-I", "-c", "import sys; sys.path.insert(0, '.'); " + code % 1000], check=True)
    subprocess.run(["sh", "-c", f"{sys.executable} -S -c '{code % 10000}'"], check=True)
    worker.copies(5)
    os.execv(sys.executable, [sys.executable, "-c", code % 3])
""")
    folder = tmp_path / "run"
    done = subprocess.run(
        [*KVPROBE, "run", "--exec", "-o", folder, "--", sys.executable, program],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert wait_for_end(folder)["warnings"] == []
    recording = open_recording(folder)
    expected = 3 * 10 + 100 + 1000 + 10000 + 5 + 3
    assert copies_of(recording) == (expected, expected * 64)
    assert states(recording) == ["closed"] * 7 + ["replaced"]
    assert len(list(folder.glob("checkin-*.json"))) >= 6  # all but -S, which runs no start-up hook


def test_processes_have_their_own_names(tmp_path: Path) -> None:
    """The name that a worker gave itself, and of what multiprocessing started no word of its code."""
    folder = tmp_path / "run"
    (tmp_path / "worker.py").write_text(COPIES)
    (tmp_path / "program.py").write_text(
        "import multiprocessing, worker\nif __name__ == '__main__':\n    worker.copies(1)\n"
        "    p = multiprocessing.get_context('spawn').Process(target=worker.copies, args=(2,))\n"
        "    p.start(); p.join()\n"
    )
    assert run_watched(folder, sys.executable, tmp_path / "program.py").returncode == 0
    wait_for_end(folder)
    recording = open_recording(folder)
    assert sorted(map(recording.text, recording.processes["name"])) == ["multiprocessing worker", "program.py"]
    with (folder / "processes.jsonl").open("w") as file:  # as the observer writes it once workers have named themselves
        for pid in recording.processes["pid"].tolist():
            file.write(json.dumps({"pid": pid, "t_ns": 1, "status": 0, "command": f"VLLM::Worker_{pid}"}) + "\n")
    recording = open_recording(folder)
    named = [f"VLLM::Worker_{pid}" for pid in recording.processes["pid"]]
    assert [recording.text(int(i)) for i in recording.processes["name"]] == named


def test_another_interpreter_without_kvprobe_is_counted(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    done = run_watched(tmp_path / "run", venv / "bin" / "python", "-c", COPIES + "copies(21)")
    assert done.returncode == 0, done.stderr
    wait_for_end(tmp_path / "run")
    assert copies_of(open_recording(tmp_path / "run")) == (21, 21 * 64)


def test_a_thousand_short_children_are_counted_and_unharmed(tmp_path: Path) -> None:
    program = (
        COPIES
        + """
copies(1)
status = 0
for i in range(1000):
    pid = os.fork()
    if not pid:
        if i % 10 == 0:
            copies(2)
        os._exit(0)
    status |= os.waitpid(pid, 0)[1]
print(status)
"""
    )
    done = run_watched(tmp_path / "run", sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    wait_for_end(tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    assert copies_of(recording) == (201, 201 * 64) and recording.processes.rows == 101


def test_a_recording_is_read_while_it_grows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = COPIES + "copies(500)\nprint('ready', flush=True)\nsys.stdin.read()\n"
    process = subprocess.Popen(
        [*KVPROBE, "run", "--exec", "-o", folder, "--", sys.executable, "-c", program],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    recording = open_recording(folder)
    assert copies_of(recording) == (500, 32000) and states(recording) == ["running"]
    assert any("not over" in note for note in recording.notes)
    process.communicate()
    wait_for_end(folder)


# ---- what was not seen is said ---------------------------------------------------------------------------------------


def test_a_child_that_the_kernel_alone_gave_an_empty_environment_is_named(tmp_path: Path) -> None:
    program = (
        COPIES
        + """
copies(3)
import glob, platform, subprocess, time
class Child(int):
    pid = property(int)
    def kill(self):
        os.kill(self, 9)
    def wait(self):
        os.waitpid(self, 0)
def without_the_c_library():
    pid = os.fork()
    if pid:
        return Child(pid)
    number = {"x86_64": 59, "aarch64": 221}[platform.machine()]
    words = (ctypes.c_char_p * 3)(b"sleep", b"1000", None)
    ctypes.CDLL(None).syscall(number, b"/bin/sleep", words, (ctypes.c_char_p * 1)(None))
    os._exit(9)
children = [without_the_c_library()]
def met(child):  # the observer holds a descriptor of whom it has met
    for one in glob.glob(f"/proc/{os.environ['KVPROBE_OBSERVER']}/fdinfo/*"):
        try:
            if f"Pid:\\t{child.pid}\\n" in open(one).read():
                return True
        except OSError:  # it was closed meanwhile
            pass
for _ in range(2):  # when it meets the second it has looked at every process since the first one began
    children.append(subprocess.Popen(["sleep", "1000"]))
    while not met(children[-1]):
        time.sleep(0.01)
for child in children:
    child.kill()
    child.wait()
"""
    )
    assert run_watched(tmp_path / "run", sys.executable, "-c", program).returncode == 0
    warnings = wait_for_end(tmp_path / "run")["warnings"]
    assert len(warnings) == 1 and "environment was emptied" in warnings[0] and "sleep" in warnings[0]
    assert copies_of(open_recording(tmp_path / "run"))[0] == 3


def test_a_static_program_is_named(tmp_path: Path) -> None:
    source = tmp_path / "static.c"
    source.write_text("int main(void) { return 5; }\n")
    program = tmp_path / "static"
    if subprocess.run([*build.compiler(), "-static", "-o", program, source], check=False).returncode:
        pytest.skip("no static C library here")
    assert run_watched(tmp_path / "run", program).returncode == 5
    (warning,) = wait_for_end(tmp_path / "run")["warnings"]
    assert "statically linked" in warning and str(program) in warning
    assert any("statically linked" in note for note in open_recording(tmp_path / "run").notes)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "exit 0"], "no process of the command loaded kvprobe"),
        ([sys.executable, "-c", "pass"], "none of them made a CUDA call"),
    ],
)
def test_a_command_without_cuda_is_told_so(tmp_path: Path, command: list[str], words: str) -> None:
    assert run_watched(tmp_path / "run", *command).returncode == 0
    (warning,) = wait_for_end(tmp_path / "run")["warnings"]
    assert words in warning


# ---- nothing harms the target ----------------------------------------------------------------------------------------


def test_a_run_folder_that_is_deleted_harms_nothing(tmp_path: Path) -> None:
    program = COPIES + (
        "copies(10)\nimport shutil\nshutil.rmtree(os.environ['KVPROBE_RUN'])\ncopies(1000)\n"
        "import threading\nt = threading.Thread(target=copies, args=(1000,))\nt.start(); t.join()\n"
        "print('done')\n"
    )
    done = run_watched(tmp_path / "run", sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_full_or_read_only_run_folder_harms_nothing(tmp_path: Path, how: str) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", tmp_path], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    program = tmp_path.parent / "program.py"
    act = {
        "full": f"open({str(tmp_path / 'fill')!r}, 'wb').write(bytes(60000))",
        "read-only": "assert not os.system('mount --bind $KVPROBE_RUN $KVPROBE_RUN && mount -o remount,bind,ro "
        "$KVPROBE_RUN')",
    }[how]
    program.write_text(
        COPIES
        + f"""
copies(10)
try:
    {act}
except OSError:
    pass
import threading
threads = [threading.Thread(target=copies, args=(2000,)) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print('done')
"""
    )
    try:
        done = run_watched(tmp_path / "run", sys.executable, program)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
        if how == "full":
            assert copies_of(open_recording(tmp_path / "run"))[0] == 8010
        subprocess.run(["umount", "-l", tmp_path / "run"], capture_output=True, check=False)
        for _ in range(100):  # the observer lets go of the folder
            if not subprocess.run(["umount", tmp_path], capture_output=True, check=False).returncode:
                break
            time.sleep(0.2)
    finally:
        subprocess.run(["umount", "-l", tmp_path], capture_output=True, check=False)


# ---- the culprit -----------------------------------------------------------------------------------------------------

BLOCKED = (
    COPIES
    + """
import threading, time
from pathlib import Path
runtime, device, host, stream = open_runtime()
stacks = Path(os.environ["KVPROBE_RUN"], f"stacks-{os.getpid()}.jsonl")
def written():
    return stacks.read_text() if stacks.exists() else ""
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def until_it_was_seen(_):
    before = written()
    while written() == before:
        time.sleep(0.01)
def the_line_that_waits():
    assert not runtime.kvhostLaunchWork(stream, until_it_was_seen, None, ctypes.c_uint64(0))
    assert not runtime.cudaStreamSynchronize(stream)
def spin(stop):
    while not stop.is_set():
        sum(range(1000))
stop = threading.Event()
other = threading.Thread(target=spin, args=(stop,))
other.start()
while "spin" not in written():  # py-spy, which stops nobody, may not get them the first time
    the_line_that_waits()
stop.set()
other.join()
"""
)


def test_the_python_line_behind_a_blocked_call_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BLOCKED)
    assert run_watched(tmp_path / "run", sys.executable, program).returncode == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["options"]["stacks_how"] == "py-spy"
    wait_for_end(tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    table = recording.stacks
    stacks = [recording.text(int(i)) for i in table["stack"]]
    blocked = [row for row, stack in enumerate(stacks) if stack.startswith("the_line_that_waits")]
    assert blocked and all(table["blocked_ns"][row] >= 50_000_000 for row in blocked)
    assert all("program.py:" in stacks[row].splitlines()[0] for row in blocked)
    assert any("spin" in stack for stack in stacks)


def test_where_ptrace_is_not_permitted_the_process_is_asked(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\ndef the_line_that_waits():\n    print('ready', flush=True)\n    time.sleep(100)\n"
        "the_line_that_waits()\n"
    )
    env = clean_environment(KVPROBE_RUN=str(tmp_path), KVPROBE_STACKS="in-process")
    process = subprocess.Popen([sys.executable, program], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        taken = stacks.take(tmp_path, process.pid, process.pid, inside=True, timeout_s=60)
    finally:
        process.kill()
        process.communicate()
    assert taken["how"] == "in-process" and not taken["error"]
    assert any("the_line_that_waits" in frame for thread in taken["threads"] for frame in thread["frames"])


def test_a_process_that_was_asked_keeps_nothing_of_its_functions(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, weakref\nclass Held: pass\ndef waits():\n    held = Held()\n    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n    return weakref.ref(held)\nprint('held' if waits()() else 'gone')\n"
    )
    carried = str(Path(kvprobe_startup.__file__).parent)  # before the one that was installed
    env = clean_environment(KVPROBE_RUN=str(tmp_path), KVPROBE_STACKS="in-process", PYTHONPATH=carried)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, program], env=env, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        taken = stacks.take(tmp_path, process.pid, process.pid, inside=True, timeout_s=60)
        said, _ = process.communicate("\n", timeout=60)
    assert any("waits" in frame for thread in taken["threads"] for frame in thread["frames"])
    assert said == "gone\n"


def test_a_process_that_cannot_answer_is_said_to(tmp_path: Path) -> None:
    taken = stacks.take(tmp_path, os.getpid(), os.getpid(), inside=True, timeout_s=0.2)
    assert taken["how"] == "failed" and "did not answer" in taken["error"]


# ---- what an engine tells -------------------------------------------------------------------------------------------


def test_the_queue_that_an_engine_fills_is_named(tmp_path: Path) -> None:
    """How deep the queue is, is known from the engine's calibration."""
    program = tmp_path / "program.py"
    program.write_text("""
from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.offload import BlockPool, OffloadEngine
runtime = find_runtime("host")
gpu = BlockPool(runtime, [device_region(runtime, 64 * 131072)], 131072)
cpu = BlockPool(runtime, [host_region(runtime, 64 * 131072)], 131072)
with OffloadEngine(runtime, gpu, cpu, policy="shared", detail="copies") as engine:
    loads = [engine.load(range(0, 64, 2), range(0, 64, 2)) for _ in range(120)]  # of blocks that no run joins
    for load in loads:
        load.wait()
""")
    # a copy takes far longer than its submission: the queue is full from its depth on, however slow the machine is
    done = run_watched(tmp_path / "run", sys.executable, program, XDG_CACHE_HOME=str(tmp_path), KVHOST_H2D_GBPS="0.25")
    assert done.returncode == 0, done.stderr
    wait_for_end(tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    assert recording.machine["queue_depth"] == 1021 and "counted in process" in recording.machine_how["queue_depth"]
    queues = occupancy(recording)
    assert queues.verdict == "full" and queues.how == "inferred"
    full = max(queues.streams, key=lambda queue: int(queue.blocked_ns.sum()))
    assert full.ceiling == pytest.approx(1021, rel=0.05)
    said = {finding.cause: finding for finding in examine(recording, queues)}
    assert said["launch_queue_saturation"].confidence == "likely"
    blocked_ns = full.blocked_ns.sum()  # with whatever other programs took of the CPU meanwhile
    # where they took it from the device's thread, one call waits for long, as behind a fence: the queue's time as well
    full_queue = [said[cause].lost_ns for cause in ("fence_before_copies", "launch_queue_saturation") if cause in said]
    assert blocked_ns / 2 < sum(full_queue) <= 1.01 * blocked_ns


def test_an_engine_that_never_fills_its_queue_gets_nothing_found_for_its_own_calibration(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.offload import BlockPool, OffloadEngine
runtime = find_runtime("host")
gpu = BlockPool(runtime, [device_region(runtime, 64 * 4096)], 4096)
cpu = BlockPool(runtime, [host_region(runtime, 64 * 4096)], 4096)
with OffloadEngine(runtime, gpu, cpu, policy="shared", detail="copies") as engine:
    for _ in range(20):
        engine.load(range(0, 64, 2), range(0, 64, 2)).wait()  # no neighbours
""")
    done = run_watched(tmp_path / "run", sys.executable, program, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    wait_for_end(tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    assert recording.labels.rows == 1 and recording.transfers.rows == 20
    # a machine that others use makes calls slow, too, and the first of them before anybody looked at who had the CPU;
    # it fills no queue: the calibration alone did
    assert occupancy(recording).verdict != "saturated"
    named = {finding.cause for finding in diagnose(recording) if not finding.abstains}
    assert named <= {"cpu_starved", "allocation_on_hot_path"}


def test_submissions_of_a_thread_without_a_cpu_are_told_from_a_full_queue(tmp_path: Path) -> None:
    source, program = tmp_path / "copies.c", tmp_path / "copies"
    source.write_text("""
#include <time.h>
int cudaMalloc(void **, unsigned long); int cudaMallocHost(void **, unsigned long);
int cudaMemcpyAsync(void *, void *, long, int, void *); int cudaStreamQuery(void *);
int main() {
    void *d, *h; cudaMalloc(&d, 4096); cudaMallocHost(&h, 4096);
    /* Never more than 300 outstanding, never asleep; on a busy machine for longer, so that it is looked at often. */
    for (time_t end = time(0) + 5; time(0) < end || clock() < CLOCKS_PER_SEC / 2;) {
        for (int i = 0; i < 300; i++) if (cudaMemcpyAsync(d, h, 4096, 1, 0)) return 1;
        while (cudaStreamQuery(0));
    }
    return 0;
}
""")
    link = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    subprocess.run([*build.compiler(), "-w", "-o", program, source, *link], check=True)
    cpu = str(min(os.sched_getaffinity(0)))
    others = [subprocess.Popen(["taskset", "-c", cpu, "sh", "-c", "while :; do :; done"]) for _ in range(3)]
    try:
        done = run_watched(tmp_path / "run", "taskset", "-c", cpu, program)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.returncode == 0, done.stderr
    wait_for_end(tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    assert recording.cpu_waits.rows
    # where others use this machine's CPUs besides, that the queue may have been full is an open question, no finding
    found = {finding.cause: finding for finding in diagnose(recording) if not finding.abstains}
    assert "cpu_starved" in found and not set(found) & {*FULL_QUEUE, "python_or_gil_bound"}
    assert 0 < found["cpu_starved"].lost_ns <= int(recording.cpu_waits["waited_ns"].sum())


def test_the_terminal_is_told_where_the_report_is(tmp_path: Path) -> None:
    import pty

    libraries = build.LIB
    source, program, folder = tmp_path / "copy.c", tmp_path / "copy", tmp_path / "run"
    source.write_text(
        "int cudaMalloc(void **, unsigned long); int cudaMemcpyAsync(void *, void *, long, int, void *);"
        "int main() { void *d; char h[64]; cudaMalloc(&d, 64);"
        "return cudaMemcpyAsync(d, h, 64, 1, 0); }"
    )
    subprocess.run(
        [
            *build.compiler(),
            "-w",
            "-o",
            program,
            source,
            f"-L{libraries}",
            "-lkvprobe_hostrt",
            f"-Wl,-rpath,{libraries}",
        ],
        check=True,
    )
    master, slave = pty.openpty()  # kept open, as a user's terminal is
    process = subprocess.Popen(
        [sys.executable, "-m", "kvprobe", "run", "--exec", "-o", folder, "--", program],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=clean_environment(),
    )
    assert process.wait() == 0
    text = ""
    while not any(end in text for end in ("report in", "nothing was recorded", "no report")):
        text += os.read(master, 4096).decode()
    assert f"kvprobe: recording into {folder}" in text and f"\r\nkvprobe: report in {folder}/report.html" in text
