"""The keeper of lanes over real processes: stand-ins for slurmd and scontrol that are called as Slurm's are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_rig import until

from cadenza.sidecar.agent.errors import LaneError
from cadenza.sidecar.agent.ipc.slurm_steps import Step
from cadenza.sidecar.agent.lanes import lane_files, lane_keeper
from cadenza.sidecar.agent.lanes.lane_files import lane_gres, own_settings
from cadenza.sidecar.agent.lanes.lane_keeper import LaneKeeper, slurmds
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import LaneOrder

LANE = LaneOrder("gpu1", 1, 6831, 16, 64000, 4, "a100", 101, known=True)
SLURMD = """#!/bin/sh
if [ "$STAND_IN" ]; then while :; do sleep 1; done; fi
echo "$@" >>{log}
if [ -e {broken} ]; then echo first >&2; echo "slurmd: fatal: no GPU" >&2; exit 1; fi
STAND_IN=1 setsid "$0" "$@" </dev/null >/dev/null 2>&1 &
"""
SCONTROL = """#!/bin/sh
if [ "$2" = config ]; then cat {settings}; else echo gpu1; echo gpu2; fi
"""


class Site:
    """One host with a site's configuration, and the keepers of one agent after the other."""

    def __init__(self, folder: Path) -> None:
        self.site, self.lanes = folder / "slurm", folder / "run" / "lanes"
        self.log, self.broken, self.settings = folder / "calls", folder / "broken", folder / "settings"
        self.site.mkdir()
        for name, text in (("slurm.conf", "ClusterName=t\n"), ("cgroup.conf", ""), ("gres.conf", "Name=gpu File=/x\n")):
            (self.site / name).write_text(text)
        self.settings.write_text("SlurmdSpoolDir          = /var/spool/slurmd\nAuthType = auth/munge\n")
        binaries = folder / "bin"
        binaries.mkdir()
        for name, text in (("slurmd", SLURMD), ("scontrol", SCONTROL)):
            (binaries / name).write_text(text.format(log=self.log, broken=self.broken, settings=self.settings))
            (binaries / name).chmod(0o755)
        self.path = f"{binaries}:/usr/bin:/bin"
        self.steps: list[Step] = []
        self.keeper = self.start()

    def start(self) -> LaneKeeper:
        self.keeper = LaneKeeper(self.lanes, SystemClock(), lambda: self.steps)
        return self.keeper

    def pid(self, but: int = 0) -> int:
        """Return the pid of the lane's slurmd in the keeper's eyes, once there is one that is not ``but``."""

        def found() -> int:
            there = (self.keeper._slurmds or {}).get("gpu1-l1")
            return there.pid if there is not None and there.pid != but else 0

        return int(until(found, f"a slurmd but {but}: {self.keeper.faults()}"))

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    found = Site(tmp_path)
    monkeypatch.setattr(lane_files, "SITE_FOLDERS", (found.site, tmp_path / "configless"))
    monkeypatch.setattr(lane_files, "BINARIES", found.path)
    monkeypatch.setattr(lane_keeper, "SYSTEMD", tmp_path / "no-systemd")
    monkeypatch.setattr(lane_keeper, "LOOK_S", 0.02)
    monkeypatch.setattr(lane_keeper, "RETRY_S", 0.1)
    yield found
    found.keeper.close()
    for slurmd in slurmds(found.lanes).values():
        os.kill(slurmd.pid, signal.SIGKILL)


def test_a_lane_lives_from_its_order_until_it_is_ordered_no_more(site: Site) -> None:
    site.keeper.order((LANE,))
    first, folder = site.pid(), site.lanes / "gpu1-l1"
    assert site.calls() == [f"-f {folder}/slurm.conf -Z -N gpu1-l1 --conf {LANE.hardware}"]
    assert (folder / "cgroup.conf").readlink() == site.site / "cgroup.conf"
    assert (
        folder / "slurm.conf"
    ).read_text() == f"Include {site.site}/slurm.conf\nSlurmdSpoolDir=/var/spool/slurmd.%n\n"
    assert (folder / "gres.conf").read_text() == "Name=gpu File=/x\n"
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "gres.conf")] == [
        0o755, 0o755, 0o644,
    ]  # fmt: skip
    # A file that the site adds is there for the next reconfigure.
    (site.site / "topology.conf").write_text("SwitchName=rack Nodes=gpu1\n")
    until((folder / "topology.conf").exists, "the link to a new file")
    # A killed slurmd is started again, a killed agent finds the one that runs.
    os.kill(first, signal.SIGKILL)
    second = site.pid(but=first)
    site.keeper.close()
    site.start().order((LANE,))
    assert (site.pid(), len(site.calls())) == (second, 2)
    # A job on the lane keeps it, even against the first order of an agent; a job of lane 0 does not.
    site.keeper.close()
    site.start()
    site.steps = [Step(7, "gpu1-l1", 1, 1, ""), Step(8, "gpu1", 1, 1, "")]
    site.keeper.order(())
    until(site.keeper.faults, "a fault")
    assert site.keeper.faults() == ("gpu1-l1: its slurmd is to end, and job 7 is still there",)
    assert site.pid() == second
    site.steps = [Step(8, "gpu1", 1, 1, "")]
    until(lambda: not slurmds(site.lanes) and not folder.exists() and not site.keeper.faults(), "the lane's end")


def test_a_lane_that_cannot_be_opened_is_a_fault_until_it_can(site: Site) -> None:
    site.broken.touch()
    site.keeper.order((LANE,))
    until(site.keeper.faults, "a fault")
    assert site.keeper.faults() == ("gpu1-l1: it cannot be opened: slurmd: slurmd: fatal: no GPU",)
    site.broken.unlink()
    site.pid()
    until(lambda: not site.keeper.faults(), "no fault")


def test_a_slurmd_that_slurm_does_not_know_is_started_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once if Slurm has forgotten it; after a while if Slurm has never had it."""
    unknown = msgspec.structs.replace(LANE, known=False)
    site.keeper.order((LANE,))
    first = site.pid()
    site.keeper.order((unknown,))
    second = site.pid(but=first)
    monkeypatch.setattr(lane_keeper, "UNKNOWN_S", 0.05)
    assert site.pid(but=second)


def test_a_configuration_that_needs_nothing_is_a_link_and_configless_hosts_have_the_key_elsewhere(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.settings.write_text("SlurmdSpoolDir = /var/spool/slurmd.%n\nAuthInfo = (null)\nAuthType = auth/munge\n")
    cache = tmp_path / "cache"
    site.site.rename(cache)
    site.site.mkdir()
    (site.site / "slurm.key").touch()
    monkeypatch.setattr(lane_files, "SITE_FOLDERS", (site.site, cache))
    conf = lane_files.prepare(site.lanes / "gpu1-l1", LANE)
    assert conf.readlink() == cache / "slurm.conf"
    assert (conf.parent / "slurm.key").readlink() == site.site / "slurm.key"
    (cache / "slurm.conf").unlink()
    with pytest.raises(LaneError, match=r"no slurm\.conf in"):
        lane_files.prepare(site.lanes / "gpu1-l1", LANE)


def test_own_settings_are_those_that_two_slurmds_cannot_share() -> None:
    plain = {
        "SlurmdSpoolDir": "/s", "SlurmdPidFile": "/p.%n", "SlurmdLogFile": "(null)",
        "AuthType": "auth/slurm", "AuthInfo": "cred_expire=9",
    }  # fmt: skip
    assert own_settings(plain) == ["SlurmdSpoolDir=/s.%n", "AuthInfo=cred_expire=9,disable_sack"]
    assert own_settings({"AuthType": "auth/slurm", "AuthInfo": "(null)"}) == ["AuthInfo=disable_sack"]
    assert own_settings({"AuthType": "auth/munge", "AuthInfo": "socket=/m"}) == []


def test_the_gpus_of_a_lane_are_those_of_lane_0() -> None:
    text = (
        "# NodeName=gpu1 of last year\nAutoDetect=off\n"
        "NodeName=gpu[1-2] Name=gpu Type=a100 \\\nFile=/dev/nvidia[0-3] # four\n"
        "nodename=gpu7 Name=gpu File=/dev/nvidia7\n"
    )

    def expand(names: str) -> list[str]:
        return {"gpu[1-2]": ["gpu1", "gpu2"]}.get(names, [names])

    assert lane_gres(text, "gpu1", expand) == "AutoDetect=off\nName=gpu Type=a100  File=/dev/nvidia[0-3]\n"
    for bad, words in ((text[text.index("nodename") :], "no line with the GPUs of gpu1"), ("Include /x\n", "Include")):
        with pytest.raises(LaneError, match=words):
            lane_gres(bad, "gpu1", expand)
