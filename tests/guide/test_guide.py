"""The pages Install, A second lane and Maintain, executed block by block on a plain Slurm, and back to nothing.

With ``WAY=wheels``: the blocks of the page on wheels, and of Install.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from guide_blocks import HOSTS, OUTPUT, ROOT, Block, by_wheels, executed
from plain_site import SHARED, BlockFailedError, PlainSite, Site

from cluster import RELEASE, ClusterError, wait_for

pytestmark = [pytest.mark.packages, pytest.mark.timeout(900)]

INSTALL, WHEELS, *MORE = (ROOT / "docs" / f"{name}.md" for name in ("install", "wheels", "second-lane", "maintenance"))
BY_WHEELS = os.environ.get("WAY") == "wheels"
REPEATED = {
    "cadenza doctor": f"OK   plugin: for Slurm {re.escape(RELEASE)}",
    "cadenza top --once": r"▶ \d+ .*‖ \d+ |‖ \d+ .*▶ \d+ ",
    'cadenza why "$job"': "",
}
"""Last lines of blocks that a person repeats until the daemons have come so far, and what they then print."""
LEFT = """
find / -xdev '(' -path /proc -o -path /srv -o -path '*/units' -o -path /home ')' -prune -o -iname '*cadenza*' -print
getent passwd cadenza
grep -il cadenza -r /etc/slurm
"""
"""Files, users and lines of Slurm's with the name; `units` has the logs of the tests' systemctl, /home users' files."""
BEFORE: dict[str, str] = {}
PACKAGED = pytest.mark.skipif(BY_WHEELS, reason="WAY=wheels: without packages")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    one = PlainSite(f"guide{os.getpid()}", tmp_path_factory.mktemp("site"), wheels=BY_WHEELS)
    try:
        one.up()
        BEFORE.update(left_on(one))
        yield one
    finally:
        one.down()


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The outputs of the blocks so far."""
    return []


@pytest.mark.parametrize("block", by_wheels(INSTALL, WHEELS) if BY_WHEELS else executed([INSTALL]), ids=str)
def test_a_block_of_install_works(site: Site, block: Block, printed: list[str]) -> None:
    execute(site, block, printed)


def test_the_job_has_moved_and_says_so(site: Site) -> None:
    told = r"cadenza: moves to gpu2 .* checkpoint of step ([1-9]\d*) saved(.*\n)*cadenza: continues at step \1 "
    output = f"cat {SHARED}/slurm-*.out"
    wait_for("the job's output", lambda: re.search(told, site.said("ctl", output)), site.patience_s)
    site.said("ctl", "scancel --name=moves")


@pytest.mark.parametrize(
    ("machine", "unit"),
    [("ctl", "cadenzad.service"), ("gpu1", "cadenza-agent.service")]
    + ([] if BY_WHEELS else [("gpu1", "/usr/share/cadenza/slurmd@.service")]),
)
def test_systemd_accepts_the_unit_as_it_is_installed(site: Site, machine: str, unit: str) -> None:
    assert site.said(machine, f"systemd-analyze verify --man=no {unit}; echo $?") == "0\n"


@PACKAGED
def test_the_package_brings_a_man_page_and_completion(site: Site) -> None:
    page = "dpkg --fsys-tarfile /srv/cadenza/cadenza_*.deb | tar x --to-stdout ./usr/share/man/man1/cadenza.1.gz | zcat"
    assert "GPU sharing for Slurm" in site.said("ctl", page)
    complete = "source /usr/share/bash-completion/completions/cadenza; complete -p cadenza"
    assert "_cadenza_completion" in site.said("ctl", complete)
    words = "COMP_WORDS='cadenza keyg' COMP_CWORD=1 _CADENZA_COMPLETE=bash_complete cadenza"
    assert site.said("ctl", words).strip() == "plain,keygen"


@PACKAGED
@pytest.mark.parametrize("block", executed(MORE), ids=str)
def test_a_block_of_second_lane_and_maintain_works(site: Site, block: Block, printed: list[str]) -> None:
    execute(site, block, printed)


def execute(site: Site, block: Block, printed: list[str]) -> None:
    """Run a block, or compare its lines with the last output; repeat what a person repeats, until the deadline."""
    if block.title == OUTPUT:
        assert [line for line in block.text.splitlines() if line not in printed[-1].splitlines()] == []
        return
    wanted, first = REPEATED.get(block.text.splitlines()[-1]), len(printed)

    def good() -> bool:
        try:
            printed.append(site.execute(block))
        except BlockFailedError as failure:
            printed.append(str(failure))
            if wanted is None:
                raise
            return False
        return wanted is None or re.search(wanted, printed[-1]) is not None

    try:
        wait_for(block.text, good, 2 * site.patience_s, 1.0)
    except ClusterError as error:
        state = site.said("ctl", f"squeue; sinfo -N; {site.logs}")
        pytest.fail("\n".join([str(error), *printed[first:], state]))


def left_on(site: Site) -> dict[str, str]:
    """Return what has Cadenza's name on each machine, and Slurm's files."""
    found = {machine: site.said(machine, LEFT) for machine in ("ctl", *HOSTS)}
    return {**found, "slurm.conf": site.said("ctl", "cat /etc/slurm/slurm.conf /etc/slurm/gres.conf")}


@PACKAGED
def test_nothing_is_left(site: Site) -> None:
    assert left_on(site) == BEFORE
    site.wait_idle()
    command = "runuser -u alice -- srun --chdir=/tmp --gres=gpu:1 --mem=100 hostname"
    assert site.said("ctl", command).strip() in HOSTS
