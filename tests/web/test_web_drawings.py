"""cadenza web's drawings and grids as data, and what they cost a reader of the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from web_rig import cluster, job, record

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.idle_gpus import fits
from cadenza.policies.core.model import Gpu, JobKey
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, LeaseLog, Switched
from cadenza.slurm_plugin.service.store import reader
from cadenza.slurm_plugin.service.store.reader import Round, StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.views import cluster_view as view
from cadenza.slurm_plugin.web.gpu_grid import partition_rows, squares
from cadenza.slurm_plugin.web.timelines import Stretch, columns, timeline


def test_a_stretch_is_cut_at_the_ends_and_the_shortest_one_can_be_seen() -> None:
    found = timeline(
        [Stretch("a", -50.0, 50.0, 1, "x"), Stretch("a", 100.0, 100.01, 1, "y"), Stretch("a", 199.99, 300.0, 1, "z"),
         Stretch("a", 300.0, 400.0, 1, "later"), Stretch("unknown", 0.0, 1.0, 1, "no row")],
        ["a", "b"], 0.0, 200.0,
    )  # fmt: skip
    (name, bars), (other, none) = found.rows
    assert (name, other, none) == ("a", "b", ())
    assert [(bar.x, bar.width) for bar in bars] == [(0.0, 25.0), (50.0, 0.2), (99.8, 0.2)]
    assert [x for x, _ in found.ticks] == [0.0, 25.0, 50.0, 75.0]


def test_jobs_on_one_gpu_at_once_lie_above_each_other() -> None:
    both = [Stretch("a", 0.0, 10.0, 1, ""), Stretch("a", 5.0, 20.0, 2, ""), Stretch("a", 10.0, 20.0, 3, "")]
    assert [(bar.level, bar.levels) for bar in timeline(both, ["a"], 0.0, 20.0).rows[0][1]] == [(0, 2), (1, 2), (0, 2)]
    many = [Stretch("a", 0.0, 10.0, 1, "") for _ in range(9)]
    assert {bar.levels for bar in timeline(many, ["a"], 0.0, 20.0).rows[0][1]} == {4}


def test_columns_count_moments_and_leave_out_empty_parts() -> None:
    found = columns([0.0, 1.0, 9.9, 25.0, 40.0, -1.0], 0.0, 40.0, 4)
    assert [(bar.x, bar.height, bar.number) for bar in found] == [(0.0, 100.0, 3), (50.0, 100 / 3, 1)]
    assert columns([], 0.0, 40.0, 4) == ()


def test_gpus_of_jobs_without_an_agent_count_as_held_and_a_drained_host_is_closed_but_for_its_jobs() -> None:
    snapshot = cluster()
    unknown = replace(job(9, "eve", "held", (Gpu("n3", 0), Gpu("n3", 1))), lease=None)
    nodes = tuple(replace(node, gpus_used=3) if node.name == "n4" else node for node in snapshot.nodes)
    snapshot = replace(snapshot, jobs=(*snapshot.jobs, unknown), nodes=nodes)
    hosts = squares(snapshot, Memory(), view.gpu_rows(snapshot, {}))
    texts = {host.name: host.text for host in hosts}
    assert texts["n1"] == "8 GPUs: 8 held; jobs wait for a turn on 8"
    assert texts["n3"] == "8 GPUs: 2 held, 6 free although a job waits that fits"
    assert texts["n4"] == "8 GPUs: 3 held, 5 closed"
    assert {square.holder for host in hosts for square in host.squares if host.name == "n1"} == {1}
    assert not any(square.holder == 1 for host in hosts for square in host.squares if host.name != "n1")
    (row,) = partition_rows(snapshot, hosts)
    assert (row.hosts, row.gpus, row.held, row.free, row.closed) == (4, 32, 17, 10, 5)
    assert (row.running, row.waiting, row.queued) == (3, 1, 1)


def test_jobs_that_want_the_same_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(view, "fits", lambda *words: looks.append(1) or fits(*words))
    last = Round(1, 0.0, cluster(500), Memory(), Decision((), Memory()), Memory(), None, "")
    assert len(view.idle_and_waiting(last)[1]) == 502
    assert len(looks) == 2, "job 2 waits for eight GPUs, all others for two"


def test_a_job_shares_with_all_that_have_one_of_its_gpus() -> None:
    a, b, c = (tuple(Gpu("n1", at) for at in gpus) for gpus in ((0, 1), (1, 2), (2,)))
    jobs = [job(1, "u", "held", a), job(2, "u", "yielded", b), job(3, "u", "held", c), job(4, "u", None, ())]
    shares = view._shares(jobs)
    assert shares == {JobKey(1, 0): 0.5, JobKey(2, 0): pytest.approx(1 / 3), JobKey(3, 0): 0.5}


def test_days_of_older_rows_are_not_gone_through_and_a_late_one_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MANY_OLDER", 3)
    path = record(tmp_path)
    writer = SqliteStore(path, SystemClock())
    moments = (900.0, 100.0, 100.0, 100.0, 950.0, 100.0, 960.0)  # 900 is behind too many that are older
    rows = [Switched(VERSION, "n1", 1, 0, "yield", at_s, 0.1, 0.1, 0.2, 1) for at_s in moments]
    leases = [LeaseLog(VERSION, f"n{at % 2}", 1, 0, (0,), at_s - 1, at_s) for at, at_s in enumerate(moments)]
    writer._link.execute("DELETE FROM switches")
    writer._link.execute("DELETE FROM leases")
    writer.record([*rows, *leases])
    writer.close()
    with StoreReader(path) as found:
        assert [row.at_s for row in found.switches(500.0)] == [960.0, 950.0]
        assert [row.at_s for row in found.switches(500.0, limit=1)] == [960.0]
        assert len(found.switches(job=1)) == 7
        assert [row.to_s for row in found.leases(500.0, host="n0")] == [960.0, 950.0]
        assert found.leases(500.0, host="n1") == ()
        assert sum(row.gpu_s for row in found.job_hours(1)) > 0
        assert found.last_number() == 2
