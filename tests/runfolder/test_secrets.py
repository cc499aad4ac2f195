"""Secrets of a command line: hidden in the same way by Python, by the start-up hook and by the ring's writer."""

from __future__ import annotations

import ctypes as ct
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe.instrument.carried import kvprobe_startup as startup
from kvprobe.native import build
from kvprobe.runfolder.secrets import redact, redact_text

CASES = {
    "vllm serve m --api-key sk1 sk2 --port 80": "vllm serve m --api-key *** *** --port 80",
    "HF_TOKEN=hf_abc python a.py": "HF_TOKEN=*** python a.py",
    "x --password=p -v": "x --password=*** -v",
    "curl -H 'Authorization: Bearer abc'": "curl -H 'Authorization: *** ***",
    "bash -c 'serve --api-key k; rest'": "bash -c 'serve --api-key *** ***",
    "get https://me:pw@host/a@b http://host/x@y": "get https://***@host/a@b http://host/x@y",
    "echo hf_0123456789abcdefgh sk-short": "echo *** sk-short",
    "x --max-num-batched-tokens 8192 --tokenizer t --ssl-keyfile f": (
        "x --max-num-batched-tokens 8192 --tokenizer t --ssl-keyfile f"
    ),
    "x --auth --port 1": "x --auth --port 1",
    """x --cfg {"api_key":"abc","n":1} {"token": "ab cd", "n": 2} -v""": (
        """x --cfg {"api_key":"***","n":1} {"token": *** *** "n": 2} -v"""
    ),
    'x {\\"password\\":\\"p q\\"} y': 'x {\\"password\\":\\"*** *** y',
    'KEY="a b c" x': 'KEY="*** *** *** x',
    "mysql -ppw1919 -p mypassword -p 8080 -pthread -p /a": "mysql -p*** -p *** -p 8080 -pthread -p /a",
    "curl -u me:pw -uyou:pw --user me --proxy-user a:b": "curl -u *** -u*** --user me --proxy-user ***",
    "a http://h/p?token=abc&x=1&key=z": "a http://h/p?token=***&x=1&key=***",
    "X-Api-Key:abc --header=X-Api-Key: abc": "X-Api-Key:*** --header=X-Api-Key: ***",
    "--header=Authorization:Bearer abc -v": "--header=Authorization:*** *** -v",
    "http://a:b@c,http://d:e@f --url=redis://:pw@h": "http://***@c,http://***@f --url=redis://***@h",
    "x --private-key -----BEGIN PRIVATE KEY-----abc -v": "x --private-key *** *** *** -v",
    "x -----BEGIN RSA abc": "x *** *** ***",
    "": "",
}


@pytest.mark.parametrize("given_text", CASES)
def test_what_is_hidden(given_text: str) -> None:
    assert redact_text(given_text) == CASES[given_text]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory):
    library = tmp_path_factory.mktemp("secrets") / "secrets.so"
    source = build.NATIVE / "src" / "secrets.c"
    export = tmp_path_factory.mktemp("export") / "export.c"
    signature = "void hide(const char *t, size_t b, char *o, size_t n)"
    export.write_text(f'#include "{source}"\n{signature} {{ kvp_redact(t, b, o, n); }}\n')
    subprocess.run(
        [
            *build.compiler(),
            "-std=gnu11",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            f"-I{source.parent}",
            "-o",
            str(library),
            str(export),
        ],
        check=True,
    )
    hide = ct.CDLL(str(library)).hide

    def call(text: str, size: int = 4096) -> str:
        out = ct.create_string_buffer(size)
        data = text.encode(errors="surrogateescape")
        hide(data, ct.c_size_t(len(data)), out, ct.c_size_t(size))
        return out.value.decode(errors="surrogateescape")

    return call


pieces = st.sampled_from(
    [
        "--api-key",
        "--token",
        "TOKEN=x",
        "--a.secret=",
        "Bearer",
        "Authorization:",
        "'",
        '"--key"',
        "https://a:b@c/d",
        "://@",
        "=",
        "-",
        "--",
        "hf_0123456789abcdef",
        "model",
        "\t",
        "  ",
        "--no",
        "x_API-KEY=1=2",
        "é",
        "PASSWORD:",
        '{"token":',
        '"password":"x"',
        'KEY="a',
        "b'",
        "-p",
        "-p1x",
        "-px",
        "-u",
        "a:b",
        "8080",
        "?key=1&",
        "\\",
        "&",
        "-----BEGIN",
        "X-Api-Key:Bearer",
        "://u:p@h,",
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(pieces, st.sampled_from([" ", "", "\n"]))))
def test_all_three_hide_the_same(native, parts) -> None:
    text = "".join(piece + gap for piece, gap in parts)
    assert native(text).replace("\t", " ").replace("\n", " ") == redact_text(text)
    assert startup._redact(text.split(" ")) == redact(text.split(" "))


ARGUMENTS = (
    (["x", "--private-key", "-----BEGIN PRIVATE KEY-----\nabc", "-v"], "x --private-key *** *** *** *** -v"),
    (["x", "KEY=a b c", "y"], "x KEY=*** *** *** y"),
    (["x", "--password", "two words", "three", "-v"], "x --password *** *** *** -v"),
    (["x", "-H", "X-Api-Key: a b", "y"], "x -H X-Api-Key: *** *** ***"),
    (["x"], "x"),
)


@pytest.mark.parametrize(("words", "shown"), ARGUMENTS)
def test_a_value_of_several_words_is_hidden_to_its_end(native, words: list[str], shown: str) -> None:
    assert " ".join(redact(words)) == " ".join(startup._redact(words)) == native("\0".join(words)) == shown


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(pieces, max_size=4).map(" ".join), min_size=2, max_size=6))
def test_all_three_hide_the_same_of_words(native, words) -> None:
    shown = " ".join(redact(words))
    assert " ".join(startup._redact(words)) == shown
    if words[-1]:  # the kernel's list of words ends with the last one
        assert native("\0".join(words)).replace("\t", " ") == shown


def test_what_is_cut_is_cut_after_the_secret_is_gone(native) -> None:
    assert native("x --api-key " + "s" * 600, 20) == "x --api-key ***"


def test_a_process_is_not_written_down_with_its_secrets(tmp_path: Path) -> None:
    writer = subprocess.run(
        [
            *build.compiler(),
            "-std=gnu11",
            "-O1",
            f"-I{build.NATIVE / 'src'}",
            "-pthread",
            "-o",
            str(tmp_path / "writer"),
            str(Path(__file__).parents[1] / "native" / "programs" / "ring_writer.c"),
            *(str(build.NATIVE / "src" / f"{n}.c") for n in ("ring", "clock", "secrets")),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert writer.returncode == 0, writer.stderr
    subprocess.run([tmp_path / "writer", "plain", tmp_path / "a.kvp", "10", "1", "--api-key", "hunter2"], check=True)
    assert b"hunter2" not in (tmp_path / "a.kvp").read_bytes()
    assert (tmp_path / "a.kvp").stat().st_mode & 0o777 == 0o600
