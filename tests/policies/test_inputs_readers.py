"""Traces, clusters, costs, failures and interference: what is read, and what each mistake is answered with."""

from __future__ import annotations

from dataclasses import fields

import pytest
from published_data import published

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.cluster import PARTITION as SIMULATED
from cadenza.policies.inputs.costs import SimCosts, read_costs
from cadenza.policies.inputs.csv_table import decode
from cadenza.policies.inputs.failures import NodeFailure, read_failures
from cadenza.policies.inputs.interference import packing_pairs, read_interference
from cadenza.policies.inputs.model_mix import model_mix, read_split
from cadenza.policies.inputs.published import (
    default_costs,
    gandiva_table1,
    synergy_profiles,
    text_of,
)
from cadenza.policies.inputs.queue_rules import (
    Account,
    Qos,
    QueueRules,
    Tier,
    Weights,
    read_queue_rules,
    read_weights,
    with_shares,
)
from cadenza.policies.inputs.trace import read_trace
from cadenza.policies.simulator.workloads.gandiva import table1_profiles

PROFILES = synergy_profiles()
HEAD = "job,submit_s,gpus,model,iterations\n"


def trace(text: str, **options: object) -> tuple:
    return read_trace(text, "t.csv", PROFILES, **options)


def refusal(call: object, *arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Traces ----------------------------------------------------------------------------------------------


def test_a_row_becomes_a_job() -> None:
    (job,) = trace("job,submit_s,gpus,model,iterations,user,min_gpus,max_gpus,account,vc,memory_gb_per_gpu\n"
                   "7,1.5,2,res50,100,ada,1,4,lab,x9,1.5\n")  # fmt: skip
    assert (job.id, job.submit_s, job.gpus, job.model, job.iterations) == (7, 1.5, 2, "res50", 100)
    assert (job.user, job.min_gpus, job.max_gpus, job.account) == ("ada", 1, 4, "lab")
    assert job.profile is PROFILES["res50"]
    assert job.memory_gb_per_gpu == 1.5
    assert job.work_s == pytest.approx(78.0)
    assert job.tags == {"vc": "x9"}


def test_a_row_says_whether_the_job_keeps_checkpoints_and_its_limit() -> None:
    head = "job,submit_s,gpus,duration_s,checkpoints,time_limit_s\n"
    jobs = trace(head + "1,0,1,9,no,20.5\n2,0,1,9,yes,\n3,0,1,9,,\n")
    assert [(job.checkpoints, job.time_limit_s) for job in jobs] == [(False, 20.5), (True, None), (True, None)]


SITE = QueueRules(qos={"high": Qos(priority=1)}, licenses={"matlab": 4, "ansys": 1})
SITED = (
    "job,submit_s,gpus,duration_s,account,user,share,qos,tier,nice,managed,gpu_type,array,array_limit,license\n"
    "1,0,1,9,lab,ada,2.5,high,3,-7,no,V100,a,2,matlab:2;ansys\n2,0,1,9,,,,,,,,,,,\n"
)


def test_a_row_says_what_slurms_order_and_limits_need() -> None:
    one, plain = trace(SITED, queue=SITE)
    assert (one.account, one.user, one.share, one.qos, one.nice) == ("lab", "ada", 2.5, "high", -7)
    assert (one.tier, one.partition) == (3, "sim-tier3")
    assert (one.managed, one.gpu_type, one.array, one.array_limit) == (False, "V100", "a", 2)
    assert one.licenses == (("matlab", 2), ("ansys", 1))
    assert (plain.partition, plain.managed, plain.share, plain.licenses) == (PARTITION, True, None, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qos\n1,0,1,9,low\n", "t.csv:2: qos: 'low' is no QOS of the site; name it in the file of --site"),
        ("license\n1,0,1,9,maple\n", "t.csv:2: license: 'maple' is no license of the site"),
        ("license\n1,0,1,9,matlab:5\n", "t.csv:2: license: '5' is not from 1 to 4"),
        ("array_limit\n1,0,1,9,2\n", "t.csv:2: array_limit: goes with an array"),
        ("share\n1,0,1,9,2\n", "t.csv:2: share: is that of an account"),
        ("share\n1,0,1,9,0\n", "t.csv:2: share: must be more than 0"),
        ("tier\n1,0,1,9,0\n", "t.csv:2: tier: '0' is not from 1"),
        ("nice\n1,0,1,9,x\n", "t.csv:2: nice: 'x' is not a whole number"),
        ("managed\n1,0,1,9,maybe\n", "t.csv:2: managed: 'maybe' is neither yes nor no"),
        ("priority\n1,0,1,9,3\n", "t.csv:1: column 'priority' has no effect; give nice, qos or tier"),
        ("account,share\n1,0,1,9,lab,1\n2,0,1,9,lab,2\n", "t.csv:3: share: 'lab' has 1 in line 2"),
    ],
)
def test_a_column_without_an_effect_is_refused(text: str, said: str) -> None:
    found = refusal(read_trace, "job,submit_s,gpus,duration_s," + text, "t.csv", PROFILES, None, SITE)
    assert found.startswith(said)


def test_the_rules_of_a_site_are_read() -> None:
    text = """
    half_life_s = 3600
    [weights]
    age = 5000
    fairshare = 1e4
    [qos.high]
    priority = 100
    gpus_per_user = 8
    [accounts.lab]
    share = 2.5
    gpus = 64
    max_jobs = 3
    [licenses]
    matlab = 4
    [partitions.sim]
    tier = 2
    """
    assert read_queue_rules(text, "s.toml") == QueueRules(
        weights=Weights(age=5000, fairshare=10_000), half_life_s=3600.0, qos={"high": Qos(100, 8)},
        accounts={"lab": Account(2.5, 64, 3)}, licenses={"matlab": 4}, partitions={"sim": Tier(tier=2)},
    )  # fmt: skip
    assert read_queue_rules("", "s.toml") == QueueRules()
    shares = with_shares(read_queue_rules(text, "s.toml"), {"lab": 1.0, "new": 3.0}).accounts
    assert shares == {"lab": Account(1.0, 64, 3), "new": Account(share=3.0)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight = 1", "s.toml: unknown key 'weight'; did you mean 'weights'?"),
        ("[weights]\nsize = 1", "s.toml: unknown key 'size' in weights"),
        ("[qos.high]\npriority = -1", "s.toml: qos.high.priority: "),
        ("[accounts.lab]\nshare = 0", "s.toml: accounts.lab.share: "),
        ("[licenses]\nx = 'y'", "s.toml: licenses.x: "),
        ("calc_s = 0", "s.toml: calc_s: "),
        ("[", "s.toml: not TOML"),
    ],
)
def test_wrong_rules_of_a_site_are_named(text: str, said: str) -> None:
    assert refusal(read_queue_rules, text, "s.toml").startswith(said)


def test_weights_are_read() -> None:
    assert read_weights("age=5000, qos=1e4", "w") == Weights(age=5000, qos=10_000)
    assert read_weights("none", "w") == Weights()
    assert refusal(read_weights, "size=1", "w").startswith("w: 'size=1' is not NAME=NUMBER")


def test_a_duration_needs_no_model_and_sets_the_iteration_time_with_iterations() -> None:
    plain, both = trace("job,submit_s,gpus,duration_s,iterations,model\n1,0,1,60,,\n2,0,1,60,30,gnmt\n")
    assert (plain.work_s, plain.profile, plain.iterations, plain.iteration_s) == (60.0, None, None, 1.0)
    assert both.iteration_s == pytest.approx(2.0)


def test_jobs_come_in_order_of_submission_whatever_the_rows_order() -> None:
    rows = ["3,5,1,gnmt,9", "1,5,1,gnmt,9", "2,0,1,gnmt,9"]
    assert [job.id for job in trace(HEAD + "\n".join(rows))] == [2, 1, 3]
    assert trace(HEAD + "\n".join(rows)) == trace(HEAD + "\n".join(reversed(rows)))


def test_bom_windows_lines_comments_blank_lines_and_quotes_are_read() -> None:
    text = '\ufeff# ours\r\njob,submit_s, gpus ,model,iterations\r\n\r\n1,0,1,"gnmt",5\r\n'
    assert [job.model for job in trace(text)] == ["gnmt"]
    assert decode(b"\xef\xbb\xbfa", "f") == "a"


def test_models_are_dealt_to_jobs_without_one_by_order_of_submission() -> None:
    rows = "".join(f"{number},{number},1,{'gnmt' if number == 3 else ''},60\n" for number in range(9))
    text = "job,submit_s,gpus,model,duration_s\n" + rows
    jobs = trace(text, assign=model_mix(PROFILES, (20, 70, 10), "x"))
    assert [job.model for job in jobs] == [
        "alexnet", "gnmt", "transformer", "gnmt", "m5", "lstm", "gnmt", "res18", "transformer",
    ]  # fmt: skip
    assert all(job.profile is PROFILES[job.model] for job in jobs)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("x,0,1,gnmt,5", "t.csv:2: job: 'x' is not a whole number"),
        ("-1,0,1,gnmt,5", "t.csv:2: job: '-1' is not from 0 to"),
        ("1,nan,1,gnmt,5", "t.csv:2: submit_s: 'nan' is not a number"),
        ("1,-5,1,gnmt,5", "t.csv:2: submit_s: '-5' is not from 0 to 1e+11"),
        ("1,inf,1,gnmt,5", "t.csv:2: submit_s: 'inf' is not from 0"),
        ("1,1e999,1,gnmt,5", "t.csv:2: submit_s: '1e999' is not from 0"),
        ("1,0,0,gnmt,5", "t.csv:2: gpus: '0' is not from 1"),
        ("1,0,1.5,gnmt,5", "t.csv:2: gpus: '1.5' is not a whole number"),
        ("1,0,²,gnmt,5", "t.csv:2: gpus: '²' is not a whole number"),
        ("1,0,1,gnm,5", "t.csv:2: model: there is no profile of 'gnm' (--profiles FILE gives it); did"),
        ("1,0,1,gnmt,0", "t.csv:2: iterations: '0' is not from 1"),
        ("1,0,1,gnmt,1_000", "t.csv:2: iterations: '1_000' is not a whole number"),
        ("1,0,1,gnmt," + "9" * 5000, "t.csv:2: iterations: '9999999999"),
        ("1,0,1,gnmt,999999999999999", "t.csv:2: iterations: 999999999999999 take"),
        ("1,0,1,gnmt,", "t.csv:2: iterations and duration_s are empty"),
        ("1,0,1,,5", "t.csv:2: iterations: without a profiled model"),
        ("1,0,1,gnmt", "t.csv:2: has 4 cells where the first line names 5 columns"),
        ("1,0,1,gnmt,5\n1,0,1,gnmt,5", "t.csv:3: job 1 is there twice, first in line 2"),
        ('1,0,1,"gnmt,5', "t.csv:2: not CSV"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(row: str, said: str) -> None:
    assert refusal(trace, HEAD + row).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t.csv: is empty"),
        ("job;submit_s\n", "t.csv:1: column 'job' is missing"),
        ("job,submit_s,gpus\n", "t.csv:1: column 'iterations' or 'duration_s' is missing"),
        ("job,submit_s,gpus,GPUs,iterations\n", "t.csv:1: unknown column 'GPUs'; did you mean 'gpus'?"),
        ("job,submit_s,gpus,gpus,iterations\n", "t.csv:1: column 'gpus' is there twice"),
        ("job,submit_s,gpus,,iterations\n", "t.csv:1: a column has no name"),
        ("job,submit_s,gpus,duration_s,min_gpus\n1,0,2,9,3\n", "t.csv:2: min_gpus: '3' is not from 1 to 2"),
        ("job,submit_s,gpus,duration_s,memory_gb_per_gpu\n1,0,2,9,0\n", "t.csv:2: memory_gb_per_gpu: must be more"),
        ("job,submit_s,gpus,duration_s,memory_gb_per_gpu\n1,0,2,9,2G\n", "t.csv:2: memory_gb_per_gpu: '2G' is"),
        ("job,submit_s,gpus,duration_s,time_limit_s\n1,0,2,9,0\n", "t.csv:2: time_limit_s: must be more"),
        ("job,submit_s,gpus,duration_s,checkpoints\n1,0,2,9,1\n", "t.csv:2: checkpoints: '1' is neither yes nor no"),
        ("job,submit_s,gpus,duration_s,max_gpus\n1,0,2,9,1\n", "t.csv:2: max_gpus: '1' is not from 2 to"),
        ("job,submit_s,gpus,duration_s\n1,0,2,0\n", "t.csv:2: duration_s: must be more than 0"),
    ],
)
def test_wrong_columns_are_named(text: str, said: str) -> None:
    assert refusal(trace, text).startswith(said)


def test_the_published_traces_are_read() -> None:
    for name, gpu_hours in (("synergy-static-100.csv", 296.8), ("synergy-dynamic-100.csv", 307.8)):
        if path := published(name):
            jobs = trace(path.read_text())
            assert len(jobs) == 100
            assert sum(job.work_s * job.gpus for job in jobs) / 3600 == pytest.approx(gpu_hours, abs=0.05)


# --- Splits ----------------------------------------------------------------------------------------------


def test_splits() -> None:
    assert read_split("33/33/33", "x") == (33, 33, 33)
    assert "adds up to 110" in refusal(read_split, "20/70/20", "x")
    assert "'a' is not a number" in refusal(read_split, "a/2", "x")
    assert "has 2 shares, and the profiles have 3 tasks" in refusal(model_mix, PROFILES, (50, 50), "x")


# --- Clusters --------------------------------------------------------------------------------------------


def test_clusters() -> None:
    nodes = read_cluster("2x8:24:500, 1x4:12:62.5:P100")
    assert [node.name for node in nodes] == ["n0001", "n0002", "n0003"]
    assert [(node.gpus, node.cpus, node.memory_mb, node.gpu_type) for node in nodes[1:]] == [
        (8, 24, 512000, ""),
        (4, 12, 64000, "P100"),
    ]
    assert nodes[0].partitions == (PARTITION,) == (SIMULATED,)
    names = [node.name for node in read_cluster("12000x1:1:1")]
    assert names == sorted(names)
    assert names[0] == "n00001"


def test_lanes_share_their_host() -> None:
    nodes = read_cluster("2x4:8:16", lanes=3)
    assert [node.name for node in nodes][:4] == ["n0001", "n0001-l1", "n0001-l2", "n0002"]
    assert {(node.host, node.lane) for node in nodes} == {(host, k) for host in ("n0001", "n0002") for k in range(3)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not NODESxGPUS"),
        ("16x8:24", "'16x8:24' is not NODESxGPUS"),
        ("4x8:24:500,", "'' is not NODESxGPUS"),
        ("0x8:24:500", "nodes: '0' is not from 1"),
        ("4x0:24:500", "GPUs: '0' is not from 1 to 1024"),
        ("4x8:2.5:500", "CPUs, at least one for each GPU: '2.5' is not a whole number"),
        ("4x8:24:0", "memory, at least 1 GB for each GPU: '0' is not from 8"),
        ("4x8:7:500", "CPUs, at least one for each GPU: '7' is not from 8"),
        ("4x8:24:nan", "GPU: 'nan' is not a number"),
        ("4x8:24:500:", "is not NODESxGPUS"),
        ("99999x1:1:1,99999x1:1:1", "199998 nodes are more than 100000"),
        ("1" * 400 + "x8:24:500", "nodes: '111"),
    ],
)
def test_a_wrong_cluster_is_named(text: str, said: str) -> None:
    assert said in refusal(read_cluster, text)


def test_wrong_lanes() -> None:
    assert refusal(read_cluster, "1x1:1:1", 0) == "lanes: 0 is not from 1 to 8"


# --- Costs -----------------------------------------------------------------------------------------------


def test_the_shipped_costs_are_the_simulators_defaults_and_all_are_explained() -> None:
    assert default_costs() == SimCosts()
    lines = text_of("costs.toml").splitlines()
    for item in fields(SimCosts):
        place = next(number for number, line in enumerate(lines) if line.startswith(f"{item.name} ="))
        assert lines[place - 1].startswith("#")


def test_costs_left_out_keep_their_defaults() -> None:
    assert read_costs("tune_s = 2\r\n", "c.toml") == SimCosts(tune_s=2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tunes_s = 1", "c.toml: unknown key 'tunes_s'; did you mean 'tune_s'?"),
        ("tune_s = -1", "c.toml: tune_s: '-1' is not a number from 0"),
        ("tune_s = nan", "c.toml: tune_s: 'nan' is not a number"),
        ("tune_s = true", "c.toml: tune_s: 'True' is not a number"),
        ("tune_s = " + "9" * 400, "c.toml: tune_s: '99"),
        ("copy_gb_s = 0", "c.toml: copy_gb_s: must be above 0"),
        ("[tune_s]", "c.toml: tune_s: '{}' is not a number"),
        ("tune_s = 1\ntune_s = 2", "c.toml: not TOML"),
        ("tune_s = 0x1" + "9" * 5000, "c.toml: tune_s: a number of 20001 bits"),
        ("x = " + "[" * 5000, "c.toml: not TOML"),
    ],
)
def test_wrong_costs_are_named(text: str, said: str) -> None:
    assert refusal(read_costs, text, "c.toml").startswith(said)


# --- Failures --------------------------------------------------------------------------------------------

NODES = read_cluster("3x8:24:500", lanes=2)


def test_failures_come_in_order() -> None:
    text = "node,start_s,end_s\nn0002,50,60\nn0001,10,20\nn0001,20,30\n"
    assert read_failures(text, "f.csv", NODES) == (
        NodeFailure("n0001", 10, 20),
        NodeFailure("n0001", 20, 30),
        NodeFailure("n0002", 50, 60),
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("n1,0,1", "f.csv:2: node: there is no 'n1'; known here: n0001, n0002, n0003"),
        ("n003,0,1", "f.csv:2: node: there is no 'n003'; did you mean 'n0003'?"),
        ("n0001-l1,0,1", "f.csv:2: node: there is no 'n0001-l1'"),
        ("n0001,5,5", "f.csv:2: end_s: 5 is not after start_s, 5"),
        ("n0001,5,x", "f.csv:2: end_s: 'x' is not a number"),
        ("n0001,0,10\nn0001,9,12", "f.csv:3: n0001 is down already, until 10 by line 2"),
    ],
)
def test_wrong_failures_are_named(row: str, said: str) -> None:
    assert refusal(read_failures, "node,start_s,end_s\n" + row, "f.csv", NODES).startswith(said)


# --- Interference ----------------------------------------------------------------------------------------


def test_pairs_are_read_both_ways() -> None:
    pairs = read_interference("model,other,speed,other_speed\na,b,0.5,0.9\na,a,0.4,0.4\n", "i.csv")
    assert pairs == {("a", "b"): (0.5, 0.9), ("b", "a"): (0.9, 0.5), ("a", "a"): (0.4, 0.4)}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,b,0,1", "i.csv:2: speed: must be more than 0"),
        ("a,b,1,1.1", "i.csv:2: other_speed: '1.1' is not from 0 to 1"),
        ("a,,1,1", "i.csv:2: other: is empty"),
        ("a,b,1,0.5\nb,a,1,0.5", "i.csv:3: 'b' and 'a' have other speeds further up"),
        ("a,a,1,0.5", "i.csv:2: 'a' and 'a' have other speeds further up"),
    ],
)
def test_wrong_pairs_are_named(row: str, said: str) -> None:
    assert refusal(read_interference, "model,other,speed,other_speed\n" + row, "i.csv").startswith(said)


def test_two_copies_of_a_model_do_what_table_1_says() -> None:
    pairs = packing_pairs(table1_profiles(gandiva_table1()), gandiva_table1())
    for row in gandiva_table1():
        assert pairs[row.model, row.model] == pytest.approx((min(row.gain / 2, 1.0),) * 2)
    for (one, other), speeds in pairs.items():
        assert 0 < speeds[0] <= 1
        assert pairs[other, one] == speeds[::-1]
    winners = {row.model for row in gandiva_table1() if row.gain > 1}
    assert {one for one in winners if sum(pairs[one, one]) > 1} == winners
    assert sum(pairs["ResNet-50", "LSTM"]) < 1 < sum(pairs["VAE", "ResNet-50"])
