"""A failed test of the virtual machine shows Slurm's jobs and the journal: the machine is gone afterwards."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from virtual_machine import Machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    machine = getattr(item, "funcargs", {}).get("machine")
    if report.failed and report.when == "call" and isinstance(machine, Machine):
        report.sections += [("jobs in Slurm", machine.queue()), ("journal and jobs' output", machine.logs())]
    return report
