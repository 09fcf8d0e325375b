"""The grammar of --cadenza: accepted and refused values; the controller's Lua script reads it in the same way."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lupa import lua51
from spankstructs import Config, Options

LUA = Path(__file__).parents[2] / "slurm_plugin" / "lua" / "job_submit.lua"
OPTION = "_SLURM_SPANK_OPTION_cadenza_cadenza="


def parse(library: ctypes.CDLL, text: str | None) -> tuple[Options, str]:
    options, why = Options(), ctypes.create_string_buffer(256)
    result = library.options_parse(None if text is None else text.encode(), ctypes.byref(options), why, 256)
    assert (result == 0) == (why.value == b"")
    return options, why.value.decode(errors="replace")


@pytest.mark.parametrize("text", [None, "", "(null)", "share", "share=yes"])
def test_bare_means_share(library: ctypes.CDLL, text: str | None) -> None:
    options, why = parse(library, text)
    assert not why
    assert options.share
    assert (options.min_gpus, options.max_gpus, options.priority, options.model) == (0, 0, 0, b"")


@pytest.mark.parametrize("text", ["off", "share=no"])
def test_opt_out(library: ctypes.CDLL, text: str) -> None:
    options, why = parse(library, text)
    assert (options.share, why) == (False, "")


def test_sbatchs_help_names_every_key(library: ctypes.CDLL) -> None:
    _, why = parse(library, "nonsense=1")
    usage = (LUA.parents[1] / "spank" / "cadenza.c").read_text().partition(".usage = ")[2].partition(".has_arg")[0]
    named = re.findall(r"[a-z_]+(?=,)", why.partition("(known: ")[2])
    assert {"share", "duration_s"} <= set(named)
    assert [key for key in named if f"{key}=" not in usage] == []


def test_every_key(library: ctypes.CDLL) -> None:
    options, why = parse(library, "min_gpus=1,max_gpus=4,model=res18.v-2_x,priority=-5,iterations=900,duration_s=60")
    assert not why
    assert (options.iterations, options.duration_s) == (900, 60)
    assert (options.min_gpus, options.max_gpus, options.priority, options.model) == (1, 4, -5, b"res18.v-2_x")


@pytest.mark.parametrize(("text", "per_gpu"), [("", False), ("batch=global", False), ("batch=per-gpu", True)])
def test_the_batch_is_global_unless_said_otherwise(library: ctypes.CDLL, text: str, *, per_gpu: bool) -> None:
    options, why = parse(library, text)
    assert (options.batch_per_gpu, why) == (per_gpu, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", False), ("checkpoints", True), ("checkpoints=yes", True), ("checkpoints=no", False)],
)
def test_a_job_says_whether_it_keeps_checkpoints(library: ctypes.CDLL, text: str, *, said: bool) -> None:
    options, why = parse(library, text)
    assert (options.checkpoints, options.share, why) == (said, True, "")


@pytest.mark.parametrize(
    ("text", "late"), [("", False), ("late", True), ("late=yes", True), ("late=no", False), ("model=a,late", True)]
)
def test_a_job_asks_for_its_lease_by_itself_only_if_it_says_so(library: ctypes.CDLL, text: str, *, late: bool) -> None:
    options, why = parse(library, text)
    assert (options.late, options.share, why) == (late, True, "")


@pytest.mark.parametrize(
    ("text", "graphs"), [("", False), ("graphs", True), ("graphs=yes", True), ("graphs=no", False), ("off", False)]
)
def test_addresses_stay_only_if_a_job_says_so(library: ctypes.CDLL, text: str, *, graphs: bool) -> None:
    options, why = parse(library, text)
    assert (options.graphs, why) == (graphs, "")


@pytest.mark.parametrize(
    ("text", "summary"), [("", False), ("summary", True), ("summary=yes", True), ("summary=no", False), ("off", False)]
)
def test_the_client_sums_up_only_if_a_job_says_so(library: ctypes.CDLL, text: str, *, summary: bool) -> None:
    options, why = parse(library, text)
    assert (options.summary, why) == (summary, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("summary=1", "summary is yes or no, not '1'"),
        ("graphs=on", "graphs is yes or no, not 'on'"),
        ("late=1", "late is yes or no, not '1'"),
        ("checkpoints=", "checkpoints is yes or no, not ''"),
        ("batch=all", "batch is global or per-gpu, not 'all'"),
        ("foo=1", "unknown key 'foo' (known: share,"),
        ("share=maybe", "share is yes or no, not 'maybe'"),
        ("min_gpus=0", "min_gpus is a number from 1 to 65535, not '0'"),
        ("max_gpus=", "max_gpus is a number from 1 to 65535, not ''"),
        ("max_gpus= 3", "max_gpus is a number"),
        ("max_gpus=99999999999999999999", "max_gpus is a number"),
        ("min_gpus=3,max_gpus=1", "min_gpus=3 is more than max_gpus=1"),
        ('model=a"b', "model is 1 to 64 of the characters"),
        ("model=" + "a" * 65, "model is 1 to 64"),
        ("iterations=0", "iterations is a number from 1"),
        ("duration_s=1h", "duration_s is a number from 1"),
        ("priority=high", "priority is a number from -1000000"),
        ("share,", "unknown key ''"),
        ("a" * 300, "at most 255 characters"),
    ],
)
def test_refusals_say_what_is_wrong(library: ctypes.CDLL, text: str, message: str) -> None:
    assert message in parse(library, text)[1]


@pytest.fixture(scope="module")
def lua() -> lua51.LuaRuntime:
    runtime = lua51.LuaRuntime()
    ignore = lambda *_: None  # noqa: E731
    runtime.globals().slurm = runtime.table_from(
        {"SUCCESS": 0, "ERROR": -1, "log_info": ignore, "log_error": ignore, "user_msg": ignore}
    )
    runtime.execute(LUA.read_bytes())
    runtime.globals().cadenza.settings_file = "/nonexistent"
    return runtime


items = st.one_of(
    st.sampled_from(["share", "share=yes", "share=no", "off", "model=a", "min_gpus=2", "max_gpus=1", "v=1", "held=1"]),
    st.just("batch=global"),
    st.builds(
        "{}={}".format,
        st.sampled_from(
            ["share", "checkpoints", "min_gpus", "max_gpus", "batch", "model", "priority", "iterations", "duration_s"]
        ),
        st.text('0123456789-+.aEx _"\\é', max_size=7),
    ),
)


@given(items=st.lists(items, max_size=4))
@example(items=["min_gpus=0x10"])
@example(items=["priority=1e3"])
@example(items=["v=1"])
@example(items=["batch=per-gpu"])
@example(items=["late"])
@example(items=["late=no"])
@example(items=["graphs"])
@example(items=["graphs=no"])
@example(items=["graphs=1"])
@example(items=["summary", "checkpoints"])
@example(items=["summary=1"])
@example(items=["checkpoints"])
@example(items=["checkpoints=no"])
@example(items=["checkpoints=true"])
@example(items=["batch=2"])
@example(items=["share=", "share"])
def test_both_ends_agree(library: ctypes.CDLL, lua: lua51.LuaRuntime, items: list[str]) -> None:
    text = ",".join(items)
    fields = {"tres_per_node": "gres/gpu:1", "spank_job_env": {0: OPTION + text}, "spank_job_env_size": 1}
    result = lua.globals().slurm_job_submit(lua.table_from(fields, recursive=True), None, 0)
    assert (result == 0) == (parse(library, text)[1] == "")


def test_arguments_of_the_plugstack_line(library: ctypes.CDLL) -> None:
    config, why = Config(), ctypes.create_string_buffer(256)
    for argument in (b"socket=/run/x.sock", b"wait=7"):
        assert library.config_argument(ctypes.byref(config), argument, why, 256) == 0
    assert (config.socket, config.wait_s) == (b"/run/x.sock", 7)


@pytest.mark.parametrize(
    "argument", [b"sockt=/x", b"socket=x", b"socket=/" + b"x" * 200, b"wait=0", b"wait=1s", b"wait="]
)
def test_bad_arguments_are_named_and_change_nothing(library: ctypes.CDLL, argument: bytes) -> None:
    config, why = Config(), ctypes.create_string_buffer(256)
    assert library.config_argument(ctypes.byref(config), argument, why, 256) == -1
    assert argument[:6].decode().split("=")[0] in why.value.decode()
    assert (config.socket, config.wait_s) == (b"", 0)
