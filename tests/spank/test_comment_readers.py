"""The three readers of a comment give one answer: job_submit.lua, the plugin that reads its words, and the service."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lupa import lua51

from cadenza.slurm_plugin.gateway.comment import BadOptions, opt_in_of

SCRIPT = Path(__file__).parents[2] / "slurm_plugin" / "lua" / "job_submit.lua"
NO_VAL = 4294967294
WORDS = {0: None, 1: False, 2: True}

KEYS = st.sampled_from(['"cadenza"', '"c\\u0061denza"', '"x"', '"share"', '"comment"'])
OPTIONS = st.dictionaries(
    st.sampled_from(
        ["share", "v", "late", "graphs", "summary", "checkpoints", "batch", "why", "held", "model", "cadenza"]
    ),
    st.sampled_from([True, False, 1, 2, "per-gpu", "}", '"share":false', {"cadenza": {}}, None]),
    max_size=3,
).map(json.dumps)
GOOD = st.sampled_from(["{}", '{"share":false,"why":"}"}', '{ "batch":"per-gpu","model":"a" }', '{"v":1,"share":true}'])
NESTED = st.recursive(
    OPTIONS | GOOD | st.sampled_from(["1", "true", '"cadenza"', '"{\\"cadenza\\":{\\"share\\":true}}"']),
    lambda inner: st.lists(st.tuples(KEYS, inner), max_size=2).map(
        lambda pairs: "{" + ",".join(f"{key}: {value}" for key, value in pairs) + "}"
    ),
    max_leaves=4,
)
COMMENTS = (
    st.lists(st.tuples(KEYS, NESTED), max_size=3).map(
        lambda pairs: "{" + " ,".join(f"{key}:{value}" for key, value in pairs) + "}"
    )
    | st.text(max_size=20)
    | NESTED.map(lambda text: "[" * 70 + text + "]" * 70)
    | NESTED.map(lambda text: '{"x":' + "[" * 70 + text + "]" * 70 + ',"c\\u0061denza":{}}')
)


class Submission:
    """The hook in Lua, with the comment that it leaves."""

    def __init__(self) -> None:
        self.lua = lua51.LuaRuntime(encoding=None)
        quiet = self.lua.eval(b"function() end")
        names = {b"log_info": quiet, b"log_error": quiet, b"user_msg": quiet, b"SUCCESS": 0, b"ERROR": -1}
        self.lua.globals()[b"slurm"] = self.lua.table_from(names)
        self.lua.execute(SCRIPT.read_bytes())

    def comment(self, before: str, update: bool) -> bytes | None:
        """Return the comment after a submission or an update; None if it was refused."""
        job: dict[bytes, Any] = {
            b"comment": before.encode("utf-8", "surrogatepass"), b"user_id": 1, b"partition": b"gpu",
            b"tres_per_node": b"gres/gpu:1", b"priority": NO_VAL, b"het_job_offset": NO_VAL, b"max_nodes": 1,
            b"spank_job_env_size": 0,
        }  # fmt: skip
        table, hooks = self.lua.table_from(job), self.lua.globals()
        if update:
            record = self.lua.table_from({b"user_id": 1, b"job_state": 0, b"partition": b"gpu"})
            result = hooks[b"slurm_job_modify"](table, record, self.lua.table(), 1)
        else:
            result = hooks[b"slurm_job_submit"](table, self.lua.table(), 1)
        return None if result else table[b"comment"]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example('{"x":{"cadenza":{}}}', False)
@example('{"cadenza":{"late":true,"model":"a"}}', False)
@example('{"cadenza":{"graphs":true,"model":"a"}}', False)
@example('{"cadenza":{"summary":true,"checkpoints":true}}', False)
@example('{"cadenza":{"model":"}","share":false}}', True)
@example('{"a":"\\"cadenza\\":{","b":{"cadenza":{"share":false}}}', False)
@given(COMMENTS, st.booleans())
def test_script_plugin_and_service_read_the_same(library: ctypes.CDLL, comment: str, update: bool) -> None:
    left = SUBMISSION.comment(comment, update)
    if left is None:
        return
    try:
        found = opt_in_of(left.decode(errors="replace"))
    except BadOptions:
        found = None
    service = None if found is None else found.options.share
    assert WORDS[library.comment_sharing(left)] is service, left
    if found is not None:
        assert library.comment_batch_per_gpu(left) == (found.options.batch == "per-gpu")
        assert library.comment_late(left) == found.options.late
        assert library.comment_graphs(left) == json.loads(left)["cadenza"].get("graphs", False)
        assert library.comment_summary(left) == json.loads(left)["cadenza"].get("summary", False)


SUBMISSION = Submission()
