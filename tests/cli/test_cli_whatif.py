"""whatif: the past from Slurm's own answers, what is left out, and the runs next to it."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.queue_rules import Qos, Tier, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.world import World
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.history.answer_file import read_answer
from cadenza.slurm_plugin.history.as_it_was import History, as_it_was, read_history
from cadenza.slurm_plugin.history.cluster_nodes import read_hosts, with_lanes
from cadenza.slurm_plugin.history.job_records import FIELDS, read_job_records
from cadenza.slurm_plugin.history.site_answers import SiteFacts, read_site
from cadenza.slurm_plugin.simulations import run_pool
from cadenza.slurm_plugin.simulations.run_pool import Task
from cadenza.slurm_plugin.simulations.runs import run_whatif

HERE = Path(__file__).resolve().parent
SACCT, SCONTROL = HERE / "sacct_26_05.json", HERE / "scontrol_node_26_05.json"
HEAD = "|".join(FIELDS)
TABLE = f"""{HEAD}
1|bob|shared|2026-11-24T22:41:21|2026-11-24T22:41:22|2026-11-24T22:41:48|2026-11-24T22:41:21|60|00:00:00|billing=1,cpu=1,gres/gpu=3,mem=300M,node=1|billing=1,cpu=1,gres/gpu=3,mem=300M,node=1
1.batch|||||||||cpu=1,mem=300M,node=1|
2|alice|shared|2026-11-24T22:41:35|2026-11-24T22:41:36|2026-11-24T22:42:25|2026-11-24T22:41:36|60|00:00:00|billing=2,cpu=2,gres/gpu=2,mem=600M,node=2|
4|bob|shared|2026-11-24T22:41:44|2026-11-24T22:41:51|2026-11-24T22:41:56|2026-11-24T22:41:51|60|00:00:00|billing=1,cpu=1,gres/gpu=3,mem=300M,node=1|
"""
"""What sacct -P printed for three of the runs in SACCT."""


def whatif(*words: str) -> Result:
    return CliRunner().invoke(main, ["whatif", "--quiet", *words])


def read_nodes(text: str, source: str, lanes: int, partition: str | None = None) -> tuple[Node, ...]:
    return with_lanes(read_hosts(text, source, partition).nodes, lanes)


def row(job: int, submit: int, start: int, end: int, gpus: int = 1, user: str = "ada") -> str:
    """Return a line of sacct -P in seconds since the epoch; 0 stands for a time that has not come."""
    times = [str(1_000_000 + at) if at >= 0 else "Unknown" for at in (submit, start, end)]
    tres = f"cpu=1,gres/gpu={gpus},mem={gpus}G" if gpus else "cpu=1"
    return f"{job}|{user}|gpu|{times[0]}|{times[1]}|{times[2]}|{times[0]}|600|00:00:00|{tres}|{tres}"


def table(folder: Path, *rows: str) -> str:
    file = folder / "jobs.txt"
    file.write_text("\n".join((HEAD, *rows)) + "\n")
    return str(file)


# --- Slurm's answers -------------------------------------------------------------------------------------


def test_json_and_table_say_the_same(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    runs = {(run.job, run.submit_s): run for run in read_job_records(SACCT.read_text(), "F").runs}
    listed = read_job_records(TABLE, "F").runs
    assert [run.job for run in listed] == [1, 2, 4]
    for run in listed:
        same = runs[run.job, run.submit_s]
        assert (run.user, run.start_s, run.end_s, run.gpus, run.memory_mb, run.limit_s) == (
            same.user, same.start_s, same.end_s, same.gpus, same.memory_mb, same.limit_s,
        )  # fmt: skip


def test_a_requeued_job_is_one_job_with_the_sum_of_its_runs():
    nodes = read_nodes(SCONTROL.read_text(), "F", 2)
    history = read_history(read_job_records(SACCT.read_text(), "F"), nodes, None)
    jobs = {job.id: job for job in history.jobs}
    assert sorted(jobs) == [1, 2, 3, 4, 5]
    assert (jobs[4].runs, jobs[4].work_s, jobs[4].end_s - jobs[4].start_s) == (2, 15.0, 22.0)
    # Job 8 runs, 611 waits, and 594 has 32 GPUs of the eight that these nodes have.
    assert history.left_out == {"not over": 2, "never started": 1}


def test_lanes_of_a_host_are_one_host():
    nodes = read_nodes(SCONTROL.read_text(), "F", 3)
    assert [(node.name, node.host, node.lane, node.gpus) for node in nodes if node.host == "node1"] == [
        ("node1", "node1", 0, 4), ("node1-l1", "node1", 1, 4), ("node1-l2", "node1", 2, 4),
    ]  # fmt: skip
    assert len(nodes) == 6
    with pytest.raises(InputError, match="no node of partition 'other' has GPUs; known here: shared"):
        read_nodes(SCONTROL.read_text(), "F", 2, "other")
    with pytest.raises(InputError, match="no node of partition 'sharde' has GPUs; did you mean 'shared'"):
        read_nodes(SCONTROL.read_text(), "F", 2, "sharde")


def test_what_is_left_out_is_counted_by_reason(tmp_path):
    file = table(
        tmp_path, row(1, 0, 5, 105), row(2, 0, -1, -1), row(3, 0, -1, 7), row(4, 0, 5, 9, gpus=0), row(5, 0, 5, 9, 99),
        row(6, 0, 5, 5), row(7, 1, 5, -1),
    )  # fmt: skip
    history = read_history(read_job_records(Path(file).read_text(), "F"), read_cluster("2x4:16:64"), None)
    assert [job.id for job in history.jobs] == [1]
    assert history.left_out == {
        "never started": 2, "without GPUs": 1, "wider than the cluster": 1, "ran for less than 1 s": 1, "not over": 1,
    }  # fmt: skip


def test_the_past_as_it_was_counts_what_was_held_and_waited(tmp_path):
    file = table(tmp_path, row(1, 0, 0, 100, 4), row(2, 10, 100, 150, 2), row(3, 20, 20, 30, 2))
    nodes = read_cluster("1x8:16:64")
    past = as_it_was(read_history(read_job_records(Path(file).read_text(), "F"), nodes, None), nodes)
    seen = [(sample.time_s, sample.gpus_held, sample.running, sample.waiting) for sample in past.samples]
    assert seen == [(0, 4, 1, 0), (10, 4, 1, 1), (20, 6, 2, 1), (30, 4, 1, 1), (100, 2, 1, 0), (150, 0, 0, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "not the JSON of sacct"),
        (
            '{"jobs":[{"job_id":-1,"time":{}}]}',
            r"no job is left to simulate: 1 that cannot be read; the first: .*jobs\[0\]",
        ),
        ('{"jobs":[{"job_id":1,"time":{}}]}', "1 without a time of submission; the first: .* job 1 has no time"),
        (f"{HEAD}\n1|a", "has 2 cells where the first line names 11"),
        (f"{HEAD}\n{row(1, 9, 8, 5)}", "1 that end before they start"),
        (f"{HEAD}\n{row(1, 0, 1, 2).replace('gpu=1', 'gpu=x')}", r":2: TRES: 'gres/gpu=x' is not NAME=COUNT"),
        (f"{HEAD}\n{row(1, 0, 1, 2).replace('1000000', 'today')}", "'today' is not a time"),
        (f"{HEAD}\n{row(1, 0, 1, 2).replace('1|ada', '1_5|ada')}", "JobIDRaw: '1_5' is not a whole number"),
    ],
)
def test_a_wrong_file_is_named_with_its_place_and_a_wrong_record_costs_itself(text, message, tmp_path):
    file = tmp_path / "bad"
    file.write_text(text)
    result = whatif("--sacct", str(file), "--nodes", "1x8:16:64", "-o", str(tmp_path / "o.html"))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert re.search(message, result.output), result.output


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(
                        ["jobs", "nodes", "job_id", "time", "tres", "name", "cpus", "gres", "state", "number", "user"]),
                        values, max_size=4), max_leaves=8))  # fmt: skip
def test_hostile_answers_raise_the_decoders_error_only(value):
    data = json.dumps({"jobs": [value], "nodes": [value]})
    for read in (lambda: read_job_records(data, "F"), lambda: read_nodes(data, "F", 2)):
        try:
            read()
        except InputError:
            continue


@given(st.text(alphabet="0123456789|:-.,=KMGT_ \n\u0660gresgpu/", max_size=60))
def test_hostile_lines_raise_the_decoders_error_only(text):
    try:
        read_history(read_job_records(f"{HEAD}\n{text}", "F"), read_cluster("1x8:16:64"), None)
    except InputError:
        return


def two_partitions() -> str:
    """Return an answer of scontrol with one node for each of two partitions."""
    return json.dumps({"nodes": [
        {"name": name, "cpus": 8 * gpus, "real_memory": 65536, "gres": f"gpu:{gpus}", "partitions": [partition]}
        for name, gpus, partition in (("a", 4, "fast"), ("b", 2, "slow"))
    ]})  # fmt: skip


def test_a_job_runs_on_nodes_of_its_partition_only(tmp_path):
    # Three jobs of "slow", which has two GPUs; the four of "fast" stay idle but for one job.
    nodes = tmp_path / "nodes.json"
    nodes.write_text(two_partitions())
    rows = [row(n, n, 1000, 11_000, 2).replace("|gpu|", "|slow|") for n in (1, 2, 3)]
    rows.append(row(4, 4, 1000, 11_000, 4).replace("|gpu|", "|fast|"))
    rows.append(row(5, 5, 1000, 11_000, 4).replace("|gpu|", "|slow|"))
    result = whatif("--sacct", table(tmp_path, *rows), "--nodes", str(nodes), "--movable", "0",
                    "-o", str(tmp_path / "f.csv"), "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert found["left_out"] == {"wider than the cluster": 1}
    waits = found["mean_wait_s"]
    # In one cluster of six GPUs no job would wait; in "slow" the second waits for the first, the third for the second.
    assert waits["slurm"] == pytest.approx((10_000 + 20_000) / 4, rel=0.02)
    assert waits["0 % can move"] == pytest.approx(waits["slurm"], rel=0.02)
    both = read_cluster("1x4:16:64,1x2:16:64")
    assert len(read_history(read_job_records(Path(table(tmp_path, *rows)).read_text(), "F"), both, None).jobs) == 5


def test_slurms_own_queue_starts_a_job_in_its_partition():
    nodes = read_nodes(two_partitions(), "F", 1)
    world = World([TraceJob(1, 0.0, 2, 9.0, partition="slow")], nodes, Setup(place=False))
    world.advance(0.0)
    assert [share.node for job in world.live.values() for share in job.placement] == ["b"]


def test_jobs_without_gpus_are_counted_with_their_part_of_the_cpu_time(tmp_path):
    nodes = read_nodes(two_partitions(), "F", 2)
    load = [
        row(n, 0, start, end, 0).replace("|gpu|", f"|{partition}|").replace("cpu=1", "cpu=8")
        for n, start, end, partition in ((2, 0, 50, "fast"), (3, 90, 200, "slow"), (4, 0, 100, "other"))
    ]
    text = "\n".join((HEAD, row(1, 0, 0, 100, 2).replace("|gpu|", "|fast|"), *load))
    history = read_history(read_job_records(text, "F"), nodes, None)
    assert history.left_out == {"without GPUs": 2, "in other partitions": 1}
    assert history.cpu_load == pytest.approx((8 * 50 + 8 * 10) / (48 * 100))


def answer(*jobs: dict[str, object]) -> str:
    """Return an answer of ``sacct --json`` with these jobs, all of partition fast on node a."""
    return json.dumps({"jobs": [
        {"job_id": at, "user": "ada", "partition": "fast", "nodes": "a",
         "time": {"submission": 10**6 + job["submit"], "start": 10**6 + job["start"], "end": 10**6 + job["end"],
                  "limit": {"set": True, "number": 600}},
         "tres": {"allocated": [{"type": name, "name": kind, "count": job[key]} for name, kind, key in
                                (("cpu", "", "cpus"), ("mem", "", "mb"), ("gres", "gpu", "gpus")) if key in job]}}
        for at, job in enumerate(jobs, 1)
    ]})  # fmt: skip


@pytest.mark.parametrize("taken", [{"cpus": 28, "mb": 10}, {"cpus": 1, "mb": 65_000}])
def test_jobs_without_gpus_keep_a_job_waiting_in_all_simulations(tmp_path, taken):
    # Node a has 32 CPUs and 64 GB. Job 1 was there before the first job with GPUs came, and job 3 needs what it has.
    file, nodes = tmp_path / "jobs.json", tmp_path / "nodes.json"
    small = {"cpus": 1, "mb": 100, "gpus": 1}
    load = {"submit": -500, "start": -500, "end": 9_000, **taken}
    away = {"submit": 0, "start": 0, "end": 9_000, "cpus": 32, "mb": 65_000}
    wide = {"submit": 10, "start": 9_000, "end": 9_100, "cpus": 8, "mb": 4_000, "gpus": 1}
    file.write_text(answer(load, {"submit": 0, "start": 0, "end": 400, **small}, wide, away).replace(
        '"job_id": 4, "user": "ada", "partition": "fast", "nodes": "a"',
        '"job_id": 4, "user": "ada", "partition": "fast", "nodes": "cpu[1-4]"',
    ))  # fmt: skip
    nodes.write_text(two_partitions())
    page = tmp_path / "page.html"
    words = ("--sacct", str(file), "--nodes", str(nodes), "--movable", "0,1", "--json")
    found = json.loads(whatif(*words, "-o", str(page)).stdout)
    assert found["jobs"] == 2
    assert found["load"]["jobs"] == 1
    assert found["load"]["cpu_share"] == pytest.approx(taken["cpus"] * 9_000 / (48 * 9_100))
    assert found["left_out"] == {"without GPUs": 1}
    for label, wait_s in found["mean_wait_s"].items():
        assert wait_s == pytest.approx(8_990 / 2, rel=0.02), label
    assert "Jobs without GPUs on these nodes: 1, with " in page.read_text()
    # Without it nothing waits.
    file.write_text(answer({"submit": 0, "start": 0, "end": 400, **small}, wide))
    waits = json.loads(whatif(*words, "-o", str(tmp_path / "f.csv")).stdout)["mean_wait_s"]
    assert max(wait_s for label, wait_s in waits.items() if label != "as it was") < 60


def test_a_sample_keeps_the_load_of_its_time(tmp_path):
    small = {"cpus": 1, "mb": 100, "gpus": 1}
    rows = [{"submit": at, "start": at, "end": at + 400, **small} for at in (0, 1_000, 2_000)]
    times = ((0, 900), (500, 1_300), (1_100, 5_000))
    loads = [{"submit": first, "start": first, "end": last, "cpus": 2} for first, last in times]
    nodes = read_nodes(two_partitions(), "F", 1)
    history = read_history(read_job_records(answer(*rows, *loads), "F"), nodes, None)
    assert [(job.id, job.submit_s, job.work_s) for job in history.consecutive(1, 1).load] == [
        (5, 0, 300), (6, 100, 3_900),
    ]  # fmt: skip


def test_a_load_waits_for_memory_too():
    load = [TraceJob(at, 0.0, 0, 50.0, cpus=1, memory_gb_per_gpu=40.0) for at in (8, 9)]
    world = World([TraceJob(1, 1.0, 1, 9.0)], read_cluster("1x4:16:64", 2), Setup(lanes=2, load=tuple(load)))
    world.advance(49.0)
    assert [node.memory_mb for node in world.snapshot().nodes] == [24 * 1024] * 2


def test_a_load_waits_for_cpus_too_and_ends_no_simulation():
    nodes = read_cluster("1x4:16:64", 2)
    load = [TraceJob(8, 0.0, 0, 50.0, cpus=16), TraceJob(9, 0.0, 0, 1e6, cpus=10)]
    world = World([TraceJob(1, 10.0, 1, 9.0, cpus=8)], nodes, Setup(place=False, lanes=2, load=tuple(load)))
    world.advance(49.0)
    assert [node.cpus for node in world.snapshot().nodes] == [0, 0]
    assert not world.running
    world.advance(60.0)
    assert [node.cpus for node in world.snapshot().nodes] == [6, 6]
    assert not world.running, "the second load was submitted before job 1"
    assert not world.over


# --- What Slurm knows of its site ------------------------------------------------------------------------


RULES = ("scontrol_config_26_05.txt", "scontrol_partition_26_05.json", "sacctmgr_assoc_26_05.json",
         "sacctmgr_qos_26_05.json")  # fmt: skip


def site(*names: str, **changes: str) -> SiteFacts:
    """Return the rules of recorded answers, in which a text is replaced by another one."""
    texts = [(HERE / name).read_text() for name in names]
    for old, new in changes.items():
        texts = [text.replace(old, new) for text in texts]
    return read_site(zip(texts, names, strict=True))


def test_the_accounting_tells_account_qos_type_nice_array_and_licenses():
    runs = {run.job: run for run in read_job_records((HERE / "sacct_accounts_26_05.json").read_text(), "F").runs}
    assert [(runs[at].account, runs[at].qos, runs[at].nice, runs[at].gpu_type) for at in (1, 3)] == [
        ("physics", "normal", 5, ""), ("bio", "high", 0, "a100"),
    ]  # fmt: skip
    assert runs[7].licenses == (("solver", 1),)
    # Slurm names the limit of an array with one of its tasks only.
    history = read_history(
        read_job_records((HERE / "sacct_accounts_26_05.json").read_text(), "F"),
        read_nodes(SCONTROL.read_text(), "F", 1), None, site(*RULES).queue,
    )  # fmt: skip
    assert {job.id: job.array_limit for job in history.jobs if job.array} == {4: 1, 5: 1, 6: 1}


def test_the_rules_of_a_site_come_from_slurms_own_answers():
    facts = site(*RULES, **{"PriorityWeightFairShare = 0": "PriorityWeightFairShare = 9000"})
    weights = facts.queue.weights
    assert (weights.age, weights.fairshare, weights.partition) == (1_000, 9_000, 10_000)
    assert (facts.backfill.interval_s, facts.backfill.full_interval_s, facts.backfill.window_s) == (1, 1, 86_400)
    assert facts.queue.qos["high"] == Qos(100, 2)
    assert facts.queue.licenses == {"solver": 1}
    assert facts.queue.partitions["shared"] == Tier(1, 1)
    accounts = facts.queue.accounts
    assert accounts["bio"].max_jobs == 2
    # Of five parts bio has one, physics three: its own user has a third of them, its account lab two thirds.
    assert [accounts[name].share for name in ("bio", "physics", "lab")] == pytest.approx([0.2, 0.2, 0.4])
    text = " ".join(facts.notes)
    assert "GrpTRES=gres/gpu (2)" in text, "of an account with others below it, and of one user"
    assert "not known" not in text
    # sshare tells the shares to those who may not read the associations.
    shares = site("sshare_26_05.json")
    assert {name: one.share for name, one in shares.queue.accounts.items()} == pytest.approx(
        {name: one.share for name, one in accounts.items()}
    )
    assert "weights (jobs go in the order of submission), limits of accounts (none), QOS" in " ".join(shares.notes)


def test_what_is_not_given_is_said():
    (note,) = read_site(()).notes
    assert note == (
        "Rules of the site that are not known (--site FILE tells them): weights (jobs go in the order of submission), "
        "limits of accounts (none), "
        "shares (all accounts equal), QOS (all equal, without limits), partitions (all have PriorityTier 1)."
    )


def test_weights_of_zero_are_replaced_by_one_for_age_and_said():
    facts = site(RULES[0], **{"= 1000\n": "= 0\n", "= 10000\n": "= 0\n"})
    assert facts.queue.weights == Weights(age=5_000)
    assert "Slurm's priority has no weights" in facts.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Key = value", "F: neither scontrol show config nor JSON"),
        (
            "{",
            "F: no associations, qos, shares or partitions of sacctmgr, sshare or scontrol: Input data was truncated",
        ),
        ('{"jobs": []}', "F: no associations, qos, shares or partitions .*: it has no "),
    ],
)
def test_another_file_is_refused_by_name(text, message):
    with pytest.raises(InputError, match=message):
        read_site([(text, "F")])


def plain(value):
    """Return an answer with plain numbers, as data parsers with ``+complex`` have them, and those of old releases."""
    if isinstance(value, dict) and value.keys() == {"set", "infinite", "number"}:
        return math.inf if value["infinite"] else value["number"] if value["set"] else None
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", [SACCT.name, *RULES[1:4], "sshare_26_05.json"])
def test_answers_with_plain_numbers_say_the_same(name):
    text = (HERE / name).read_text()
    other = json.dumps(plain(json.loads(text)))
    assert other != json.dumps(json.loads(text))
    if name == SACCT.name:
        assert read_job_records(other, "F") == read_job_records(text, "F")
    else:
        assert read_site([(other, "F")]) == read_site([(text, "F")])


def test_a_bad_record_of_a_site_costs_itself():
    facts = read_site([('{"qos": [{"name": 3}, {"name": "high", "priority": {"set": true, "number": 9}}]}', "F")])
    assert (facts.queue.qos, facts.notes[0][:29]) == ({"high": Qos(9)}, "F: 1 records cannot be read: ")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(
                        ["account", "user", "parent_account", "max", "tres", "total", "type", "name", "count", "jobs",
                         "set", "infinite", "number", "limits", "shares", "shares_raw", "priority", "tier", "parent"]),
                        values, max_size=4), max_leaves=8))  # fmt: skip
def test_hostile_answers_on_a_site_raise_the_decoders_error_only(value):
    for key in ("associations", "qos", "shares", "partitions"):
        try:
            facts = read_site([(json.dumps({key: {"shares": [value]} if key == "shares" else [value]}), "F")])
        except InputError:
            continue
        assert all(one.share > 0 for one in facts.queue.accounts.values())


def test_fair_share_of_the_site_orders_the_simulated_queue(tmp_path):
    # One GPU. Jobs 1 to 3 of ann, then one of bob, who has had nothing: he is second where fair share counts.
    lines = [f"{row(at, at, 600 * at, 600 * at + 600, user='bob' if at == 4 else 'ann')}" for at in (1, 2, 3, 4)]
    rows = [f"{line}|{'b' if '|bob|' in line else 'a'}|normal" for line in lines]
    file = tmp_path / "jobs.txt"
    file.write_text("\n".join((f"{HEAD}|Account|QOS", *rows)) + "\n")
    rules = tmp_path / "config.txt"
    rules.write_text(
        "PriorityType = priority/multifactor\nPriorityWeightFairShare = 1000\nPriorityCalcPeriod = 00:01:00\n"
    )
    words = {"sacct": str(file), "since": None, "nodes": "1x1:4:16", "partition": None, "lanes": "1", "quiet": True,
             "users": None, "draws": None, "array": None, "sample": None, "movable": "0", "more": None}  # fmt: skip

    def order(*files: str) -> list[int]:
        slurm = next(file for file in run_whatif({**words, "site": files}).results if file.label == "slurm")
        return [job.id for job in sorted(slurm.runs[0].jobs, key=lambda job: job.start_s or 0.0)]

    assert order() == [1, 2, 3, 4]
    assert order(str(rules)) == [1, 4, 2, 3]


# --- Odd and hostile inputs ------------------------------------------------------------------------------


def node(name: str, gres: str, **changes: object) -> dict[str, object]:
    return {"name": name, "cpus": 64, "real_memory": 512_000, "gres": gres, "partitions": ["gpu"], **changes}


@pytest.mark.parametrize(
    ("odd", "note"),
    [
        (node("mig", "gpu:a100_1g.5gb:56(S:0-1)", cpus=48), "left out: mig (56 GPUs, 48 CPUs)"),
        (node("cloud", "gpu:a100:4", state=["IDLE", "CLOUD", "POWERED_DOWN"]), "powered down, and are left out: cloud"),
        (node("bad", "gpu:a100:4", cpus="many"), "(node bad)"),
    ],
)
def test_a_host_that_cannot_be_simulated_costs_itself_and_is_named(odd, note):
    up = node("up", "gpu:a100:4", state=["MIXED", "CLOUD"])
    hosts = read_hosts(json.dumps({"nodes": [up, odd]}), "F")
    assert [one.name for one in hosts.nodes] == ["up"]
    assert note in hosts.notes[0]
    # A host that is powered down and not of a cloud is there.
    asleep = node("asleep", "gpu:a100:4", state=["IDLE", "POWERED_DOWN"])
    assert len(read_hosts(json.dumps({"nodes": [up, asleep]}), "F").nodes) == 2


def test_a_job_waits_for_its_type_of_gpu(tmp_path):
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({"nodes": [node("a", "gpu:a100:4"), node("t1", "gpu:T4:8"), node("t2", "gpu:T4:8")]}))
    rows = [row(at, at, 1000, 11_000, 4).replace("|600|", "|600|").replace("gres/gpu=4", "gres/gpu=4,gres/gpu:A100=4")
            for at in (1, 2, 3)]  # fmt: skip
    words = ("--sacct", table(tmp_path, *rows), "--nodes", str(nodes), "--movable", "0", "-o", str(tmp_path / "f.csv"))
    found = json.loads(whatif(*words, "--json").stdout)
    assert found["mean_wait_s"]["slurm"] == pytest.approx(10_000, rel=0.02)
    idle = next(item for item in found["results"] if item["label"] == "slurm")
    assert found["easy"]["idle_waiting_gpus"] == 0.0, idle


def test_accounting_without_gpus_names_the_setting_of_slurm(tmp_path):
    result = whatif("--sacct", table(tmp_path, row(1, 0, 5, 50, 0)), "--nodes", "1x4:16:64",
                    "-o", str(tmp_path / "p.html"))  # fmt: skip
    assert result.exit_code == 2
    assert "no gres/gpu: is it in Slurm's AccountingStorageTRES?" in result.output


def test_a_record_that_cannot_be_read_is_left_out_by_reason(tmp_path):
    jobs = json.loads(answer(*({"submit": 0, "start": 0, "end": 50, "gpus": 1},) * 3))["jobs"]
    jobs[1] |= {"partition": ",".join(f"gpu-long-{at:03}" for at in range(100))}
    jobs[2]["time"]["end"] = jobs[2]["time"]["start"] - 1
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"jobs": [*jobs, {"job_id": "x"}]}))
    nodes = tmp_path / "nodes.json"
    nodes.write_text(two_partitions())
    words = ("--movable", "0", "-o", str(tmp_path / "f.csv"), "--json")
    result = whatif("--sacct", str(file), "--nodes", str(nodes), *words)
    assert json.loads(result.stdout)["left_out"] == {
        "in other partitions": 1, "that end before they start": 1, "that cannot be read": 1,
    }  # fmt: skip


def past(at: int, **changes: object) -> dict[str, object]:
    """Return a job of sacct --json that had four GPUs of node a for 10,000 s from 1,000 s on."""
    times = {"submission": 10**6 + at, "start": 10**6 + 1000, "end": 10**6 + 11_000}
    gres = [{"type": "gres", "name": "gpu", "count": 4}, {"type": "cpu", "count": 4}]
    job = {"job_id": at, "user": "ada", "partition": "gpu", "nodes": "a", "time": times, "tres": {"allocated": gres}}
    return {**job, **changes}


def history_of(nodes: list[dict[str, object]], *jobs: dict[str, object]) -> History:
    hosts = read_hosts(json.dumps({"nodes": nodes}), "F")
    records = read_job_records(json.dumps({"jobs": jobs}), "F")
    return read_history(records, with_lanes(hosts.nodes, 2), None, features=hosts.features)


KINDS = [node("a", "gpu:a100:4"), node("t1", "gpu:t4:8"), node("t2", "gpu:t4:8")]


def test_where_no_request_names_a_type_each_job_has_the_type_that_it_had_and_it_is_said():
    """With AccountingStorageTRES=gres/gpu alone the accounting tells no type; the nodes do."""
    found = history_of(KINDS, past(1), past(2, nodes="t[1-2]"), past(3, nodes=""), past(4, submit_line="srun -G 4 x"))
    assert [job.gpu_type for job in found.jobs] == ["a100", "t4", "", ""]
    assert "2 of 4 jobs do not say which type of GPU they asked for" in found.notes[0]
    assert "1 of 4 jobs neither say nor show a type" in found.notes[1]
    # Where some request names one, the others asked for any.
    typed = past(5, tres={"requested": [{"type": "gres", "name": name, "count": 4} for name in ("gpu", "gpu:T4")]})
    assert [job.gpu_type for job in history_of(KINDS, past(1), typed).jobs] == ["", "t4"]
    assert history_of(KINDS[1:], past(1, nodes="t1")).notes == ()


def test_a_constraint_leaves_the_nodes_that_meet_it(tmp_path):
    """Three jobs of four GPUs on the two nodes with a100 or h100; six nodes with neither stay idle."""
    kinds = {"a": ["a100", "ib"], "b": ["h100"], **{f"c{at}": ["t4"] for at in range(6)}}
    nodes = [node(name, "gpu:4", features=features) for name, features in kinds.items()]
    jobs = [past(at, constraints="a100|h100", nodes="a") for at in (1, 2, 3)]
    found = history_of(nodes, *jobs)
    assert {name for name in found.jobs[0].barred if "-l" not in name} == {f"c{at}" for at in range(6)}
    assert len(found.jobs[0].barred) == 12, "further lanes of these hosts, too"
    files = [tmp_path / "jobs.json", tmp_path / "nodes.json"]
    for file, content in zip(files, ({"jobs": jobs}, {"nodes": nodes}), strict=True):
        file.write_text(json.dumps(content))
    out = str(tmp_path / "f.csv")
    words = ("--sacct", str(files[0]), "--nodes", str(files[1]), "--movable", "0", "-o", out, "--json")
    assert json.loads(whatif(*words).stdout)["mean_wait_s"]["slurm"] == pytest.approx(10_000 / 3, rel=0.02)
    # What cannot be judged for each node by itself is said, as are nodes whose features are not known.
    odd = history_of(nodes, past(1, constraints="[a100*1&h100*1]", nodes="a,b"), past(2, constraints="none"))
    assert odd.left_out == {"whose constraint no node meets now": 1}
    assert odd.notes == ("1 jobs have a constraint that binds several nodes together: it is left out.",)
    words = ("--sacct", str(files[0]), "--nodes", "8x4:16:64", "--movable", "0", "-o", out, "--json")
    assert "3 jobs have a constraint, and the nodes' features are not known" in whatif(*words).stdout


def test_a_table_may_have_bars_in_its_last_columns():
    head = f"{HEAD}|Constraints|SubmitLine"
    rows = (f"{row(1, 0, 1, 9)}|a100|h100|sbatch -C a100|h100 x|y", f"{row(2, 0, 1, 9)}||/opt/sbatch --nice=5 x",
            f"{row(3, 0, 1, 9)}|a|b|", f"{row(4, 0, 1, 9)}|a|sbatch x")  # fmt: skip
    found = read_job_records("\n".join((head, *rows)), "F")
    assert not found.left_out, found.example
    assert [(run.constraint, run.nice) for run in found.runs] == [("a100|h100", 0), ("", 5), ("a|b", 0), ("a", 0)]
    alone = read_job_records(f"{HEAD}|Constraints\n{row(1, 0, 1, 9)}|a100|h100", "F")
    assert alone.runs[0].constraint == "a100|h100"


def test_an_id_that_comes_again_is_another_job(tmp_path):
    """Slurm's counter of jobs wraps, and its state may be lost: a job of 2017 and one of 2026 had one number."""
    year = 365 * 86_400
    runs = (row(7, 0, 5, 60), row(7, 60, 80, 200), row(7, year, year + 9, year + 50), row(8, 0, 3, 9),
            row(8, 20, 30, 40, user="eve"))  # fmt: skip
    found = read_history(
        read_job_records(Path(table(tmp_path, *runs)).read_text(), "F"), read_cluster("1x4:16:64"), None
    )
    assert [(job.id, job.user, job.runs, job.submit_s) for job in found.jobs] == [
        (7, "ada", 2, 0), (8, "ada", 1, 0), (10, "eve", 1, 20), (9, "ada", 1, year),
    ]  # fmt: skip


def test_the_wait_of_a_job_that_cadenza_held_counts_from_its_submission():
    """Slurm calls a held job eligible only once it is released."""
    late = {"submission": 10**6, "eligible": 10**6 + 500, "start": 10**6 + 600, "end": 10**6 + 700}
    held = {"comment": {"administrator": "a note\ncadenza: held"}}
    runs = read_job_records(json.dumps({"jobs": [past(1, time=late), past(2, time=late, **held)]}), "F").runs
    assert [run.submit_s - 10**6 for run in runs] == [500, 0]


def test_a_host_that_is_down_counts_if_jobs_of_the_past_had_it():
    """A dead one that is still in slurm.conf would make the cluster larger than it was."""
    raws = [node("up", "gpu:4")] + [
        node(name, "gpu:4", state=state)
        for name, state in (("d1", ["DOWN", "NOT_RESPONDING"]), ("d2", ["IDLE", "DRAIN"]), ("d3", ["DOWN"]))
    ]
    found = read_hosts(json.dumps({"nodes": raws}), "F", used=frozenset({"up", "d3"}))
    assert [one.name for one in found.nodes] == ["d3", "up"]
    assert found.notes == ("Hosts that are down or drained and had no job of the past, and are left out: d1, d2.",)
    # A watch shows them all, and an accounting without nodes says nothing of them.
    assert len(read_hosts(json.dumps({"nodes": raws}), "F", used=frozenset()).nodes) == 4


def test_gpus_that_jobs_share_by_parts_are_none_that_a_job_can_have():
    """Slurm never gives a GPU as a whole of which a job has a shard; they were idle beside jobs that wait."""
    raws = [node("s1", "gpu:a100:4,shard:a100:32", gres_used="gpu:a100:1(IDX:3),shard:a100:3(1/8,2/8,0/8,-/8)"),
            node("s2", "gpu:4,shard:8", gres_used="gpu:0(IDX:N/A),shard:8(2/2,2/2,2/2,2/2)")]  # fmt: skip
    found = read_hosts(json.dumps({"nodes": raws}), "F")
    assert [(one.name, one.gpus, one.gpus_used) for one in found.nodes] == [("s1", 2, 1)]
    assert "are left out: s1 (2), s2 (4)." in found.notes[0]
    parts = past(1, tres={"allocated": [{"type": "gres", "name": "shard", "count": 4}]})
    assert history_of(KINDS, parts).left_out == {"with parts of GPUs (gres/shard, gres/mps)": 1}


@pytest.mark.slow
def test_a_cloud_host_that_sleeps_counts_if_jobs_of_the_past_had_it(tmp_path):
    asleep = [node(name, "gpu:a100:4", state=["IDLE", "CLOUD", "POWERED_DOWN"]) for name in ("d1", "d2")]
    files = [tmp_path / "jobs.json", tmp_path / "nodes.json"]
    files[0].write_text(json.dumps({"jobs": [past(1, nodes="d1")]}))
    files[1].write_text(json.dumps({"nodes": [node("up", "gpu:a100:4"), *asleep]}))
    words = ("--sacct", str(files[0]), "--nodes", str(files[1]), "--movable", "0", "-o", str(tmp_path / "f.csv"))
    result = whatif(*words)
    assert result.exit_code == 0, result.output
    assert "1 jobs in 0.0 days on 8 GPUs" in result.output
    assert "powered down, and are left out: d2." in result.output
    files[0].write_text(json.dumps({"jobs": [past(1)]}))
    files[1].write_text(json.dumps({"nodes": asleep}))
    none = whatif(*words)
    assert (none.exit_code, none.output.count("\n")) == (2, 1)
    assert "no host is left to simulate: " in none.output


def test_one_command_line_that_names_a_type_says_nothing_of_the_other_jobs():
    """Their scripts may have asked for a type, of which the accounting has nothing."""
    told = past(2, submit_line="sbatch --gres=gpu:a100:4 x")
    assert [job.gpu_type for job in history_of(KINDS, past(1), told).jobs] == ["a100", "a100"]


def test_an_accounting_whose_parts_overlap_has_each_run_once(tmp_path):
    """Two months in one file: the columns come again, and so do the runs that were in both."""
    still = row(2, 0, 10, -1)
    file = table(tmp_path, row(1, 0, 5, 65), still, HEAD, row(1, 0, 5, 65), row(2, 0, 10, 40), row(1, 65, 70, 80))
    found = read_history(read_job_records(Path(file).read_text(), "F"), read_cluster("1x4:16:64"), None)
    assert [(job.id, job.runs, job.work_s) for job in found.jobs] == [(1, 2, 70), (2, 1, 30)]
    assert not found.left_out


def test_only_a_line_feed_ends_a_record_and_one_in_a_command_line_costs_nothing():
    head = f"{HEAD}|Account|SubmitLine"
    rows = (
        f"{row(1, 0, 1, 9)}|a\x0bb\x85c\u2028d|sbatch --wrap=echo",
        "sleep 1|tee x",
        f"{row(2, 0, 1, 9)}|a|sbatch x\r",
    )
    found = read_job_records("\n".join((head, *rows)), "F")
    assert not found.left_out, found.example
    assert [run.account for run in found.runs] == ["a\x0bb\x85c\u2028d", "a"]
    # A record that was cut is one that cannot be read.
    assert read_job_records("\n".join((head, *rows))[:-40], "F").left_out == {"that cannot be read": 1}


def test_slurms_values_for_none_are_none_in_a_table_too():
    cells = row(1, 0, 1, 9).replace("|600|", "|4294967295|") + "|(null)"
    (run,) = read_job_records(f"{HEAD}|Constraints\n{cells}", "F").runs
    assert (run.limit_s, run.constraint) == (None, "")


@pytest.mark.parametrize(
    ("data", "text"),
    [("ä{".encode("latin-1"), "\ufffd{"), ("ä{".encode("utf-16"), "ä{"), ("ä{".encode("utf-8-sig"), "ä{")],
)
def test_a_file_of_slurms_has_bytes_of_users(tmp_path, data, text):
    file = tmp_path / "jobs"
    file.write_bytes(data)
    assert read_answer(str(file), "--sacct") == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(b"{}", mtime=0), "--sacct: '.*/jobs' is compressed: unpack it first"),
        (b" \n", "--sacct: '.*/jobs' is empty"),
        (b'{"jobs":[{"job_id":1,"job_state":["RUNNING"]}]}', "these jobs are of squeue or scontrol"),
        (b'{"jobs":[],"errors":[{"description":"Access denied"}]}', "sacct found no jobs; its error: Access denied"),
        (b"sacct: error: no\n{}", "'JobIDRaw' is missing, it begins with 'sacct: error: no'"),
    ],
)
def test_another_file_than_an_answer_of_sacct_is_named(tmp_path, data, message):
    file = tmp_path / "jobs"
    file.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_job_records(read_answer(str(file), "--sacct"), str(file))


def test_a_null_of_the_accounting_costs_nothing():
    times = {"submission": 10**6, "start": 10**6, "end": 10**6 + 9, "suspended": "INVALID", "limit": None}
    nulls = past(1, time=times, tres=None, user=None, nodes=None, submit_line=None, array=None)
    found = read_job_records(json.dumps({"jobs": [nulls]}), "F")
    assert [(run.user, run.gpus) for run in found.runs] == [("unknown", 0)], found.example


def test_without_movable_jobs_or_users_nothing_changes(tmp_path):
    wide = [row(at, at, 20_000 * at, 20_000 * at + 20_000, 4) for at in (1, 2)]
    short = [row(3 + n, 100 + n, 40_000, 40_300, 1, f"u{n % 2}") for n in range(6)]
    words = ("--sacct", table(tmp_path, *wide, *short), "--nodes", "1x4:16:64", "-o", str(tmp_path / "f.csv"))
    text = " ".join(whatif(*words, "--movable", "0,1", "--users", "0").output.split())
    for name in ("0 % can move", "0 % of the users"):
        assert f"“{name}”: nothing changes, each job starts as under Slurm." in text
    assert "“100 % can move”" not in text


# --- The command -----------------------------------------------------------------------------------------


def test_the_command_puts_the_past_slurm_and_cadenza_next_to_each_other(tmp_path):
    # Two wide jobs of one user, and short ones that really waited for their ends.
    wide = [row(1, 0, 0, 20_000, 4), row(2, 5, 20_000, 40_000, 4)]
    short = [row(3 + n, 100 + n, 40_000, 40_300, 1, f"u{n % 2}") for n in range(4)]
    page = tmp_path / "page.html"
    result = whatif("--sacct", table(tmp_path, *wide, *short), "--nodes", "1x4:16:64", "--movable", "1",
                    "-o", str(page), "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [item["label"] for item in found["results"]] == ["slurm", "as it was", "100 % can move"]
    waits = found["mean_wait_s"]
    assert waits["as it was"] == fmean([0, 19_995, *(39_900 - n for n in range(4))])
    assert waits["slurm"] == pytest.approx(waits["as it was"], rel=0.01)
    assert waits["100 % can move"] < waits["slurm"] / 2
    text = page.read_text()
    assert "Completion time by user" in text
    assert "cadenza whatif --sacct=" in text


def test_a_long_history_says_its_time_beforehand_and_its_runs_apart_give_the_same(tmp_path, monkeypatch):
    file = table(tmp_path, *(row(n, 60 * n, 60 * n, 60 * n + 200 + n % 7, 1 + n % 3) for n in range(20)))
    words = ("--sacct", file, "--nodes", "1x4:16:64", "--movable", "0.5", "-o", str(tmp_path / "f.csv"), "--json")
    alone = whatif(*words)
    for name, value in (("runs.LARGE_JOBS", 10), ("run_pool.TIMED_JOBS", 5), ("run_pool.MIN_JOBS_APART", 10)):
        monkeypatch.setattr(f"cadenza.slurm_plugin.simulations.{name}", value)
    monkeypatch.setattr("cadenza.slurm_plugin.simulations.run_pool._cpus", lambda: 2)
    apart = whatif(*words)
    assert re.fullmatch(r"20 jobs: .+ to .+, estimated from 10 of them\n", apart.stderr)
    assert alone.stderr == ""
    found = [json.loads(result.stdout) for result in (alone, apart)]
    waits = found[0]["mean_wait_s"]
    assert waits["50 % can move"] > 0
    assert found[1]["mean_wait_s"] == waits


def test_the_estimate_holds_where_the_queue_that_weeks_build_up_makes_each_round_dearer(monkeypatch):
    # Up to 2,000 jobs there is no queue, so the time grows with their number; from there on with its square.
    def took(task, _progress=None):
        jobs = task.options["jobs"]
        return SimpleNamespace(wall_s=jobs / 1000 * max(jobs / 2000, 1))

    monkeypatch.setattr(run_pool, "run_task", took)
    monkeypatch.setattr(run_pool, "_cpus", lambda: 2)
    low_s, high_s, timed = run_pool.estimate_s(lambda count: [Task({"jobs": count}, (), None)] * 3, 20_000)
    assert timed == 2000
    assert low_s < 200 * 3 / 2 <= high_s


def test_a_sample_is_a_stretch_of_time_and_says_what_was_drawn(tmp_path):
    file = table(tmp_path, *(row(n, 6 * 3600 * n, 6 * 3600 * n + 60, 6 * 3600 * n + 90) for n in range(40)))
    result = whatif("--sacct", file, "--nodes", "1x4:16:64", "--sample", "0.2", "--movable", "0",
                    "-o", str(tmp_path / "f.csv"))  # fmt: skip
    assert "8 jobs in 1.8 days" in result.output
    assert re.search(r"8 of 40 jobs were drawn: those that follow each other from day (\d+\.\d) to day", result.output)
    history = read_history(read_job_records(Path(file).read_text(), "F"), read_cluster("1x4:16:64"), None)
    drawn = history.sample(0.2).jobs
    assert [job.id - drawn[0].id for job in drawn] == list(range(8))
    assert [(job.submit_s, job.start_s - job.submit_s) for job in drawn[:2]] == [(0, 60), (6 * 3600, 60)]
    assert history.sample(1) is history


def test_without_matplotlib_there_is_the_table_and_no_page(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    words = ("--sacct", table(tmp_path, row(1, 0, 0, 50)), "--nodes", "1x4:16:64", "--movable", "0")
    result = whatif(*words)
    assert result.exit_code == 0, result.output
    assert "no page: the page needs matplotlib" in result.output
    assert "completion, mean" in result.output
    assert not Path("whatif.html").exists()
    assert whatif(*words, "-o", "page.html").exit_code == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either --sacct FILE, or --since"),
        (("--sacct", str(SACCT), "--since", "7d"), "give either"),
        (("--sacct", str(SACCT)), "--nodes: is missing"),
        (("--sacct", str(SACCT), "--nodes", "x"), "'x' is no file, and"),
        (("--sacct", "none.json", "--nodes", "1x4:16:64"), "--sacct: 'none.json' cannot be read"),
        (("--sacct", str(SACCT), "--nodes", "1x4:16:64", "--movable", "50"), "--movable: '50' is not from 0 to 1"),
        (("--sacct", str(SACCT), "--nodes", "1x4:16:64", "--lanes", "0"), "--lanes"),
        (("--sacct", str(SACCT), "--nodes", "1x4:16:64", "--sample", "2"), "--sample: '2' is not from 0.001 to 1"),
        (("--sacct", str(SACCT), "--nodes", "1x4:16:64", "--more", "x"), "--more: 'x' is not lane or memory"),
        (("--sacct", str(SACCT), "--nodes", "1x4:16:64", "--partition", "x"), "no job is left to simulate: "),
        (("--sacct", str(SACCT), "--nodes", "1x4:16:64", "-o", "no/folder/x.html"), "--output: "),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(words, message):
    result = whatif(*words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1


def test_on_a_cluster_slurm_is_asked_and_a_command_without_an_answer_is_said(monkeypatch, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "sacct": f"cat {HERE}/sacct_accounts_26_05.json",
        "scontrol": f'cd {HERE}; case "$*" in *=list) ;; *config) cat {RULES[0]};; *part*) cat {RULES[1]};; '
        f"--all*) cat {SCONTROL};; esac",
        "sacctmgr": f'case "$2" in qos) cat {HERE}/{RULES[3]};; *) echo no slurmdbd >&2; exit 1;; esac',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    result = whatif("--since", "28d", "--movable", "0", "-o", str(tmp_path / "f.csv"), "--json")
    assert result.exit_code == 0, result.output
    notes = " ".join(json.loads(result.stdout)["notes"])
    assert "sacctmgr show assoc --json: no slurmdbd" in notes
    assert "(--site FILE tells them): limits of accounts (none), shares (all accounts equal)." in notes


def test_a_machine_without_slurm_names_the_way_by_files(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = whatif("--since", "2026-11-01T08:00", "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 3
    assert result.output == (
        "cadenza: scontrol is not installed here; run this where Slurm's commands are, or write two files there: "
        "`sacct --allusers --duplicates --json --starttime 2026-11-01T08:00 > jobs.json`, `scontrol --all show node "
        "--json > nodes.json`; and give them here: `cadenza whatif --sacct jobs.json --nodes nodes.json`\n"
    )
