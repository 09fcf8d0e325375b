"""watch: recorded answers of Slurm, what is added up over looks, the policy on virtual lanes, and the command."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import replace

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from watch_rig import AT_S, NODES, QUEUE, FakeSlurm, seen_by

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import SiteRules
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.cli.watch import watching
from cadenza.slurm_plugin.history.cluster_nodes import read_hosts, with_lanes
from cadenza.slurm_plugin.history.job_records import JobRecord
from cadenza.slurm_plugin.history.queue_answer import QueueJob, read_queue
from cadenza.slurm_plugin.simulations import watch_record
from cadenza.slurm_plugin.simulations.first_decision import as_if_managed, hidden_gpus, shipped_settings, steps
from cadenza.slurm_plugin.simulations.watch_record import add, begin, decode, encode
from cadenza.slurm_plugin.simulations.watch_view import Look, totals, view

JOBS = {job.record.job: job for job in read_queue(QUEUE, "F").jobs}
HOSTS = read_hosts(NODES, "F")


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return fake


def watch(*words: str) -> Result:
    return CliRunner().invoke(main, ["watch", *words])


# --- Slurm's answers -------------------------------------------------------------------------------------


def test_the_queue_has_each_job_with_its_times_and_its_place():
    runs, over, waits = JOBS[1], JOBS[3], JOBS[4]
    assert (runs.state, runs.placement, runs.record.gpus) == ("RUNNING", (("node1", 3),), 3)
    assert (runs.record.submit_s, runs.record.start_s, runs.record.end_s) == (1795600811, 1795600812, None)
    assert (over.state, over.record.start_s, over.record.end_s) == (None, 1795600812, 1795600813)
    # The start that Slurm expects of a job in the queue has not come.
    assert (waits.state, waits.reason, waits.record.start_s, waits.placement) == ("PENDING", "Resources", None, ())
    assert (JOBS[9].num_nodes, JOBS[9].record.gpus) == (2, 4)
    # Jobs 5 and 6 are held and depend on another one; 8 asks for no GPU.
    assert [number for number, job in JOBS.items() if job.waits] == [4, 7, 9]


def test_hosts_have_the_gpus_that_slurm_has_given_out():
    assert [(node.name, node.gpus, node.gpus_used, node.memory_used_mb) for node in HOSTS.nodes] == [
        ("node1", 4, 3, 600), ("node2", 4, 2, 300),
    ]  # fmt: skip
    drained = NODES.replace('"state":["MIXED","PLANNED"]', '"state":["MIXED","DRAIN"]', 1)
    assert [node.takes_jobs for node in read_hosts(drained, "F").nodes] == [False, True]
    assert view(look()._replace(hosts=read_hosts(drained, "F")), begin("w5plain", None, AT_S)).idle_gpus == 2
    # A further lane of a host counts with its host.
    lane = NODES.replace('"name":"node2"', '"name":"node1-l1"').replace('"hostname":"node2"', '"hostname":"node1"')
    lane = lane.replace('"lane0"', '"a"')
    merged = read_hosts(lane, "F")
    assert (len(merged.nodes), merged.nodes[0].gpus_used) == (1, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"jobs":[{}]}', r"`job_id` \(jobs\[0\]\)"),
        ('{"jobs":[{"job_id":-1,"job_state":["RUNNING"],"submit_time":{}}]}', r"job_id` \(job -1\)"),
        ('{"jobs":[{"job_id":1,"job_state":[],"submit_time":{}}]}', r"job_state` \(job 1\)"),
        ('{"jobs":[{"job_id":1,"job_state":["RUNNING"],"submit_time":{}}]}', "job 1 has no time of submission"),
        (QUEUE.replace("gres/gpu=3", "gres/gpu=x"), "'gres/gpu=x' is not NAME=COUNT"),
    ],
)
def test_a_wrong_job_costs_itself_and_is_named(text, message):
    found = read_queue(text, "F")
    assert re.search(f"jobs cannot be read: .*{message}", found.note)
    assert len(found.jobs) < len(json.loads(text)["jobs"])


def number(value: float) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


def waiting(job_id: int, **changes: object) -> dict[str, object]:
    """Return a pending job as squeue prints it where AccountingStorageTRES has no gres/gpu."""
    asked = {"tres_per_job": "gres/gpu:4", "tres_req_str": "cpu=1", "state_reason": "Resources", "partition": "gpu"}
    times = {"submit_time": number(int(AT_S)), "eligible_time": number(int(AT_S))}
    return {"job_id": job_id, "job_state": ["PENDING"], "priority": number(5), **asked, **times, **changes}


def test_without_gres_in_slurms_counts_and_under_constraints_the_gpus_are_still_known():
    """Most sites' slurmctld counts no GPUs by itself: such a full cluster was shown as idle."""
    nodes = [
        {"name": name, "cpus": 64, "real_memory": 9, "partitions": ["gpu"], "state": ["MIXED"], "tres_used": "cpu=1",
         "gres": f"gpu:{kind}:4", "gres_used": f"gpu:{kind}:{used}(IDX:0-3)", "features": [kind, "ib"]}
        for name, kind, used in (("g1", "h100", 4), ("g2", "a100", 0))
    ]  # fmt: skip
    has = {
        "gres_detail": ["gpu:h100:4(IDX:0-3)"],
        "nodes": "g1",
        "tres_alloc_str": "cpu=1",
        "start_time": number(int(AT_S)),
    }
    runs = waiting(1, job_state=["RUNNING"], **has)
    sockets = {"tres_per_job": "", "tres_per_socket": "gres/gpu:2", "sockets_per_node": number(2)}
    wants = [
        waiting(2, features="h100"), waiting(3, tres_per_job="gres/gpu:H100:4"), waiting(4, features="ib&h100|v100"),
        waiting(5, features="a100"), waiting(6, **sockets), waiting(7, state_reason="QOSMaxGRESPerUser"),
    ]  # fmt: skip
    hosts = read_hosts(json.dumps({"nodes": nodes}), "F")
    jobs = read_queue(json.dumps({"jobs": [runs, *wants]}), "F", hosts.site).jobs
    seen = view(look()._replace(hosts=hosts, jobs=jobs), begin("c", None, AT_S))
    assert (seen.gpus, seen.held_gpus, seen.idle_gpus, seen.hidden_gpus) == (8, 4, 4, 0)
    assert {row.job: row.fits for row in seen.waiting} == {2: False, 3: False, 4: False, 5: True, 6: True}
    only = view(look()._replace(hosts=hosts, jobs=jobs[:4]), begin("c", None, AT_S))
    assert (only.idle_waiting_gpus, seen.idle_waiting_gpus) == (0, 4)


def test_a_cloud_that_has_gone_to_sleep_is_no_error(slurm):
    nodes = json.loads(NODES)
    for node in nodes["nodes"]:
        node["state"] = ["IDLE", "CLOUD", "POWERED_DOWN"]
    slurm.answer(nodes=json.dumps(nodes))
    seen = watch("--once", "--json")
    assert seen.exit_code == 0, seen.output
    shown = json.loads(seen.stdout)
    assert (shown["gpus"], len(shown["waiting"])) == (0, 3)
    assert "powered down, and are left out: node1, node2." in " ".join(shown["notes"])


def test_a_reserved_host_has_no_idle_gpus():
    """Slurm gives them to no job at large: they are not idle beside the jobs that wait."""
    raws = json.loads(NODES)
    for raw, flag in zip(raws["nodes"], ("MAINTENANCE", "RESERVED"), strict=False):
        raw["state"] = ["IDLE", flag]
    hosts = read_hosts(json.dumps(raws), "F")
    assert [(node.takes_jobs, node.closed_reason) for node in hosts.nodes[:2]] == [
        (False, "is drained: Slurm shows it as MAINTENANCE"), (False, "is drained: Slurm shows it as RESERVED"),
    ]  # fmt: skip
    assert all(node.takes_jobs for node in with_lanes(hosts.nodes, 1)), "a what-if takes them all"


def test_another_answer_is_refused():
    with pytest.raises(InputError, match="F: not the JSON of squeue"):
        read_queue("{", "F")


KEYS = st.sampled_from(
    ["job_id", "job_state", "submit_time", "start_time", "end_time", "set", "number", "infinite", "tres_req_str",
     "tres_alloc_str", "gres_detail", "job_resources", "nodes", "allocation", "name", "priority", "node_count"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("RUNNING")
    | st.just("gres/gpu=2,mem=9P"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=8,
)  # fmt: skip


@given(VALUES, st.dictionaries(KEYS, VALUES, max_size=5))
def test_hostile_answers_and_files_raise_the_decoders_error_only(value, changes):
    job = json.loads(QUEUE)["jobs"][0] | changes
    node = {"name": "n", "cpus": 8, "real_memory": 9, "gres": "gpu:2", "tres_used": value, "alloc_memory": value}
    for read in (
        lambda: read_queue(json.dumps({"jobs": [value, job]}), "F"),
        lambda: read_queue(json.dumps({"jobs": [job]}), "F"),
        lambda: read_hosts(json.dumps({"nodes": [node]}), "F"),
        lambda: decode(json.dumps(json.loads(encode(begin("c", None, 1.0))) | {"hours": [value]}).encode(), "F"),
    ):
        try:
            read()
        except InputError:
            continue


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.dictionaries(KEYS, VALUES, max_size=5))
def test_no_answer_makes_a_file_that_cannot_be_read_again(first, second):
    record = begin("c", None, AT_S)
    for at, changes in enumerate((first, second, {})):
        try:
            jobs = read_queue(json.dumps({"jobs": [json.loads(QUEUE)["jobs"][at % 2] | changes]}), "F").jobs
        except InputError:
            continue
        record = add(record, AT_S + 60.0 * at, jobs, 1)
        view(Look(AT_S, "c", "none", HOSTS, jobs), record)
        assert decode(encode(record), "F") == record


def test_a_start_in_the_second_in_which_the_watch_began_counts():
    record = add(begin("c", None, 1000.9), 1000.9, queue(job(1, 990.0)), 0)
    record = add(record, 1060.0, queue(job(1, 990.0, 1000.0)), 0)
    assert [row.started for row in totals(record).widths] == [1]


def test_a_submission_that_slurm_dates_after_the_start_is_kept_readable():
    late = job(1, 1200.0, 1100.0)
    record = add(begin("c", None, 1000.0), 1200.0, queue(late), 0)
    record = add(record, 1260.0, queue(replace(late, end_s=1250.0)), 0)
    assert [(run.submit_s, run.start_s) for run in decode(encode(record), "F").runs] == [(1100.0, 1100.0)]


# --- The sums --------------------------------------------------------------------------------------------


def queue(*jobs: JobRecord) -> list[QueueJob]:
    """Return jobs in the state that their times tell."""
    return [
        QueueJob(job, None if job.end_s else "RUNNING" if job.start_s else "PENDING", "" if job.start_s else "Priority",
                 1)
        for job in jobs
    ]  # fmt: skip


def job(number: int, submit_s: float, start_s: float | None = None, end_s: float | None = None) -> JobRecord:
    return JobRecord(number, "ada", "gpu", submit_s, start_s, end_s, 0.0, 600.0, 2, 100.0, 1)


def test_waits_and_idle_hours_add_up_over_looks_and_restarts():
    waits = queue(job(1, 3000.0), job(2, 3000.0))
    record = begin("c", None, 3500.0)
    for at_s, jobs, idle in (
        (3500.0, waits, 3),  # the first look counts nothing
        (3560.0, waits, 2),  # 60 s with two idle GPUs and two jobs that wait
        (3620.0, waits[:1], 5),  # the smaller numbers of both looks: two GPUs, one job
        (9999.0, waits, 5),  # a gap is not counted
        (9990.0, waits, 5),  # nor is a clock that was set back
        (10050.0, waits, 1),
    ):
        record = decode(encode(add(record, at_s, jobs, idle)), "F")
    hours = {row.hour: (row.watched_s, row.idle_gpu_s, row.waiting_job_s) for row in record.hours}
    assert hours == {
        0: (pytest.approx(100.0), pytest.approx(200.0), pytest.approx(160.0)),
        1: (pytest.approx(20.0), pytest.approx(40.0), pytest.approx(20.0)),
        2: (pytest.approx(60.0), pytest.approx(60.0), pytest.approx(120.0)),
    }
    assert totals(record).idle_gpu_s == pytest.approx(300.0)


def test_each_run_is_kept_once_with_its_end():
    record = begin("c", None, 1000.0)
    early, late = job(1, 900.0, 950.0, 990.0), job(9, 900.0)
    record = add(record, 1000.0, queue(early, job(2, 900.0, 950.0), job(3, 910.0, 960.0), job(4, 920.0, 970.0)), 0)
    assert record.runs == ()  # what ended before the watch began was not watched
    # 2 has ended; slurmctld has forgotten 3; 4 was requeued and runs again; 5 came and went between the looks.
    seen = queue(job(2, 900.0, 950.0, 1030.0), job(4, 980.0, 1010.0), job(5, 1001.0, 1002.0, 1003.0), late)
    record = add(record, 1060.0, seen, 0)
    ends = {(run.job, run.start_s): run.end_s for run in record.runs}
    assert ends == {(2, 950.0): 1030.0, (3, 960.0): 1060.0, (4, 970.0): 1060.0, (5, 1002.0): 1003.0}
    assert add(record, 1120.0, seen, 0).runs == record.runs
    sums = totals(record)
    assert sums.ended == 4
    assert sums.mean_bounded_slowdown == pytest.approx((130 / 80 + 150 / 100 + 140 / 90 + 1) / 4)
    (width,) = sums.widths
    assert (width.width, width.started, width.wait_s) == ("2 to 7 GPUs", 2, pytest.approx((30 + 1) / 2))


def test_the_file_has_bounds(monkeypatch):
    monkeypatch.setattr(watch_record, "MAX_RUNS", 3)
    monkeypatch.setattr(watch_record, "MAX_HOURS", 2)
    record = begin("c", None, 0.0)
    for at in range(5):
        ended = queue(job(at + 1, 3600.0 * at, 3600.0 * at, 3600.0 * at + 1))
        record = add(add(record, 3600.0 * at, ended, 1), 3600.0 * at + 200.0, ended, 1)
    assert [run.job for run in record.runs] == [3, 4, 5]
    assert (record.dropped, [row.hour for row in record.hours]) == (2, [3, 4])


# --- The first decision ------------------------------------------------------------------------------------


def look(user: str | None = None, at_s: float = AT_S, private: str = "none") -> Look:
    jobs = read_queue(QUEUE if user is None else seen_by(user), "F").jobs
    return Look(at_s, "w5plain", private, HOSTS, jobs)


def test_idle_gpus_and_the_jobs_that_could_share_them():
    shown = view(look(), begin("w5plain", None, AT_S))
    assert (shown.gpus, shown.held_gpus, shown.idle_gpus, shown.hidden_gpus) == (8, 5, 3, 0)
    # Three GPUs are idle, but one and two on a host; jobs that wait need three, four and two times two.
    assert shown.idle_waiting_gpus == 0
    rows = {row.job: (row.gpus, row.fits) for row in shown.waiting}
    assert rows == {4: (3, False), 7: (4, False), 9: (4, False)}
    four, two = (f'"tres_req_str":"cpu=1,mem=300M,node=1,billing=1,gres/gpu={gpus}"' for gpus in (4, 2))
    smaller = read_queue(QUEUE.replace(four, two), "F").jobs
    fits = view(look()._replace(jobs=smaller), begin("w5plain", None, AT_S))
    assert fits.idle_waiting_gpus == 3
    assert [row.job for row in fits.waiting if row.fits] == [7]


SITE = SiteRules(weights={"age": 1_000})


def test_the_policy_decides_as_if_all_jobs_took_part():
    later = as_if_managed(look().jobs, HOSTS, {}, AT_S + 50_000.0, SITE)
    found = {step.job: (step.action, step.reason) for step in steps(later, shipped_settings(HOSTS.nodes))}
    assert {number: action for number, (action, _) in found.items()} == {1: "make way", 2: "make way"}
    assert "makes way for job 4, which is next in Slurm's queue" in {reason for _, reason in found.values()}


def test_without_weights_nobody_makes_way_and_the_look_says_why():
    shown = view(look(at_s=AT_S + 50_000.0)._replace(site=SiteRules()), begin("w5plain", None, AT_S))
    assert shown.steps == ()
    assert "all of the site's priority weights are 0" in shown.notes[0]


def test_gpus_of_hidden_jobs_are_left_alone_and_said():
    alice = look("alice", AT_S + 50_000.0, "jobs")
    hidden = hidden_gpus(alice.jobs, HOSTS)
    assert hidden == {"node2": 2}
    shown = view(alice, begin("w5plain", None, AT_S))
    assert (shown.hidden_gpus, shown.idle_gpus) == (2, 3)
    assert [step.job for step in shown.steps] == [1], "a hidden job keeps its GPUs on node2"
    assert "PrivateData = jobs may hide jobs of other users: 2 of the GPUs in use are theirs" in shown.notes[0]
    snapshot = as_if_managed(alice.jobs, HOSTS, hidden, AT_S, SITE)
    (theirs,) = [job.lease for job in snapshot.jobs if not job.opted_in]
    assert (theirs.exclusive, len(theirs.gpus)) == (True, 2)


def test_without_gpus_in_the_accounted_resources_the_lists_of_gres_tell():
    queue, nodes = json.loads(QUEUE), json.loads(NODES)
    for one in queue["jobs"]:
        for name in ("tres_req_str", "tres_alloc_str"):
            one[name] = re.sub(",gres/gpu[^,]*", "", one[name])
    for one in nodes["nodes"]:
        one["tres_used"] = re.sub(",gres/gpu[^,]*", "", one["tres_used"])
    assert [(node.gpus_used) for node in read_hosts(json.dumps(nodes), "F").nodes] == [3, 2]
    jobs = {job.record.job: job for job in read_queue(json.dumps(queue), "F").jobs}
    assert {number: job.record.gpus for number, job in jobs.items()} == {
        number: job.record.gpus for number, job in JOBS.items()
    }


# --- The command -----------------------------------------------------------------------------------------


def test_the_command_asks_only_and_adds_to_its_file(slurm, tmp_path):
    first = watch("--once", "--json")
    assert first.exit_code == 0, first.output
    shown = json.loads(first.stdout)
    assert (shown["schema"], shown["cluster"], shown["idle_gpus"]) == ("cadenza.watch/1", "w5plain", 3)
    file = tmp_path / "state" / "cadenza" / "watch-w5plain.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # The next look is a minute later: the file goes back by one.
    record = decode(file.read_bytes(), "F")
    file.write_bytes(encode(msgspec.structs.replace(record, at_s=record.at_s - 60.0)))
    second = watch("--once")
    assert second.exit_code == 0, second.output
    assert "If all jobs kept checkpoints, Cadenza would now let:" in second.stdout
    sums = totals(decode(file.read_bytes(), "F"))
    assert sums.waiting_job_s == pytest.approx(3 * 60.0, rel=0.2)
    assert set(slurm.calls) == {
        "scontrol ping --json=list", "scontrol show config", "scontrol --all show node --json=v0.0.45",
        "squeue --all --states=all --json=v0.0.45",
    }  # fmt: skip


def test_a_host_of_two_partitions_hides_nothing_from_either(slurm):
    slurm.answer(queue=QUEUE.replace('"partition":"shared"', '"partition":"other"', 1),
                 nodes=NODES.replace('["shared"]', '["other","shared"]'))  # fmt: skip
    shown = json.loads(watch("--once", "--json", "--partition", "shared").stdout)
    assert (shown["held_gpus"], shown["hidden_gpus"]) == (5, 0)


def test_it_goes_on_while_slurm_does_not_answer(slurm):
    seen = watching.Watch(None, None)
    with seen.locked():
        looks = seen.looks(0.0)
        assert next(looks).idle_gpus == 3
        (slurm.folder / "scontrol").write_text("#!/bin/sh\necho slurmctld is away >&2\nexit 1\n")
        away = next(looks)
        assert away.idle_gpus == 3
        assert "slurmctld is away" in away.notes[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "w.json: not JSON"),
        ('{"cluster":"c"}', "w.json: .*partition"),
        ('{"cluster":"c","partition":null,"since_s":-1,"at_s":0}', "w.json: .*since_s"),
        ('{"cluster":"c","partition":null,"since_s":0,"at_s":0,"hours":[[1,2]]}', r"w.json: .*hours"),
        ('{"cluster":"c","partition":null,"since_s":0,"at_s":0}', "w.json: cluster: 'c' was watched, not 'w5plain'"),
        ('{"cluster":"w5plain","partition":"x","since_s":0,"at_s":0}', "w.json: partition: 'x' was watched"),
        ('{"cluster":"w5plain","partition":null,"since_s":0,"at_s":0,"runs":[[1,"a","p",9,8,7,0,null,1,null,1]]}',
         r"w.json: runs\[0\]: job 1 ends before it starts"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_and_exit_code_2(slurm, tmp_path, content, message):
    (tmp_path / "w.json").write_text(content)
    result = watch("--once", "--state", str(tmp_path / "w.json"))
    assert result.exit_code == 2, result.output
    assert result.output.count("\n") == 1
    with pytest.raises(InputError, match=message), watching.Watch(None, tmp_path / "w.json").locked():
        pass
    assert (tmp_path / "w.json").read_text() == content


def test_wrong_words_wrong_answers_and_a_second_watch(slurm, tmp_path):
    for words, code, message in (
        (("--partition", "other"), 2, "no node of partition 'other' has GPUs"),
        (("--html", "no/folder/x.html"), 2, "--html: 'no/folder/x.html' is not a file in a folder that exists"),
        (("--html", str(tmp_path / "x.html")), 2, "no page yet; let `cadenza watch` run"),
    ):
        result = watch("--once", *words)
        assert (result.exit_code, message in result.output) == (code, True), result.output
    with watching.Watch(None, None).locked():
        assert "another cadenza watch writes it" in watch("--once").output
    slurm.answer(queue='{"jobs":[{"job_id":"x"}]}')
    shown = json.loads(watch("--once", "--json").stdout)
    assert "squeue: 1 jobs cannot be read: " in " ".join(shown["notes"])


def test_a_machine_without_slurm_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = watch("--once")
    assert (result.exit_code, "scontrol is not installed here" in result.output) == (3, True)


@pytest.mark.slow
def test_the_page_is_that_of_a_what_if_of_the_runs_watched(slurm, tmp_path):
    now_s = SystemClock().now()
    record = begin("w5plain", None, now_s - 50_000.0)
    times = [now_s - 40_000.0 + 100 * n for n in range(20)]
    runs = [job(n, at_s, at_s + 1_000.0, at_s + 2_000.0) for n, at_s in enumerate(times)]
    record = add(record, now_s - 60.0, queue(*(replace(run, partition="shared") for run in runs)), 0)
    state, page = tmp_path / "w.json", tmp_path / "page.html"
    state.write_bytes(encode(record))
    result = watch("--state", str(state), "--html", str(page), "--json")
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "What if: 20 jobs" in text
    assert "Watched for 0.0 hours" in text
    assert "50 % can move" in text
    assert "Not usable yet: a verdict needs 100 jobs that ended, and there are 20." in text
    assert '<body class="unsure">' in text
    assert f"cadenza watch --state={state}" in text
