"""Rarer cases of sites and users, seconds to minutes each (`make test-sites`)."""

from __future__ import annotations

import pytest

from harness import Cluster

pytestmark = pytest.mark.sites


def test_a_warning_before_the_time_limit_reaches_the_script(shipped: Cluster) -> None:
    """Slurm looks for limits that come near every few seconds, so that the warning comes early."""
    command = "trap 'echo warned; exit 0' USR1; while :; do sleep 0.1; done"
    options = ("--gres=gpu:1", "--cadenza", "--mem=100", "--time=1", "--signal=B:USR1@55")
    job = shipped.sbatch(*options, command=command)
    shipped.wait_done(job)
    assert "warned" in shipped.log(job)
