"""``cadenza host``: Slurm's commands, what becomes of the jobs, and what is taken back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_rig import cluster, fill, job, write_config
from click.testing import CliRunner

from cadenza.slurm_plugin.cli import host_command
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.gateway.json_source import SlurmCommands

SAVES = job(1, "train", "held", run_s=60.0, time_limit_s=3600.0)
SAVES = replace(SAVES, lease=replace(SAVES.lease, checkpoints=True))
STAYS = job(2, "shell", None, options=None, run_s=60.0, time_limit_s=3600.0)
FREE, LANE = cluster().nodes


class Site:
    """Slurm's side: one host as ``lanes`` has it, and every command that changes something."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = write_config(tmp_path, 'mode = "apply"')
        fill(self.config, replace(cluster(SAVES, STAYS), time_s=time.time()), apply=True)
        self.nodes = [FREE, LANE]
        self.reservations: list[str] = []
        self.said: list[str] = []
        monkeypatch.setattr(host_command, "lanes_of", lambda _slurm, hosts: dict.fromkeys(hosts, self.nodes))
        monkeypatch.setattr(SlurmCommands, "reservations", lambda _self: [{"name": one} for one in self.reservations])
        monkeypatch.setattr(SlurmCommands, "node", lambda _self, _name: type("N", (), {"state": "IDLE+DRAIN"}))
        monkeypatch.setattr(host_command, "run", self.command)

    def command(self, *words: str) -> str:
        if words[0] != "squeue":
            self.said.append(" ".join(words))
        return ""

    def run(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, ["host", *words, "--config", str(self.config)])
        assert done.exit_code == code, done.output
        return done.output

    def drained(self, reason: str) -> None:
        self.nodes = [replace(FREE, drained=True, drain_reason=reason), LANE]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_a_drain_names_who_leaves_and_who_stays_until_when(site: Site) -> None:
    said = site.run("drain", "n1", "--reason", "fan")
    assert "job 1 (ada, train) on n1: saves and leaves" in said
    assert "job 2 (ada, shell) on n1-l1: stays, until " in said
    assert "at the latest: it did not opt in" in said
    assert site.said == ["scontrol update NodeName=n1 State=DRAIN Reason=cadenza host: fan"]


def test_a_dry_run_prints_the_same_and_changes_nothing(site: Site) -> None:
    said = site.run("reboot", "n1", "--reason", "kernel", "--dry-run")
    assert "job 1 (ada, train) on n1: saves and leaves" in said
    assert "scontrol reboot ASAP nextstate=RESUME 'reason=cadenza host: kernel' n1" in said
    assert site.said == []


def test_all_hosts_are_drained_before_one_of_them_is_waited_for(site: Site) -> None:
    site.run("reboot", "n1", "n2", "--reason", "kernel")
    assert [words.split()[1] for words in site.said] == ["update", "update", "reboot", "reboot"]


def test_a_maintenance_reserves_all_lanes_and_spares_jobs_that_end_before(site: Site) -> None:
    said = site.run("maintenance", "n1", "--reason", "fan", "--during", "2099-01-01T08:00/4h")
    assert "job 1 (ada, train) on n1: ends before, until " in said
    (words,) = site.said
    assert "ReservationName=cadenza_n1 StartTime=2099-01-01T08:00:00 Duration=240" in words
    assert words.endswith("Flags=MAINT,IGNORE_JOBS Nodes=n1,n1-l1 Comment=fan")


def test_undrain_takes_back_only_what_this_command_set(site: Site) -> None:
    site.drained("cadenza host: fan")
    site.reservations = ["cadenza_n1", "cadenza_n2", "theirs"]
    site.run("undrain", "n1")
    assert site.said == ["scontrol delete ReservationName=cadenza_n1", "scontrol update NodeName=n1 State=UNDRAIN"]
    site.said.clear()
    site.reservations = []
    site.drained("fan broken")
    assert "n1 stays drained, by another hand: fan broken" in site.run("undrain", "n1")
    assert "n1 is drained already, by another hand" in site.run("drain", "n1", "--reason", "x", code=1)
    assert site.said == []


def test_without_a_service_that_acts_no_job_leaves(site: Site) -> None:
    fill(site.config, replace(cluster(SAVES), time_s=1000.0), apply=True)
    said = site.run("drain", "n1", "--reason", "fan")
    assert "until cadenzad runs no job leaves, and no further lane is drained" in said
    assert "job 1 (ada, train) on n1: stays, until" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("drain", "n1"), "drain needs a --reason"),
        (("maintenance", "n1", "--reason", "x"), "maintenance needs a time"),
        (("drain", "n1", "--reason", "x", "--during", "4h"), "nothing else has one"),
        (("maintenance", "n1", "--reason", "x", "--during", "long"), "give 90m, 4h or 2d"),
    ],
)
def test_wrong_words_are_refused(site: Site, words: tuple[str, ...], said: str) -> None:
    assert said in site.run(*words, code=2)
    assert site.said == []
