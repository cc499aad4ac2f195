"""Lines of adapters in servers that configure logging for themselves only, for everybody, or late."""

import subprocess
import sys

import pytest

START = """
import logging
from kvprobe.instrument import logs
logs.appear()
log = logging.getLogger("kvprobe")
"""


def stderr(code):
    return subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, check=True
    ).stderr.splitlines()


def test_a_line_appears_where_nobody_configured_logging():
    (line,) = stderr("log.info('kvprobe: one')")
    assert line.startswith("INFO ") and line.endswith("kvprobe: one")


def test_a_server_that_configures_only_its_own_logger_sees_them():
    own = "logging.getLogger('vllm').addHandler(logging.StreamHandler()); log.info('kvprobe: one')"
    assert len(stderr(own)) == 1


@pytest.mark.parametrize(("level", "lines"), [("INFO", 1), ("WARNING", 0)])
def test_who_configures_logging_later_decides_and_no_line_comes_twice(level, lines):
    code = f"logging.basicConfig(level=logging.{level}, format='theirs %(message)s')\nlog.info('kvprobe: one')"
    assert stderr(code) == ["theirs kvprobe: one"] * lines


def test_a_logger_with_a_level_of_its_own_is_left_alone():
    before = "import logging; logging.getLogger('kvprobe').setLevel(logging.ERROR)\n"
    done = subprocess.run(
        [sys.executable, "-c", before + START + "log.info('one')"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
