"""job_submit.lua in real Lua interpreters: 5.1, with which Debian builds Slurm, and 5.4."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lupa import lua51, lua54

SCRIPT = Path(__file__).parents[2] / "slurm_plugin" / "lua" / "job_submit.lua"
SUCCESS, ERROR = 0, -1
NO_VAL, NO_VAL16 = 4294967294, 65534
OPTION = "_SLURM_SPANK_OPTION_cadenza_cadenza="


class Slurm:
    """The ``slurm`` table, with the messages logged and sent to users."""

    def __init__(self, tmp_path: Path, lua: Any) -> None:
        self.files = tmp_path
        self.log: list[str] = []
        self.said: list[str] = []
        self.lua = lua.LuaRuntime(unpack_returned_tuples=True)
        self.lua.globals().slurm = self.lua.table_from(
            {
                "SUCCESS": SUCCESS,
                "ERROR": ERROR,
                "log_info": self.note,
                "log_error": self.note,
                "user_msg": self.said.append,
            }
        )
        self.lua.execute(SCRIPT.read_bytes())
        self.lua.globals().cadenza.settings_file = str(tmp_path / "lua.conf")

    def note(self, template: str, *values: str) -> None:
        self.log.append(template.replace("%s", "{}").format(*values))

    def manage(self, text: str = "partitions=gpu\nlanes=2\n") -> None:
        (self.files / "lua.conf").write_text(text)

    def submit(self, flag: str | None = None, **fields: Any) -> Any:
        """Submit a one-GPU job; return its description as the hook left it, with ``rc``."""
        job = {
            "name": "train", "user_id": 1000, "script": "#!/bin/sh", "tres_per_node": "gres/gpu:1",
            "min_nodes": 1, "max_nodes": 1, "num_tasks": 1, "shared": NO_VAL16, "priority": NO_VAL,
            "het_job_offset": NO_VAL, "cron_job": False, "partition": "gpu", "environment": {},
            "spank_job_env_size": 0,
        } | fields  # fmt: skip
        if flag is not None:
            job |= {
                "spank_job_env": {0: "_SLURM_SPANK_OPTION_other_x=1", 1: OPTION + flag},
                "spank_job_env_size": 2,
            }
        description = self.lua.table_from(job, recursive=True)
        partitions = self.lua.table_from({"gpu": {"flag_default": 1}, "cpu": {"flag_default": 0}}, recursive=True)
        description.rc = self.lua.globals().slurm_job_submit(description, partitions, 1000)
        return description

    def update(self, changes: dict[str, Any], *, uid: int = 1000, **record: Any) -> Any:
        """Update a pending job of user 1000; return the request as the hook left it, with ``rc``."""
        unset = dict.fromkeys(("min_nodes", "max_nodes", "num_tasks"), NO_VAL)
        request = self.lua.table_from(unset | changes)
        job = self.lua.table_from({"user_id": 1000, "job_state": 0, "partition": "gpu"} | record)
        request.rc = self.lua.globals().slurm_job_modify(request, job, self.lua.table(), uid)
        return request


@pytest.fixture(params=[lua51, lua54], ids=["lua5.1", "lua5.4"])
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Slurm:
    return Slurm(tmp_path, request.param)


def options(job: Any) -> dict[str, Any]:
    return json.loads(job.comment)["cadenza"]


@pytest.mark.parametrize("flag", ["", "(null)", "share", "share=yes"])
def test_a_bare_flag_opts_in(slurm: Slurm, flag: str) -> None:
    job = slurm.submit(flag)
    assert job.rc == SUCCESS
    assert job.comment == '{"cadenza":{"v":1,"share":true}}'


def test_every_key_arrives_in_the_comment(slurm: Slurm) -> None:
    job = slurm.submit("min_gpus=1,max_gpus=4,batch=per-gpu,model=res18,priority=-3,iterations=900,duration_s=60,late,"
                       "checkpoints=no")  # fmt: skip
    assert options(job) == {
        "v": 1, "share": True, "late": True, "checkpoints": False, "min_gpus": 1, "max_gpus": 4, "batch": "per-gpu",
        "model": "res18", "priority": -3, "iterations": 900, "duration_s": 60,
    }  # fmt: skip


def test_the_environment_is_the_flags_twin_and_the_flag_wins(slurm: Slurm) -> None:
    assert options(slurm.submit(environment={"CADENZA": "max_gpus=2"}))["max_gpus"] == 2
    assert options(slurm.submit("max_gpus=4", environment={"CADENZA": "max_gpus=2"}))["max_gpus"] == 4
    assert slurm.submit("off", environment={"CADENZA": "share"}).comment is None


def test_an_interactive_jobs_environment_is_not_asked_for(slurm: Slurm) -> None:
    assert slurm.submit(script=None, environment={"CADENZA": "share"}).comment is None


def test_plain_text_moves_beside_the_options(slurm: Slurm) -> None:
    job = slurm.submit("", comment='run "7" of \\ Ünïcode\n')
    assert json.loads(job.comment) == {
        "comment": 'run "7" of \\ Ünïcode\n',
        "cadenza": {"v": 1, "share": True},
    }


def test_text_that_is_no_utf8_becomes_json_all_the_same(slurm: Slurm) -> None:
    job = slurm.submit("", comment=b"caf\xe9")
    assert json.loads(job.comment)["comment"] == "café"


@pytest.mark.parametrize("comment", [None, "", "a note", "[1,2]", '{"APS":{"x":1}}', '{"half', "42", "about cadenza"])
def test_a_job_without_options_keeps_its_comment(slurm: Slurm, comment: str | None) -> None:
    job = slurm.submit(comment=comment) if comment is not None else slurm.submit()
    assert job.rc == SUCCESS
    assert job.comment == comment
    assert not slurm.said


def test_a_comment_opts_in_without_the_plugin(slurm: Slurm) -> None:
    job = slurm.submit(comment='{"cadenza": {"model": "gpt2"}}')
    assert options(job) == {"v": 1, "share": True, "model": "gpt2"}


def test_flag_and_comment_are_merged(slurm: Slurm) -> None:
    job = slurm.submit("max_gpus=4", comment='{"a":1e400, "cadenza" : {"min_gpus":2,"share":false}, "b":"\\u00e9"}')
    assert job.comment == ('{"cadenza":{"v":1,"share":true,"min_gpus":2,"max_gpus":4},"a":1e400,"b":"\\u00e9"}'), (
        "our key comes first, the others keep their bytes"
    )


def test_held_and_why_cannot_be_claimed(slurm: Slurm) -> None:
    assert options(slurm.submit(comment='{"cadenza":{"held":true,"why":"x"}}')) == {"v": 1, "share": True}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("foo=1", "unknown key 'foo'"),
        ("share,foo", "unknown key 'foo'"),
        ("share=maybe", "share must be true or false"),
        ("late=1", "late must be true or false"),
        ("checkpoints=1", "checkpoints must be true or false"),
        ("batch=all", "batch must be global or per-gpu"),
        ("batch=4", "batch must be global or per-gpu"),
        ("min_gpus=0", "min_gpus must be a number"),
        ("min_gpus=0x10", "min_gpus must be a number"),
        ("max_gpus", "max_gpus must be a number"),
        ("max_gpus=1.5", "max_gpus must be a number"),
        ("min_gpus=3,max_gpus=2", "min_gpus=3 is more than max_gpus=2"),
        ('model=a"b', "model must be"),
        ("model=" + "a" * 65, "model must be"),
        ("held=true", "held"),
        ("share,", "unknown key ''"),
        ("off,share", "unknown key 'off'"),
    ],
)
def test_a_bad_flag_is_refused_by_name(slurm: Slurm, flag: str, message: str) -> None:
    assert slurm.submit(flag).rc == ERROR
    assert message in slurm.said[0]
    assert slurm.said[0].startswith("cadenza: --cadenza=")


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ('{"cadenza":true}', "must be an object"),
        ('{"cadenza":[1]}', "must be an object"),
        ('{"cadenza":{"share":"yes"}}', "share must be true or false"),
        ('{"cadenza":{"min_gpus":1.0}}', "min_gpus must be a number"),
        ('{"cadenza":{"nice":1}}', "unknown key 'nice'"),
        ('{"cadenza":{"v":2}}', "v must be 1"),
        ('{"cadenza":{"model":null}}', "model must be"),
        ('{"cadenza":{"share":true}', "is not JSON"),
        ('{"c\\u0061denza":{},"x":' + "[" * 80 + '"cadenza"' + "]" * 80 + "}", "is not JSON"),
        ('{"cadenza":{},"c\\u0061denza":{"share":false}}', "two cadenza keys"),
        ('{"cadenza":{},"cadenza":{}}', "two cadenza keys"),
    ],
)
def test_a_bad_comment_is_refused_with_a_reason(slurm: Slurm, comment: str, message: str) -> None:
    job = slurm.submit(comment=comment)
    assert job.rc == ERROR
    assert message in slurm.said[0]
    assert job.comment == comment


def test_a_merged_comment_has_to_fit(slurm: Slurm) -> None:
    assert slurm.submit("", comment="x" * 1000).rc == ERROR
    assert "of Slurm's 1024" in slurm.said[0]


def test_without_settings_nothing_but_the_comment_changes(slurm: Slurm) -> None:
    job = slurm.submit("", min_nodes=2, max_nodes=2)
    assert options(job)["share"]
    assert (job.features, job.priority) == (None, NO_VAL)
    assert slurm.submit(features="fast").features == "fast"


def test_jobs_that_do_not_share_see_lane_0_only(slurm: Slurm) -> None:
    slurm.manage()
    assert slurm.submit().features == "lane0"
    assert slurm.submit(partition=None).features == "lane0"
    assert slurm.submit(features="fast&big").features == "fast&big&lane0"
    assert slurm.submit(features="fast|big").features == "(fast|big)&lane0"
    assert slurm.submit(features="(fast|big)&new").features == "(fast|big)&new&lane0"
    assert slurm.submit(features="new&lane0").features == "new&lane0"
    assert slurm.submit(features="fastlane1").features == "fastlane1&lane0", "no lane"
    assert slurm.submit(prefer="fast").prefer == "fast&lane0", "Slurm tries it before the constraint"
    assert slurm.submit(partition="cpu").features is None
    assert slurm.submit(partition="cpu", features="lane1").features == "lane1"
    assert slurm.submit("off").features == "lane0"


OTHER_LANES = (
    "lane1", "(lane1)", "[lane0|lane1]", "lane0|lane1", "lane0&lane1", "fast&(lane0|lane1)", "lane1*2", "lane0|fast",
    "[a|b]", "a*2", "[a*2&b*1]", "(a&b)|c",
)  # fmt: skip


@pytest.mark.parametrize("features", OTHER_LANES)
@pytest.mark.parametrize("flag", [None, "off"])
def test_a_job_that_does_not_share_cannot_leave_lane_0(slurm: Slurm, flag: str | None, features: str) -> None:
    slurm.manage()
    for field in ("features", "prefer"):
        said = len(slurm.said)
        assert slurm.submit(flag, **{field: features}).rc == ERROR
        assert f"its constraint '{features}' cannot be combined with lane0" in slurm.said[said]
    slurm.manage("partitions=gpu\nlanes=1\n")
    assert slurm.submit(flag, features=features).features == features, "one lane is all there is"


def test_hosts_with_one_lane_need_no_feature(slurm: Slurm) -> None:
    slurm.manage("partitions=gpu\nlanes=1\n")
    assert not slurm.submit().features
    assert not slurm.submit("", min_nodes=2, max_nodes=2).features
    assert not slurm.submit("", script=None).features


@pytest.mark.parametrize("features", ["lane0|lane1", "(lane0|lane1)", "[lane1|lane2]", "lane1*2"])
def test_a_job_of_several_nodes_cannot_span_lanes(slurm: Slurm, features: str) -> None:
    slurm.manage()
    assert slurm.submit("", min_nodes=2, max_nodes=2, features=features).rc == ERROR
    assert "cannot be combined" in slurm.said[0]
    assert slurm.submit("", features=features).features == features, "one node is on one lane"
    assert slurm.submit("", min_nodes=2, max_nodes=2, features="fast&lane1").features == "fast&lane1"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_nodes": 2, "max_nodes": 2},
        {"min_nodes": 1, "max_nodes": 4},
        {"min_nodes": NO_VAL, "max_nodes": NO_VAL, "tres_per_job": "gres/gpu:8"},
        {"min_nodes": NO_VAL, "max_nodes": NO_VAL, "num_tasks": 8},
    ],
)
def test_a_managed_job_that_may_get_several_nodes_is_pinned_to_one_lane(slurm: Slurm, fields: dict[str, Any]) -> None:
    slurm.manage("# lanes of every host\npartitions = gpu , long\nlanes = 3\n")
    assert slurm.submit("", **fields).features == "[lane0|lane1|lane2]"
    assert slurm.submit("", features="fast", **fields).features == "fast&[lane0|lane1|lane2]"
    assert slurm.submit("", prefer="fast", **fields).prefer == "fast&[lane0|lane1|lane2]"


def test_a_managed_job_of_one_node_may_run_in_any_lane(slurm: Slurm) -> None:
    slurm.manage()
    assert slurm.submit("").features is None
    assert slurm.submit("", max_nodes=NO_VAL, min_nodes=NO_VAL).features is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"het_job_offset": 0}, "heterogeneous"),
        ({"cron_job": True}, "cron"),
        ({"shared": 0}, "--exclusive"),
        ({"tres_per_node": None}, "no GPUs"),
        ({"partition": "gpu,cpu"}, "several partitions"),
        ({"min_nodes": 2, "max_nodes": 2, "features": "a|b"}, "cannot be combined"),
    ],
)
def test_what_cannot_be_shared_is_left_alone_with_the_reason(slurm: Slurm, fields: dict[str, Any], why: str) -> None:
    slurm.manage()
    job = slurm.submit("max_gpus=2", comment="mine", **fields)
    assert job.rc == SUCCESS
    assert json.loads(job.comment)["comment"] == "mine"
    assert options(job)["share"] is False
    assert why in options(job)["why"]
    assert job.priority == NO_VAL
    assert why in slurm.said[0]
    assert any(why in line for line in slurm.log)


def test_a_job_that_opts_in_is_told_at_once_that_it_may_make_way(slurm: Slurm) -> None:
    slurm.manage()
    slurm.submit("")
    (line,) = slurm.said
    assert line.startswith("cadenza: ")
    assert "may make way" in line
    assert "cadenza why JOBID" in line
    assert not any(character.isdigit() for character in line), "a script might take it for the job's number"


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        (None, {}), ("off", {}), ("checkpoints=no", {}), ("", {"script": None}), ("", {"requeue": 0}),
        ("", {"partition": "cpu"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_never_makes_way_is_told_nothing(slurm: Slurm, flag: str | None, fields: dict[str, Any]) -> None:
    slurm.manage()
    assert slurm.submit(flag, **fields).rc == SUCCESS
    assert slurm.said == []


def test_several_managed_partitions_are_fine(slurm: Slurm) -> None:
    slurm.manage("partitions=gpu,cpu")
    assert options(slurm.submit("", partition="gpu,cpu"))["share"]


@pytest.mark.parametrize(
    "fields", [{}, {"begin_time": 9}, {"dependency": "afterok:7"}, {"req_nodes": "node2"}], ids=str
)
@pytest.mark.parametrize("priority", [0, 7, NO_VAL])
def test_slurm_starts_every_job_that_its_owner_does_not_hold(
    slurm: Slurm, fields: dict[str, Any], priority: int
) -> None:
    slurm.manage()
    for flag in ("", None):
        job = slurm.submit(flag, priority=priority, admin_comment="ticket 7", **fields)
        assert (job.priority, job.admin_comment, job.site_factor) == (priority, "ticket 7", None)


def test_an_error_in_here_fails_no_submission(slurm: Slurm) -> None:
    slurm.lua.globals().cadenza.settings_file = slurm.lua.table()
    assert slurm.submit("", comment="kept").comment == "kept"
    assert "is not changed" in slurm.log[0]


# --- Updates -------------------------------------------------------------------------------------------

SHARES = '{"cadenza":{"v":1,"share":true}}'


def test_updates_by_others_than_the_owner_pass(slurm: Slurm) -> None:
    slurm.manage()
    assert slurm.update({"comment": "{cadenza", "features": "lane1"}, uid=0).rc == SUCCESS
    assert slurm.lua.globals().slurm_job_modify(None, None, None, 0) == SUCCESS, "an error in here"


def test_an_owners_comment_has_the_one_form_and_claims_nothing(slurm: Slurm) -> None:
    job = slurm.update({"comment": '{"x":1, "cadenza":{"held":true,"why":"x","priority":2,"share":true}}'})
    assert (job.rc, job.comment) == (SUCCESS, '{"cadenza":{"v":1,"share":true,"priority":2},"x":1}')
    assert slurm.update({"comment": "my own text"}).comment == "my own text"
    left = slurm.update({"comment": "my own text"}, comment=SHARES).comment
    assert left == '{"cadenza":{"v":1,"share":false},"comment":"my own text"}', "else the plugin would go by the flag"
    assert slurm.update({"comment": '{"cadenza":{"nice":1}}'}).rc == ERROR
    assert "unknown key 'nice'" in slurm.said[-1]


@pytest.mark.parametrize("comment", ["mine", '{"cadenza":{"share":false}}', ""])
def test_who_stops_sharing_before_the_start_stays_on_lane_0(slurm: Slurm, comment: str) -> None:
    slurm.manage()
    assert slurm.update({"comment": comment}, comment=SHARES).features == "lane0"
    assert slurm.update({"comment": comment}, comment=SHARES, features="a&[lane0|lane1]").features == "a&lane0"
    assert slurm.update({"comment": comment}, comment=SHARES, features="[a|b]").rc == ERROR
    assert slurm.update({"comment": comment}, comment=SHARES, job_state=1).features is None, "it runs"
    assert slurm.update({"comment": comment}, comment=SHARES, partition="cpu").features is None


@pytest.mark.parametrize("features", OTHER_LANES)
def test_an_update_of_the_constraint_keeps_to_the_rules(slurm: Slurm, features: str) -> None:
    slurm.manage()
    assert slurm.update({"features": features}, features="lane0").rc == ERROR
    assert slurm.update({"prefer": features}, features="lane0").rc == ERROR
    assert slurm.update({"features": "fast"}, features="lane0").features == "fast&lane0"
    assert slurm.update({"features": ""}, features="lane0").features == "lane0"
    assert slurm.update({"partition": "gpu"}, partition="cpu").features == "lane0"
    assert slurm.update({"features": features}, comment=SHARES).rc == SUCCESS, "one node, and it shares"


def test_a_job_of_several_nodes_stays_on_one_lane(slurm: Slurm) -> None:
    slurm.manage()
    pinned = {"comment": SHARES, "features": "[lane0|lane1]"}
    assert slurm.update({"features": "fast"}, **pinned).features == "fast&[lane0|lane1]"
    assert slurm.update({"features": "lane0|lane1"}, **pinned).rc == ERROR
    assert slurm.update({"min_nodes": 2, "max_nodes": 2}, comment=SHARES).features == "[lane0|lane1]"
    assert slurm.update({"comment": SHARES}, **pinned).features is None


def test_settings_that_are_not_understood_are_named(slurm: Slurm) -> None:
    slurm.manage("partitons=gpu\n")
    assert slurm.submit().features is None
    assert "partitons=gpu" in slurm.log[0]


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
foreign = st.dictionaries(
    st.text(string.ascii_letters, max_size=6).filter(lambda key: key != "cadenza"), values, max_size=3
)


@pytest.fixture(scope="module", params=[lua51, lua54], ids=["lua5.1", "lua5.4"])
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Slurm:
    return Slurm(tmp_path_factory.mktemp("lua"), request.param)


@given(foreign=foreign, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_foreign_keys_survive_the_merge(
    shared: Slurm,
    foreign: dict[str, Any],
    indent: int | None,
    ascii_only: bool,
) -> None:
    text = json.dumps(foreign, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    job = shared.submit("max_gpus=2", comment=text)
    if job.rc == ERROR:
        assert len(text) > 900
    else:
        assert json.loads(job.comment) == foreign | {"cadenza": {"v": 1, "share": True, "max_gpus": 2}}


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_any_text_comes_back_from_the_merge(shared: Slurm, text: str) -> None:
    assume(not text.lstrip().startswith("{"))
    job = shared.submit("", comment=text)
    assert json.loads(job.comment) == {"comment": text, "cadenza": {"v": 1, "share": True}}


@given(text=st.text('{}[]":,\\ue0+-.12 tfn', max_size=30))
def test_the_reader_agrees_with_pythons(shared: Slurm, text: str) -> None:
    try:
        python = json.loads(text)
    except ValueError:
        python = None
    job = shared.submit("", comment=text)
    assert json.loads(job.comment).get("comment", None if isinstance(python, dict) else "") == (
        python.get("comment") if isinstance(python, dict) else text
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_at_a_terminal_starts_in_lane_0_unless_it_names_another(slurm: Slurm, nodes: int) -> None:
    slurm.manage()
    assert slurm.submit("", script=None, max_nodes=nodes).features == "lane0"
    assert slurm.submit("", script=None, max_nodes=nodes, features="a100").features == "a100&lane0"
    assert slurm.submit("", script=None, max_nodes=nodes, features="lane1").features == "lane1"
