"""Metrics of every process of a program stand once at its endpoint: real processes, prometheus_client's exposition."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from kvprobe.instrument import metrics

# A server with an engine in a process of its own: the engine moves 100 bytes a turn and the server's process 1,000.
PROGRAM = """
import multiprocessing, os, signal, sys


def engine(turns, kill):
    import prometheus_client
    from kvprobe.instrument import activate, metrics, event_log

    activate()  # as the start-up hook or the plug-in does
    if "OTHERS" in os.environ:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = os.environ["OTHERS"]
    for _ in range(turns):
        event_log.later(metrics.transfer, "vllm", "load", 100, 2_000, 3_000_000, 20_000_000)
    metrics.count("deferred", "vllm")
    event_log.flush()
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)


def run(turns, method, kill=False):
    child = multiprocessing.get_context(method).Process(target=engine, args=(turns, kill))
    child.start()
    child.join()
    assert child.exitcode == (-signal.SIGKILL if kill else 0), child.exitcode


def scrape(name):
    from prometheus_client import CollectorRegistry, REGISTRY, generate_latest, multiprocess

    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # as servers do
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    with open(name, "wb") as file:
        file.write(generate_latest(registry))


if __name__ == "__main__":
    from kvprobe.instrument import activate, metrics
    BODY
"""


@pytest.fixture
def program(tmp_path):
    """`program(body, **environment)`: the server's process does `body`; returns its output."""
    short = tempfile.TemporaryDirectory(prefix="kvp-")  # multiprocessing's sockets lie in it: 108 characters at most
    (tmp_path / "tmp").symlink_to(short.name)

    def run(body, **environment):
        code = PROGRAM.replace("    BODY", textwrap.indent(textwrap.dedent(body), "    "))
        (tmp_path / "program.py").write_text(code)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVPROBE", "PROMETHEUS_"))}
        env |= {"TMPDIR": short.name, **environment}
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    with short:
        yield run


def figures(path):
    """Samples of kvprobe at a scrape: (name without the prefix, labels but the server) -> value; each stands once."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            if sample.name.startswith("kvprobe_"):
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "server"))
                key = (sample.name.removeprefix("kvprobe_"), *labels)
                assert key not in found and sample.labels["server"] == "vllm"
                found[key] = sample.value
    return found


LOAD = ("direction", "load")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_scrape_adds_up_the_processes_of_a_server(program, tmp_path, method, imported):
    program(
        f"""
        if {imported == "before"}:
            import prometheus_client
        activate()
        import prometheus_client
        run(3, {method!r})
        run(4, {method!r}, kill=True)
        scrape("engines")
        metrics.transfer("vllm", "load", 1000, 2_000, None, 5_000_000_000)
        scrape("all")
        """,
        KVPROBE="on",
    )
    engines, everything = figures(tmp_path / "engines"), figures(tmp_path / "all")
    assert engines["transfer_bytes_total", LOAD] == 700
    assert engines["deferred_loads_total",] == 2
    assert engines["transfer_submit_seconds_sum", LOAD] == pytest.approx(7 * 2e-6)
    assert everything["transfer_bytes_total", LOAD] == 1700
    assert everything["transfer_queue_wait_seconds_count", LOAD] == 7, "not measured in the server's process"
    buckets = {k[-1][1]: v for k, v in everything.items() if k[0] == "transfer_copy_seconds_bucket"}
    assert buckets == {
        "1e-06": 0,
        "4e-06": 0,
        "1.6e-05": 0,
        "6.4e-05": 0,
        "0.000256": 0,
        "0.001": 0,
        "0.004": 0,
        "0.016": 0,
        "0.064": 7,
        "0.25": 7,
        "1.0": 7,
        "4.0": 7,
        "+Inf": 8,
    }
    assert not list((tmp_path / "tmp").iterdir()), "the folder is removed by the process that made it"


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_an_engine_that_offloads_before_its_server_touches_the_offload_is_at_the_servers_endpoint(
    program, tmp_path, method
):
    package = tmp_path / "packages" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    about = package.parent / "transformers-5.19.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.19.0\n")
    other = "import os, transformers; print(os.environ['KVPROBE_METRICS'] != os.environ['OTHERS_METRICS'])"
    done = program(
        f"""
        import subprocess
        import kvprobe_startup
        import prometheus_client
        import transformers  # adapters wait for a touch
        handed = os.environ["KVPROBE_METRICS"]
        from kvprobe.runfolder import leftovers
        print(os.path.basename(handed).startswith(leftovers.METRICS + "-"))  # swept where it was left behind
        print("waiting" if kvprobe_startup.waiting() else "let in", os.listdir("tmp"))
        run(3, {method!r})
        environment = dict(os.environ, OTHERS_METRICS=handed)
        subprocess.run([sys.executable, "-c", {other!r}], env=environment, check=True)
        activate()
        metrics.transfer("vllm", "load", 1000, 2_000, None, None)
        scrape("all")
        """,
        KVPROBE="on",
        PYTHONPATH=str(package.parent),
    )
    assert done.stdout == "True\nwaiting []\nTrue\n"
    assert figures(tmp_path / "all")["transfer_bytes_total", LOAD] == 1300
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("kind", ["a file", "a link", "open to others"])
def test_a_folder_that_may_be_another_users_is_not_used(program, tmp_path, kind):
    put = {
        "a file": "open(folder, 'w').close()",
        "a link": "os.mkdir('elsewhere', 0o700); os.symlink(os.path.abspath('elsewhere'), folder)",
        "open to others": "os.mkdir(folder); os.chmod(folder, 0o777)",
    }[kind]
    done = program(
        f"""
        import prometheus_client
        from kvprobe.runfolder import identity
        folder = os.path.abspath(f"kvprobe-metrics-{{identity.of(os.getpid())}}-0")
        os.environ["KVPROBE_METRICS"] = folder
        {put}
        activate()
        metrics.transfer("vllm", "load", 1000, 2_000, None, None)
        print(os.listdir(folder) if os.path.isdir(folder) else [], b"kvprobe" in prometheus_client.generate_latest())
        """,
        KVPROBE="on",
    )
    assert done.stdout == "[] False\n"
    assert done.stderr.count("kvprobe: no metrics") == 1


def test_a_value_on_a_bound_is_in_its_bucket(program, tmp_path):
    program(
        """
        import prometheus_client
        activate()
        for ns in (1_000, 1_001, 4_000_000_000):
            metrics.transfer("vllm", "load", 0, ns, None, None)
        scrape("all")
        """,
        KVPROBE="on",
    )
    found = figures(tmp_path / "all")
    at = {bound: found["transfer_submit_seconds_bucket", LOAD, ("le", bound)] for bound in ("1e-06", "4e-06", "4.0")}
    assert at == {"1e-06": 1, "4e-06": 2, "4.0": 3}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_where_the_server_has_a_folder_for_its_processes_they_write_there(program, tmp_path, method):
    (tmp_path / "own").mkdir()
    done = program(
        f"""
        activate()
        import prometheus_client  # as vLLM: imported before the folder is named
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = "own"
        run(3, {method!r})
        scrape("all")
        print(b"kvprobe" in prometheus_client.generate_latest())
        """,
        KVPROBE="on",
    )
    assert figures(tmp_path / "all")["transfer_bytes_total", LOAD] == 300
    assert done.stdout == "False\n", "not in both"
    assert not list((tmp_path / "tmp").iterdir())


def test_a_folder_that_a_library_names_for_itself_in_the_engine_changes_nothing(program, tmp_path):
    (tmp_path / "lmcache").mkdir()
    program(
        """
        activate()
        import prometheus_client
        run(3, "spawn")
        scrape("all")
        """,
        KVPROBE="on",
        OTHERS="lmcache",
    )
    assert figures(tmp_path / "all")["transfer_bytes_total", LOAD] == 300
    assert not list((tmp_path / "lmcache").iterdir())


def test_the_default_registry_has_nothing_where_the_server_names_the_folder(program, tmp_path):
    (tmp_path / "own").mkdir()
    done = program(
        """
        activate()
        import prometheus_client
        metrics.transfer("vllm", "load", 1000, 2_000, None, None)
        print(os.listdir("tmp"), os.environ.get("KVPROBE_METRICS"), b"kvprobe" in prometheus_client.generate_latest())
        """,
        KVPROBE="on",
        PROMETHEUS_MULTIPROC_DIR="own",
    )
    assert done.stdout == "[] None False\n"


@pytest.mark.parametrize("environment", [{}, {"KVPROBE": "off", "KVPROBE_FIX": "auto"}])
def test_nothing_is_done_unless_asked(program, environment):
    done = program(
        """
        activate()
        import prometheus_client
        print(os.listdir("tmp"), os.environ.get("KVPROBE_METRICS"), b"kvprobe" in prometheus_client.generate_latest())
        """,
        **environment,
    )
    assert (done.stdout, done.stderr) == ("[] None False\n", "")


def test_prometheus_client_is_never_imported_by_kvprobe(program):
    """A server decides how it counts (PROMETHEUS_MULTIPROC_DIR) before it imports prometheus_client."""
    done = program(
        """
        activate()
        print(metrics.exposed(), "prometheus_client" in sys.modules, os.listdir("tmp"))
        """,
        KVPROBE="on",
    )
    assert done.stdout == "False False []\n"


def test_a_program_that_the_server_starts_has_its_own_figures(program, tmp_path):
    other = (
        "from kvprobe.instrument import activate, metrics; import prometheus_client; activate();"
        "metrics.transfer('vllm', 'load', 5, 2_000, None, None);"
        "open('other', 'wb').write(prometheus_client.generate_latest())"
    )
    program(
        f"""
        import prometheus_client, subprocess
        activate()
        run(3, "spawn")
        subprocess.run([sys.executable, "-c", {other!r}], check=True)
        scrape("all")
        """,
        KVPROBE="on",
    )
    assert figures(tmp_path / "other")["transfer_bytes_total", LOAD] == 5
    assert figures(tmp_path / "all")["transfer_bytes_total", LOAD] == 300
    assert not list((tmp_path / "tmp").iterdir())


def test_a_forked_child_counts_for_itself_and_leaves_the_folder_when_it_ends(program, tmp_path):
    program(
        """
        import prometheus_client
        activate()
        metrics.transfer("vllm", "load", 1000, 2_000, None, None)
        child = os.fork()
        if not child:
            metrics.count("deferred", "vllm")
            sys.exit()  # with the exit functions that it inherited
        os.waitpid(child, 0)
        for _ in range(5):
            metrics.count("redundant", "vllm")
        scrape("all")
        """,
        KVPROBE="on",
    )
    found = figures(tmp_path / "all")
    assert found["transfer_bytes_total", LOAD] == 1000
    assert (found["deferred_loads_total",], found["redundant_loads_total",]) == (1, 5)


# What can go wrong with a folder, done before (0) or after (1) the first transfer; each really happens here.
TROUBLES = {
    "cannot be made": (0, "import tempfile; tempfile.tempdir = '/proc/none'"),
    "has no room": (0, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"),
    "is gone": (1, "import shutil; shutil.rmtree(os.environ['KVPROBE_METRICS'])"),
    "is damaged": (1, "open(os.environ['KVPROBE_METRICS'] + '/counter_1.db', 'wb').write(b'\\x7f' * 64)"),
    "has an empty file": (1, "open(os.environ['KVPROBE_METRICS'] + '/counter_1.db', 'wb').close()"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_with_the_folder_is_said_once_and_the_servers_own_metrics_are_served(program, tmp_path, trouble):
    late, code = TROUBLES[trouble]
    done = program(
        f"""
        import prometheus_client
        prometheus_client.Counter("others", "Of the server.").inc(7)
        if {not late}:
            {code}
        activate()
        for _ in range(3):
            metrics.transfer("vllm", "load", 1000, 2_000, None, None)
        if {bool(late)}:
            {code}
        metrics.transfer("vllm", "load", 1000, 2_000, None, None)
        print(b"others_total 7.0" in prometheus_client.generate_latest(), metrics.exposed())
        prometheus_client.generate_latest()
        """,
        KVPROBE="on",
    )
    assert done.stdout == f"True {bool(late)}\n"
    assert done.stderr.count("kvprobe: no metrics") == len(done.stderr.splitlines()) == 1, done.stderr


def test_what_is_written_has_its_place_on_the_disk(program, tmp_path):
    """A write through a mapping kills the process where the disk is full: every server and direction fits."""
    done = program(
        """
        from kvprobe.instrument import registry
        from kvprobe.instrument.benefit import BenefitTotals
        import prometheus_client
        activate()
        metrics.exposed()
        folder = os.environ["KVPROBE_METRICS"]
        sizes = lambda: {f.name: (f.stat().st_size, f.stat().st_blocks) for f in os.scandir(folder)}
        before = sizes()
        for server in registry.SERVERS:
            for direction in ("load", "store", "other"):
                metrics.transfer(server, direction, 1, 1, 1, 1)
                metrics.call(server, direction, 1, 1, 1)
            metrics.offload(server, dict.fromkeys(BenefitTotals("toy.offload", "").sums, 1))
            metrics.reuse(server, 1, [1.0] * len(metrics.POOL_SIZES), [0.0] * len(metrics.POOL_SIZES))
            metrics.count("redundant", server)
            metrics.count("deferred", server)
        assert len(before) == 2 and all(blocks * 512 >= size for size, blocks in before.values())
        print(sizes() == before)
        """,
        KVPROBE="on",
    )
    assert done.stdout == "True\n"


def test_the_process_that_made_the_folder_leaves_none_after_a_signal_it_handles(program, tmp_path):
    program(
        f"""
        import prometheus_client
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        activate()
        run(1, "spawn")
        os.kill(os.getpid(), {signal.SIGTERM.value})
        """,
        KVPROBE="on",
    )
    assert not list((tmp_path / "tmp").iterdir())


def test_a_process_id_that_comes_again_continues_its_file(tmp_path):
    """As in a PROMETHEUS_MULTIPROC_DIR that outlives its server: counters never fall."""
    for _ in range(2):
        metrics._Files(str(tmp_path)).add("bytes", ("vllm", "load"), 100)
    (family,) = MultiProcessCollector(None, path=str(tmp_path)).collect()
    assert [sample.value for sample in family.samples] == [200]
