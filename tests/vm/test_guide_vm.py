"""The pages of the guide, executed on three machines with systemd and cgroup v2 in a virtual machine.

The blocks are run as in tests/guide/test_guide.py, which has containers. Each machine has a systemd, a disk and an
address of its own (systemd-nspawn), and all have the kernel of the virtual machine, so no machine boots a kernel by
itself. There is no network beyond them: the packages on which Cadenza's depend are on the disks from the beginning,
and those that the build machine makes are copied into the folder that all machines see. The jobs run longer than on the
pages: in emulation a look takes as long as a turn.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
import test_guide as guide
from plain_site import AS_USER, Site
from virtual_site import VirtualSite

from cluster import wait_for

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]

UNITS = [("ctl", "cadenzad"), ("gpu1", "cadenza-agent"), ("gpu1", "slurmd")]
printed = guide.printed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    one = VirtualSite(tmp_path_factory.mktemp("vm") / "console.log")
    try:
        one.up()
        guide.BEFORE.update(guide.left_on(one))
        yield one
    finally:
        one.down()


# --- The tests run in this order --------------------------------------------------------------------------------


def test_systemd_is_the_first_process_of_each_machine(site: Site) -> None:
    for machine in ("ctl", *guide.HOSTS):
        assert site.said(machine, "ps -p 1 -o comm=; stat -f -c %T /sys/fs/cgroup").split() == ["systemd", "cgroup2fs"]


test_a_block_of_install_works = guide.test_a_block_of_install_works
test_the_job_has_moved_and_says_so = guide.test_the_job_has_moved_and_says_so
test_systemd_accepts_the_unit_as_it_is_installed = guide.test_systemd_accepts_the_unit_as_it_is_installed


@pytest.mark.parametrize(("machine", "unit"), UNITS)
def test_a_unit_is_active_and_enabled(site: Site, machine: str, unit: str) -> None:
    assert site.said(machine, f"systemctl is-active {unit}; systemctl is-enabled {unit}").split() == [
        "active",
        "enabled",
    ]


def test_systemd_starts_an_agent_again_that_hangs(site: Site) -> None:
    shown = "systemctl show --value --property=MainPID,ActiveState cadenza-agent"
    before, _active = sorted(site.said("gpu2", shown).split())
    site.said("gpu2", f"kill -STOP {before}")

    def another() -> bool:
        number, active = sorted(site.said("gpu2", shown).split())
        return number != before and active == "active"

    wait_for("another agent", another, site.patience_s)
    assert "Watchdog timeout" in site.said("gpu2", "journalctl --no-pager -u cadenza-agent")


def test_a_relay_of_a_login_node_passes_questions_on_under_its_unit(site: Site) -> None:
    change = shlex.quote(r"s/^\[service\]/&\nrelays = ['gpu2']/")
    site.said("ctl", f"cd /etc/cadenza && cp -p cadenza.toml kept && sed -i {change} cadenza.toml")
    site.said("ctl", "systemctl reload cadenzad")
    # A host has no package with the users' commands, and nothing of one may be left on it.
    site.said("gpu2", "for deb in /srv/cadenza/cadenza{,-agent,-client}_*.deb; do dpkg -x $deb /tmp/commands; done")
    started = site.said("gpu2", "systemctl start cadenza-relay")
    active = site.said("gpu2", "systemctl is-active cadenza-relay cadenza-agent").split()
    assert active == ["active", "inactive"], started
    place = "PYTHONPATH=/tmp/commands/usr/lib/python3/dist-packages"
    words = ("python3", "-m", "cadenza.slurm_plugin.cli", "top", "--once", "--json")
    shown = shlex.join([*AS_USER, place, *words])

    def answered() -> bool:
        return '"gpus"' in site.said("gpu2", shown)

    wait_for("the service's answer to a user who has no job there", answered, site.patience_s)
    site.said("gpu2", "systemctl start cadenza-agent; rm -r /tmp/commands")
    site.said("ctl", "cd /etc/cadenza && mv kept cadenza.toml && systemctl reload cadenzad")


test_a_block_of_second_lane_and_maintain_works = guide.test_a_block_of_second_lane_and_maintain_works
test_nothing_is_left = guide.test_nothing_is_left
