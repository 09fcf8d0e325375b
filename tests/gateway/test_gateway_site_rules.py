"""The site's rules on priorities: as Slurm 26.05 prints them, bounded, and never a reason for a round to fail."""

from __future__ import annotations

import json
import logging
import os
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.model import SiteRules
from cadenza.slurm_plugin.gateway.site_rules import (
    MAX_LEVEL,
    SiteReader,
    cached_priorities,
    config_rules,
    fair_shares,
    qos_priorities,
    tiers,
)
from cadenza.slurm_plugin.gateway.translate import snapshot

CONFIG = """Configuration data as of 1795824652
AccountingStorageType   = accounting_storage/slurmdbd
PriorityParameters      = (null)
PriorityDecayHalfLife   = 7-00:00:00
PriorityFlags           = CALCULATE_RUNNING
PriorityMaxAge          = 1-12:00:00
PriorityType            = priority/multifactor
PriorityUsageResetPeriod = NONE
PriorityWeightAge       = 5000
PriorityWeightAssoc     = 0
PriorityWeightFairShare = 10000
PriorityWeightQOS       = 1000
PriorityWeightTRES      = CPU=1000,Mem=2000,GRES/gpu=3000
"""
PARTITIONS = """PartitionName=shared Nodes=node[1-2] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO TRES=cpu=48
PartitionName=urgent AllowGroups=ALL Nodes=node[1-2] PriorityJobFactor=9 PriorityTier=20 RootOnly=NO TRES=cpu=48
"""
QOS = "normal|0\nhigh|100\n"
SHARES = """Account|User|RawShares|NormShares|RawUsage|NormUsage|EffectvUsage|FairShare|LevelFS|GrpTRESMins|TRESRunMins
root|||0.000000|1251||1.000000||||cpu=0
 root|root|1|0.500000|0|0.000000|0.000000|1.000000|inf||cpu=0
 research||1|0.500000|1251|1.000000|1.000000||0.500000||cpu=0
  research|alice|1|0.250000|1251|1.000000|1.000000|0.250000|0.333333||cpu=0
  child||1|0.250000|0||0.000000||0.000000||cpu=0
"""
COMMANDS = {
    "scontrol show config": CONFIG,
    "scontrol --all --oneliner show partition": PARTITIONS,
    "sacctmgr --noheader --parsable2 show qos format=name,priority": QOS,
    "sshare --all --long --parsable2": SHARES,
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of what Slurm's commands print; one without its file fails."""
    for name in ("scontrol", "sacctmgr", "sshare"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nexec cat "{tmp_path}/{name} $*"\n')
        path.chmod(0o755)
    for words, text in COMMANDS.items():
        (tmp_path / words).write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def rules(raw: dict[str, Any]) -> SiteRules:
    """Return the rules as a round sees them, after the worker's JSON."""
    answer = {"time_s": 1.0, "nodes": [], "jobs": [], "site": raw}
    return snapshot(json.loads(json.dumps(answer, allow_nan=False))).site


def test_the_rules_are_read_as_slurm_has_them_in_force(slurm: Path) -> None:
    assert rules(SiteReader().read()) == SiteRules(
        multifactor=True,
        weights={"age": 5000, "fairshare": 10000, "qos": 1000, "tres": 6000},
        max_age_s=1.5 * 86400.0,
        tiers={"shared": 1, "urgent": 20},
        qos_priority={"normal": 0, "high": 100},
        fair_share={
            "root/root": MAX_LEVEL,
            "research": 0.5,
            "research/alice": 0.333333,
            "child": MAX_LEVEL,
        },
    )


@pytest.mark.parametrize("lost", COMMANDS)
def test_a_command_that_fails_leaves_the_last_answer(slurm: Path, lost: str, caplog: pytest.LogCaptureFixture) -> None:
    reader = SiteReader()
    before = reader.read()
    (slurm / lost).unlink()
    with caplog.at_level(logging.WARNING):
        assert [reader.read() for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1, "it is said once"
    first = SiteReader().read()
    assert set(before) - set(first) <= {"weights", "multifactor", "max_age_s", "tiers", "qos_priority", "fair_share"}
    assert len(rules(first).unread) == 1, "what was never read is known to be unknown"


def test_without_slurms_commands_the_rules_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rules(SiteReader().read()) == SiteRules(unread=("QOS", "partitions", "weights"))


CACHED = """\
Current Association Manager state

QOS Records

QOS=normal(1)
    UsageRaw=0.000000
    GrpJobs=N(1) GrpJobsAccrue=N(1) GrpSubmitJobs=N(2) GrpWall=N(0.00)
    PreemptMode=OFF
    Priority=0
    Account Limits
      research
        MaxJobsPA=N(1) MaxJobsAccruePA=N(1) MaxSubmitJobsPA=N(2)
    User Limits
      alice(2001)
        MaxJobsPU=N(1) MaxJobsAccruePU=N(1) MaxSubmitJobsPU=N(2)
QOS=high(2)
    UsageRaw=0.000000
    Priority=100
QOS=two words(3)
    Priority=7
    Account Limits
    User Limits
"""


def test_a_service_that_starts_without_slurmdbd_has_qos_from_slurmctld(slurm: Path) -> None:
    """As the second controller's, where slurmdbd was lost with the first: nobody made way until it was back."""
    before = SiteReader().read()
    next(slurm.glob("sacctmgr *")).unlink()
    (slurm / "scontrol show assoc_mgr flags=qos").write_text(CACHED)
    reader, whole = SiteReader(), before | {"qos_priority": {"normal": 0, "high": 100, "two words": 7}}
    assert reader.read() == whole
    next(slurm.glob("scontrol show assoc_mgr*")).unlink()
    assert reader.read() == whole, "it is asked once"


def test_a_site_without_accounting_has_neither_qos_nor_shares(slurm: Path) -> None:
    (slurm / "scontrol show config").write_text(CONFIG.replace("accounting_storage/slurmdbd", "(null)"))
    for name in ("sacctmgr", "sshare"):
        (slurm / name).unlink()
    found = rules(SiteReader().read())
    assert (found.unread, found.qos_priority, found.fair_share) == ((), {}, {})


def test_a_site_whose_fair_share_weighs_nothing_has_no_rule_on_it(slurm: Path) -> None:
    reader = SiteReader()
    assert reader.read()["fair_share"]
    (slurm / "scontrol show config").write_text(CONFIG.replace("10000", "0"))
    assert reader.read()["fair_share"] == {}


def test_priority_basic_is_no_multifactor() -> None:
    assert not config_rules(CONFIG.replace("priority/multifactor", "priority/basic"))["multifactor"]


def test_without_a_fair_tree_the_level_is_the_share_over_the_usage() -> None:
    text = "Account|User|NormShares|EffectvUsage|FairShare\nphysics||0.5|0.25|0.7\nart||0.5|0.000000|1.0\n"
    assert fair_shares(text)["fair_share"] == {"physics": 2.0, "art": MAX_LEVEL}


TEXT = st.text(st.sampled_from("Aa|=-,\n \x1b\u202e0159.einf") | st.characters(codec="utf-8"), max_size=80)


@given(TEXT, TEXT, st.sampled_from([*COMMANDS.values()]), st.integers(0, 200))
def test_whatever_a_command_prints_the_rules_are_bounded(first: str, middle: str, text: str, at: int) -> None:
    printed = first + text[:at] + middle + text[at:]
    for read in (tiers, qos_priorities, cached_priorities, fair_shares, config_rules):
        try:
            found = read(printed)
        except ValueError:
            continue
        for value in found.values():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                assert name.isprintable()
                assert len(name) <= 600
                assert isfinite(number)
                assert 0 <= number <= 1e12
