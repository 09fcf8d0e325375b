"""cadenza plan: the lines of a site, their check, and what is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.cli.site.leftovers import in_slurm, in_slurms_files, on_this_machine, plugins
from cadenza.slurm_plugin.cli.site.plan_command import missing_files, toml, with_includes
from cadenza.slurm_plugin.gateway.slurm_gateway import parse
from cadenza.slurm_plugin.service.settings import Settings
from cadenza.slurm_plugin.site.lane_plan import (
    LANE_RULES,
    LanePlan,
    SlurmNode,
    decode_nodes,
    lacking,
    names_in,
    plan_lanes,
)

RECORDED = (Path(__file__).parent / "scontrol_node_26_05.json").read_text()
PLAIN = {
    "AccountingStorageTRES": "cpu,mem,energy,node,billing,fs/disk,vmem,pages",
    "AuthType": "auth/munge",
    "GresTypes": "gpu",
    "JobRequeue": "1",
    "JobSubmitPlugins": "(null)",
    "PreemptMode": "OFF",
    "PreemptParameters": "(null)",
    "PrioritySiteFactorPlugin": "(null)",
    "PriorityType": "priority/multifactor",
    "PriorityWeightAge": "0",
    "PriorityWeightTRES": "(null)",
    "PrologFlags": "(null)",
    "SchedulerParameters": "bf_interval=30",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CORE",
    "SlurmctldHost[0]": "ctl(10.0.0.1)",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SLURM_VERSION": "26.05.5",
}


SHAPE = "CPUs=64 Sockets=2 CoresPerSocket=16 ThreadsPerCore=2 RealMemory=250000 Gres=gpu:a100:8"


def plain(name: str = "gpu1", **changes: Any) -> SlurmNode:
    node = SlurmNode(
        name, 64, 500_001, hostname=name, address=name, port=6818, sockets=2, cores=16, threads=2, weight=10,
        features=("a100",), gres="gpu:a100:8(S:0-1)", partitions=("shared",),
    )  # fmt: skip
    return msgspec.structs.replace(node, **changes)


def plan(nodes: Iterable[SlurmNode], config: dict[str, str] | None = None, **changes: Any) -> LanePlan:
    given_ = {"managed": ("shared",), "lanes": 2, "chosen": (), **changes}
    return plan_lanes(tuple(nodes), PLAIN if config is None else config, **given_)


def test_the_weight_of_a_lane_is_one_that_slurm_takes() -> None:
    assert [node.weight for node in plan([plain(weight=2**32 - 20)]).nodes] == [2**32 - 20, 2**32 - 16]


def test_with_full_memory_each_lane_has_what_lane_0_has() -> None:
    assert [node.real_memory for node in plan([plain()], full_memory=True).nodes] == [500_001, 500_001]
    assert [node.real_memory for node in plan([plain()]).nodes] == [250_000, 250_000]


def applied(one: LanePlan, others: Iterable[SlurmNode] = ()) -> tuple[SlurmNode, ...]:
    """Return Slurm's nodes once the lines of a plan are in force."""
    return (*one.nodes, *others)


def config_with(one: LanePlan) -> dict[str, str]:
    return {**PLAIN, **one.settings}


def test_the_lines_of_a_host_with_sockets_and_the_settings_that_it_lacks() -> None:
    assert plan([plain()]).slurm_conf() == [
        "# PartitionName=shared needs Nodes=gpu1,gpu1-l1",
        f"NodeName=gpu1 Port=6818 {SHAPE} Feature=a100,lane0 Weight=10",
        f"NodeName=gpu1-l1 NodeHostname=gpu1 NodeAddr=gpu1 Port=6831 {SHAPE} Feature=a100,lane1 Weight=110",
        "SelectTypeParameters=CR_CORE_MEMORY",
        "AccountingStorageTRES=cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu",
        "JobSubmitPlugins=lua",
        "SchedulerParameters=bf_interval=30,requeue_delay=0,batch_sched_delay=0",
        "PreemptParameters=suspend_grace_time=0",
        "PrologFlags=Alloc,Contain",
        "SlurmdSpoolDir=/var/spool/slurmd.%n",
        "SlurmdPidFile=/run/slurmd.%n.pid",
    ]


@pytest.mark.parametrize(
    ("present", "line"),
    [
        ({"AuthType": "auth/slurm", "AuthInfo": "(null)"}, "AuthInfo=disable_sack"),
        ({"AuthType": "auth/slurm", "AuthInfo": "use_client_ids"}, "AuthInfo=use_client_ids,disable_sack"),
        ({"PrologFlags": "X11,Contain"}, "PrologFlags=X11,Contain,Alloc"),
        ({"SelectTypeParameters": "CR_CPU,CR_LLN"}, "SelectTypeParameters=CR_CPU_MEMORY,CR_LLN"),
        ({"SelectTypeParameters": "NONE"}, "SelectTypeParameters=CR_CPU_Memory"),
        ({"GresTypes": "mps"}, "GresTypes=mps,gpu"),
    ],
)
def test_a_setting_keeps_what_the_site_has_in_it(present: dict[str, str], line: str) -> None:
    assert line in plan([plain()], {**PLAIN, **present}).slurm_conf()


def test_preemption_by_suspends_is_the_sites_to_change() -> None:
    one = plan([plain()], {**PLAIN, "PreemptMode": "SUSPEND,GANG"})
    assert "PreemptMode" not in one.settings
    (said,) = (line for line in one.slurm_conf() if "PreemptMode" in line)
    assert said.startswith("# PreemptMode is yours to change")
    assert [found.about for found in lacking(one, one.nodes) if not found.advice and found.level != "OK"] == [
        "PreemptMode"
    ]


def test_older_releases_lack_requeue_delay() -> None:
    parameters = plan([plain()], {**PLAIN, "SLURM_VERSION": "24.11.5"}).settings["SchedulerParameters"]
    assert parameters == "bf_interval=30,batch_sched_delay=0"


@given(
    st.integers(2, 8),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(["CR_CORE", "CR_CPU_Memory", "NONE", ""]),
)
def test_the_plan_of_a_finished_site_is_the_site(lanes: int, memories: list[int], flat: bool, select: str) -> None:
    shape = {"sockets": 64, "cores": 1, "threads": 1} if flat else {}
    nodes = [plain(f"gpu{at}", real_memory=8 + mb, **shape) for at, mb in enumerate(memories)]
    config = {**PLAIN, "SelectTypeParameters": select}
    first = plan(nodes, config, lanes=lanes)
    assert [found.level for found in lacking(first, nodes)].count("FAIL") > len(nodes)
    site = applied(first)
    again = plan(site, {**config, **first.settings}, lanes=lanes)
    assert (again.nodes, again.settings) == (first.nodes, {})
    assert {found.level for found in lacking(again, site)} == {"OK"}
    for node in nodes:
        own = [lane for lane in first.nodes if lane.host == node.name]
        assert sum(lane.real_memory for lane in own) <= node.real_memory
        assert len({lane.port for lane in own}) == lanes


def test_the_check_names_what_was_changed_afterwards() -> None:
    first = plan([plain()])
    site = [msgspec.structs.replace(node, gres="gpu:a100:4") if node.lane else node for node in applied(first)]
    again = plan(site, config_with(first))
    (found,) = [found for found in lacking(again, site) if found.level == "FAIL"]
    assert (found.about, found.observation) == ("gpu1-l1", "Gres: not as planned")
    outside = [msgspec.structs.replace(node, partitions=()) if node.lane else node for node in applied(first)]
    (found,) = [found for found in lacking(plan(outside, config_with(first)), outside) if found.level == "FAIL"]
    assert (found.about, found.advice) == ("partition shared", "Nodes=gpu1,gpu1-l1")


def test_a_lane_that_lacks_a_word_is_named() -> None:
    first = plan([plain(temporary_disk=9)])
    site = [msgspec.structs.replace(node, temporary_disk=9 * (not node.lane)) for node in first.nodes]
    (found,) = [found for found in lacking(plan(site, config_with(first)), site) if found.level == "FAIL"]
    assert (found.about, found.observation) == ("gpu1-l1", "TmpDisk: not as planned")


def test_no_two_lanes_have_one_port() -> None:
    assert [node.port for node in plan([plain(port=6831)], lanes=3).nodes] == [6831, 6832, 6833]


def test_unequal_parts_of_the_memory_are_the_sites_choice() -> None:
    first = plan([plain()])
    site = [msgspec.structs.replace(node, real_memory=100_000 + node.lane) for node in first.nodes]
    assert [node.real_memory for node in plan(site, config_with(first)).nodes] == [100_000, 100_001]


def test_nodes_without_gpus_stay_in_the_partition_as_they_are() -> None:
    nodes = [plain(), plain("cpu1", gres=""), plain("gpu2")]
    assert plan(nodes, chosen=["gpu2"]).members == {"shared": ("gpu1", "cpu1", "gpu2", "gpu2-l1")}
    assert [node.name for node in plan(nodes).nodes] == ["gpu1", "gpu1-l1", "gpu2", "gpu2-l1"]


@pytest.mark.parametrize(
    ("node", "changes", "said"),
    [
        (plain(partitions=("shared", "long")), {}, "gpu1 is in the partition long"),
        (plain(), {"managed": ("none",)}, "partition 'none'"),
        (plain(), {"chosen": ["gpu7"]}, "no node 'gpu7'"),
        (plain(gres=""), {}, "no nodes with GPUs"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(node: SlurmNode, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan([node], **changes)


def test_a_partition_more_makes_the_host_possible() -> None:
    one = plan([plain(partitions=("shared", "long"))], managed=("shared", "long"))
    assert set(one.members) == {"shared", "long"}
    assert one.lua_conf() == ["partitions=shared,long", "lanes=2"]


@pytest.mark.parametrize(
    ("present", "lines"),
    [
        ("Name=gpu Type=a100 File=/dev/nvidia[0-7]\n", []),
        ("AutoDetect=nvml\n", []),
        ("", []),
        (
            "NodeName=gpu[1-2] Name=gpu File=/dev/nvidia[0-7] # ours\nNodeName=cpu1 Name=fpga\n",
            ["NodeName=gpu1-l1,gpu2-l1 Name=gpu File=/dev/nvidia[0-7]"],
        ),
        ("NodeName=gpu[1-2],gpu[1-2]-l1 Name=gpu File=/dev/nvidia[0-7]\n", []),
        (
            "NodeName=gpu1 Name=gpu File=/dev/a\nNodeName=gpu2 Name=gpu File=/dev/b\n",
            ["NodeName=gpu1-l1 Name=gpu File=/dev/a", "NodeName=gpu2-l1 Name=gpu File=/dev/b"],
        ),
        ("NodeName=gpu1 \\\n  Name=gpu File=/dev/a\n", ["NodeName=gpu1-l1 Name=gpu File=/dev/a"]),
        ('NodeName = "gpu[1-2]"\tAutoDetect = nvml\n', ["NodeName=gpu1-l1,gpu2-l1 AutoDetect=nvml"]),
        ('nodename=gpu1 Name=gpu File="/dev/a b"', ['NodeName=gpu1-l1 Name=gpu File="/dev/a b"']),
    ],
)
def test_gres_lines_are_needed_where_the_sites_name_nodes(present: str, lines: list[str]) -> None:
    assert list(plan([plain(), plain("gpu2")]).gres_conf(present)) == lines


def test_further_partitions_of_a_host_matter_with_further_lanes_only_and_are_named_at_once() -> None:
    """With one lane nothing forbids them: a job of another partition is a job that did not opt in."""
    hosts = [plain(partitions=("shared", "all")), plain("gpu2", partitions=("shared", "all", "debug"))]
    assert plan(hosts, lanes=1).hosts == ["gpu1", "gpu2"]
    message = r"gpu1, gpu2 are in the partitions all, debug, which .* give --partition all --partition debug too"
    with pytest.raises(InputError, match=message):
        plan(hosts)


def test_the_recorded_answer_of_slurm_is_a_finished_site() -> None:
    nodes, _ = decode_nodes(RECORDED)
    one = plan(nodes, {**PLAIN, **{key: "%n" for _, key, *_ in LANE_RULES[1:]}})
    assert [found.about for found in lacking(one, nodes) if found.level == "FAIL"] == list(one.settings)
    assert one.hosts == ["node1", "node2"]


@given(
    st.dictionaries(
        st.sampled_from(SlurmNode.__struct_fields__),
        st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text())),
    )
)
def test_an_answer_of_another_kind_is_refused_or_fits_into_one_line(row: dict[str, Any]) -> None:
    nodes, refused = decode_nodes(json.dumps({"nodes": [{"name": "n", "cpus": 1, "real_memory": 1, **row}]}))
    if refused or nodes[0].unwritable():
        return
    (node,) = nodes
    line = " ".join(f"{key}={value}" for key, value in node.settings().items())
    assert line.isprintable()
    assert "#" not in line
    assert len(line.split()) == len(node.settings())


@pytest.mark.parametrize(
    "row",
    [
        {"features": ["a b"]}, {"features": ["a,b"]}, {"features": ["a\nNodeName=b"]},
        {"gres": "gpu:1(S:0 State=DOWN)"},
        {"address": "a#b"}, {"name": "n\n"}, {"hostname": "a b"}, {"specialized_cpus": "0 x"}, {"name": "a;b"},
        {"cpus": 0}, {"port": -1}, {"real_memory": 2**60},
    ],
)  # fmt: skip
def test_a_word_that_is_more_than_a_word_of_slurm_conf_is_refused(row: dict[str, Any]) -> None:
    """A node that is not planned may have it: a site's nodes without GPUs have features of all kinds."""
    odd = {"name": "n", "cpus": 1, "real_memory": 1, "gres": "gpu:1", "partitions": ["shared"], **row}
    good = {"name": "m", "cpus": 8, "real_memory": 1, "gres": "gpu:1", "partitions": ["shared"]}
    nodes, refused = decode_nodes(json.dumps({"nodes": [odd, good]}))
    assert plan([node for node in nodes if node.name == "m"]).hosts == ["m"]
    if not refused:
        with pytest.raises(InputError, match=r"node '.*': Slurm's files cannot hold its "):
            plan(nodes)


@pytest.mark.parametrize("text", ["gpu[", "gpu1]", "", "gpu[1-99999999]", "gpu[2-x]"])
def test_a_list_of_nodes_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        names_in(text)


def test_the_service_is_where_slurmctld_is() -> None:
    assert 'service = "tcp://ctl:6850"' in toml(("shared",), PLAIN)


# --- on a machine ----------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line on a machine whose scontrol answers for a plain site, with its own folders."""
    folder = tmp_path / "bin"
    folder.mkdir()
    config = {**PLAIN, "SLURM_CONF": f"{tmp_path}/slurm/slurm.conf", "PluginDir": f"{tmp_path}/plugins"}
    (folder / "config").write_text("".join(f"{key:24}= {value}\n" for key, value in config.items()))
    recorded = json.loads(RECORDED)
    recorded["nodes"] = [{**node, "features": []} for node in recorded["nodes"] if not node["name"].endswith("-l1")]
    (folder / "nodes").write_text(json.dumps(recorded))
    (folder / "scontrol").write_text(
        f'#!/bin/sh\ncase "$2" in config) exec cat {folder}/config;; esac\nexec cat {folder}/nodes\n'
    )
    (folder / "scontrol").chmod(0o755)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "cadenza.toml").write_text("")
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, [*words, "--config", str(tmp_path / "cadenza.toml")])

    return run


def test_setup_prints_all_files_or_one(command: Callable[..., Result]) -> None:
    words = ("plan", "--partition", "shared", "--lanes", "2")
    whole, one = command(*words), command(*words, "--file", "lua.conf")
    assert (whole.exit_code, one.exit_code, one.output) == (0, 0, "partitions=shared\nlanes=2\n")
    assert "node1: systemctl disable --now slurmd; systemctl enable --now slurmd@node1 slurmd@node1-l1" in whole.output
    files = json.loads(command(*words, "--json").output)["files"]
    assert all(line in whole.output for lines in files.values() for line in lines)
    assert command(*words, "--file", "gres.conf").output == ""


@pytest.mark.parametrize(
    ("slurm", "own", "lines"),
    [
        ({}, "", ["PriorityWeightAge=1000", "PriorityWeightPartition=10000"]),
        ({"PriorityWeightAge": "7"}, "", ["PriorityWeightPartition=10000"]),
        ({"PriorityWeightAge": "7", "PriorityWeightFairShare": "9"}, "", []),
        ({}, '[policy]\nshare = "timeslice"\n', []),
        ({"PriorityType": "priority/basic"}, "", ["# PriorityType is yours to change"]),
    ],
    ids=str,
)
def test_setup_proposes_the_weights_by_which_jobs_can_make_way(
    command: Callable[..., Result], tmp_path: Path, slurm: dict[str, str], own: str, lines: list[str]
) -> None:
    config = (tmp_path / "bin" / "config").read_text()
    (tmp_path / "bin" / "config").write_text(config + "".join(f"{key} = {value}\n" for key, value in slurm.items()))
    (tmp_path / "cadenza.toml").write_text(own)
    said = command("plan", "--partition", "shared", "--file", "cadenza.conf").output.splitlines()
    assert [line.partition(":")[0] for line in said if "Priority" in line] == lines
    done = command("plan", "--partition", "shared", "--check", "--json")
    failed = [
        row["about"] for row in json.loads(done.stdout)["rows"] if row["level"] == "FAIL" and "Prio" in row["about"]
    ]
    assert len(failed) == len(lines)


def test_one_lane_is_the_hosts_as_they_are(command: Callable[..., Result], tmp_path: Path) -> None:
    """No line of a node changes, no path of slurmd, and no host is drained."""
    said = command("plan", "--partition", "shared").output
    assert "lanes=1" in said
    assert "PrologFlags=Alloc,Contain" in said
    assert not [word for word in ("NodeName", "SlurmdSpoolDir", "SlurmdPidFile", "drain", "slurmd@") if word in said]
    done = command("plan", "--partition", "shared", "--check", "--json")
    found = {row["about"].rpartition("/")[2]: row["level"] for row in json.loads(done.stdout)["rows"]}
    assert [found[name] for name in ("node1", "node2", "partition shared", "lua.conf")] == ["OK", "OK", "OK", "FAIL"]
    (tmp_path / "bin" / "nodes").write_text(RECORDED)
    assert command("plan", "--partition", "shared", "--file", "lua.conf").output.endswith("lanes=2\n"), "as Slurm has"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--partition", "none"), "partition 'none'"),
        (("--partition", "shared", "node[1-"), "no list of nodes"),
        (("--partition", "shared", "node7"), "no node 'node7'"),
        (("--partition", "shared", "--lanes", "0"), "1<=x<=8"),
        (("--partition", "shared", "--file", "lua.conf", "--check"), "without --check"),
        ((), "--partition"),
    ],
)
def test_bad_input_ends_with_2(command: Callable[..., Result], words: tuple[str, ...], said: str) -> None:
    done = command("plan", *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_an_answer_that_is_not_slurms_is_named(command: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bin" / "nodes").write_text('{"nodes": 5}')
    # What else is left on the machine is listed all the same.
    for code, words in ((2, ("plan", "--partition", "shared")), (3, ("plan", "--remove"))):
        done = command(*words)
        assert (done.exit_code, "scontrol show node --json" in done.stderr) == (code, True)


def test_nodes_that_are_not_planned_may_have_what_no_line_can_hold(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    recorded = json.loads((tmp_path / "bin" / "nodes").read_text())
    cloud = {"name": "c1", "cpus": 0, "features": ["shape=c2;60"], "weight": 4294967280, "partitions": ["cpu"]}
    gpu = {**recorded["nodes"][0], "partitions": ["shared", "all"], "features": ["shape=a2-highgpu", "ad=None"]}
    nodes = [gpu, cloud, {"name": "c2", "cpus": "many"}]
    (tmp_path / "bin" / "nodes").write_text(json.dumps({"nodes": nodes}))
    (tmp_path / "slurm" / "gres.conf").write_text("Include more.conf\n")
    (tmp_path / "slurm" / "more.conf").write_text("NodeName=node1 \\\n Name=gpu File=/dev/nvidia[0-3]\n")
    one = command("plan", "--partition", "shared")
    assert one.exit_code == 0, one.stderr
    assert "1 nodes cannot be read: " in one.stderr
    assert "node1 is in the partition all, too" in one.stderr
    more = ("--partition", "all", "--lanes", "2")
    assert "Feature=shape=a2-highgpu,ad=None,lane1" in command("plan", "--partition", "shared", *more).stdout
    lines = command("plan", "--partition", "shared", *more, "--file", "gres.conf")
    assert lines.stdout == "NodeName=node1-l1 Name=gpu File=/dev/nvidia[0-3]\n"


def test_the_check_of_a_plain_site_fails_with_the_lines(command: Callable[..., Result]) -> None:
    done = command("plan", "--partition", "shared", "--lanes", "2", "--check", "--json")
    assert done.exit_code == 1
    failed = {
        row["about"].rpartition("/")[2]: row["advice"]
        for row in json.loads(done.stdout)["rows"]
        if row["level"] == "FAIL"
    }
    assert failed["node1-l1"].startswith("NodeName=node1-l1 NodeHostname=node1")
    assert {"PrologFlags", "partition shared", "job_submit.lua", "plugstack.conf", "lua.conf", "cadenza.toml"} <= set(
        failed
    )


def test_the_files_of_a_finished_site_are_found(tmp_path: Path) -> None:
    one = plan([plain()])
    (tmp_path / "plugstack.conf.d").mkdir()
    for name, text in (
        ("job_submit.lua", 'dofile("/usr/share/cadenza/job_submit.lua")'),
        ("plugstack.conf", f"include {tmp_path}/plugstack.conf.d/*.conf\n"),
        ("plugstack.conf.d/cadenza.conf", "optional cadenza.so\n"),
        ("lua.conf", "# ours\npartitions=shared\nlanes=2\n"),
        ("cadenza.toml", '[guard]\npartitions = ["shared"]\n[agent]\nservice = "tcp://ctl:6850"\n'),
    ):
        (tmp_path / name).write_text(text)
    assert {found.level for found in missing_files(one, tmp_path, tmp_path / "cadenza.toml")} == {"OK"}
    assert "optional cadenza.so" in with_includes(tmp_path / "plugstack.conf")
    (tmp_path / "plugstack.conf.d" / "cadenza.conf").unlink()
    (found,) = [one for one in missing_files(one, tmp_path, tmp_path / "cadenza.toml") if one.level == "FAIL"]
    assert found.observation == "it does not name cadenza.so"
    (tmp_path / "cadenza.toml").unlink()
    _, other = [one for one in missing_files(one, tmp_path, tmp_path / "cadenza.toml") if one.level == "FAIL"]
    assert other.advice == "cadenza plan --file cadenza.toml"


def test_leftovers_without_slurm_says_so(command: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    done = command("plan", "--remove", "--json")
    assert (done.exit_code, "no controller" in done.stderr) == (3, True)
    assert str(tmp_path) in done.stdout, "the folder with the settings"


def test_each_thing_that_is_left_is_listed(tmp_path: Path) -> None:
    nodes = plan([plain()]).nodes
    assert [one.left for one in in_slurm(nodes)] == ["lanes in Slurm: gpu1-l1", "Feature=lane0 in Slurm: gpu1"]
    assert list(in_slurm([plain()])) == []
    (tmp_path / "plugstack.conf.d").mkdir()
    files = {
        "slurm.conf": "NodeName=gpu1\nInclude /etc/slurm/cadenza.conf\n",
        "gres.conf": "NodeName=gpu[1-2]-l1 Name=gpu\n",
        "cgroup.conf": "CgroupPlugin=autodetect\n",
        "plugstack.conf.d/cadenza.conf": "optional cadenza.so\n",
        "topology.conf": "SwitchName=s NodeName=a[\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    named = [one.left.removeprefix(f"{tmp_path}/").partition(" ")[0] for one in in_slurms_files(tmp_path)]
    assert named == ["gres.conf:1", "slurm.conf:2", "plugstack.conf.d/cadenza.conf:1"]
    for name, target in (("job_submit.lua", "/usr/share/cadenza/gone.lua"), ("theirs.lua", "/nowhere/theirs.lua")):
        (tmp_path / name).symlink_to(target)
    (dangling,) = [one for one in in_slurms_files(tmp_path) if "is a link" in one.left]
    assert dangling.left == f"{tmp_path}/job_submit.lua is a link to /usr/share/cadenza/gone.lua, which is gone"
    (tmp_path / "cadenza.so").touch()
    assert [one.left for one in plugins(f"/none:{tmp_path}")] == [f"the plugin {tmp_path}/cadenza.so"]


def test_folders_and_units_that_are_left_are_listed(tmp_path: Path) -> None:
    units, own = tmp_path / "units", tmp_path / "own"
    units.mkdir()
    (units / "slurmd@.service").write_text("[Unit]\nAfter=cadenza-agent.service\n")
    (units / "slurmd.service").write_text("[Unit]\n")
    store = msgspec.structs.replace(Settings().service, store=f"{tmp_path}/state/cadenza.db")
    settings = msgspec.structs.replace(Settings(), service=store)

    def left() -> set[str]:
        return {one.left for one in on_this_machine(settings, own, units) if str(tmp_path) in one.left}

    assert left() == {f"the unit {units}/slurmd@.service"}
    own.mkdir()
    (tmp_path / "state").mkdir()
    assert left() == {f"the unit {units}/slurmd@.service", f"the folder {own}", f"the folder {tmp_path}/state"}


def test_what_scontrol_prints_is_what_the_tests_take_for_it() -> None:
    assert parse("SlurmctldHost[0]        = ctl(10.0.0.1)\n") == {"SlurmctldHost[0]": "ctl(10.0.0.1)"}
