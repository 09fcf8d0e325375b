"""An admin's reservation of one lane, reboot of one node, and job_submit.lua beside Cadenza (docs/operation.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster import SHARED, wait_for
from harness import Cluster

pytestmark = pytest.mark.sites
ONE_GPU = ("--gres=gpu:1", "--cadenza")
CONF = "/etc/slurm/slurm.conf"
LUA = "/etc/slurm/job_submit.lua"
SITE_LUA = """\
dofile("/etc/slurm/cadenza.lua")
local cadenza = slurm_job_submit
function slurm_job_submit(job, partitions, uid)
  {before}
  local result = cadenza(job, partitions, uid)
  {after}
  return result
end
"""
REBOOTED = f"{SHARED}/rebooted"
REWRITE = 'job.comment = "project:42"'


@pytest.fixture
def site_lua(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose job_submit.lua a test replaces by a site's own."""
    cluster.ctl("cp", LUA, "/etc/slurm/cadenza.lua")
    yield cluster
    cluster.reset()
    cluster.ctl("mv", "/etc/slurm/cadenza.lua", LUA)
    cluster.ctl("scontrol", "reconfigure")


def test_a_native_job_enters_a_lane_that_the_reservation_does_not_name(cluster: Cluster) -> None:
    for nodes, started in (("node1", True), ("node1,node1-l1", False)):
        words = ("reservationname=course", f"nodes={nodes}", "users=bob", "starttime=now", "duration=10")
        cluster.ctl("scontrol", "create", "reservation", *words)
        try:
            job = cluster.paced("outside", iterations=10, options=(*ONE_GPU, "--nodelist=node1-l1"))
            if started:
                cluster.wait_done(job)
            else:
                wait_for("its reason", lambda job=job: "May_be_reserved" in cluster.job(job).get("Reason", ""))
        finally:
            cluster.reset()
            cluster.ctl("scontrol", "delete", "reservationname=course")


def test_a_comment_that_a_site_writes_first_is_kept(site_lua: Cluster) -> None:
    site_lua.put(LUA, SITE_LUA.format(before=REWRITE, after=""))
    job = site_lua.paced("first", iterations=10, options=ONE_GPU)
    assert site_lua.job(job)["Comment"].startswith('{"cadenza":{"v":1,"share":true}')
    assert "project:42" in site_lua.job(job)["Comment"]
    site_lua.wait_done(job)


def test_a_comment_that_a_site_writes_last_ends_the_sharing(site_lua: Cluster) -> None:
    """The agent has the job's own word that it shares until the service has told it what the comment says."""
    site_lua.put(LUA, SITE_LUA.format(before="", after=REWRITE))
    job = site_lua.paced("last", iterations=200, options=ONE_GPU)
    lease = wait_for("a lease of its own", lambda: (found := site_lua.lease(job)).get("exclusive") and found)
    assert site_lua.job(job)["Comment"] == "project:42"
    assert lease["why_not_ready"] == "it did not opt in"
    site_lua.wait_done(job)


@pytest.fixture(params=["at once", "with examples/site/reboot"])
def rebooting(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, bool]]:
    """The cluster with a RebootProgram, which notes the host's jobs where a host would reboot, and whether it waits."""
    waits = request.param != "at once"
    cluster.ctl("cp", CONF, "/tmp/slurm.conf")
    cluster.put("/etc/slurm/bin/systemctl", f"#!/bin/sh\n/opt/cadenza/bin/cadenza-agent --jobs --json >{REBOOTED}\n")
    program = "/src/examples/site/reboot" if waits else "systemctl reboot"
    cluster.put("/etc/slurm/reboot", f"#!/bin/sh\nPATH=/etc/slurm/bin:$PATH exec {program}\n")
    cluster.ctl("chmod", "755", "/etc/slurm/bin/systemctl", "/etc/slurm/reboot")
    cluster.ctl("sed", "-i", "$aRebootProgram=/etc/slurm/reboot", CONF)
    cluster.ctl("scontrol", "reconfigure")
    yield cluster, waits
    cluster.reset()
    cluster.ctl("rm", "-rf", REBOOTED, "/etc/slurm/bin", "/etc/slurm/reboot")
    cluster.ctl("cp", "/tmp/slurm.conf", CONF)
    cluster.ctl("scontrol", "reconfigure")


def test_a_reboot_of_one_node_and_the_job_on_the_other_lane(rebooting: tuple[Cluster, bool]) -> None:
    cluster, waits = rebooting
    job = cluster.paced("neighbor", iterations=250, options=("--gres=gpu:1", "--cadenza", "--nodelist=node1-l1"))
    wait_for("its first steps", lambda: cluster.lease(job).get("step"))
    cluster.ctl("scontrol", "reboot", "asap", "nextstate=resume", "reason=kernel", "node1")
    wait_for(
        "the lane's drain", lambda: "lane 0 of node1 is drained" in cluster.ctl("scontrol", "show", "node", "node1-l1")
    )
    found = wait_for("the reboot", lambda: cluster.exec("node1", "cat", REBOOTED, check=False).stdout)
    assert [row["job"] for row in json.loads(found)["rows"]] == ([] if waits else [job])
    cluster.wait_done(job)
    # A container does not boot: this slurmd only says that its host did.
    cluster.service("node1", "stop", "slurmd-lane0")
    cluster.exec("node1", "slurmd", "-N", "node1", "-b")
    wait_for("all lanes open", cluster.ready)
    cluster.exec("node1", "pkill", "-f", "slurmd -N node1 -b")
    cluster.service("node1", "start", "slurmd-lane0")
