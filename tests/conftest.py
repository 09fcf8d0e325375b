"""Two hypothesis profiles, and the figures that tests print.

``thorough`` is that of ``make test``, ``quick`` is for tests that name no number of examples. How long an example takes
says more about the machine than about us, so neither has a deadline.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", patient, max_examples=20)
settings.register_profile("thorough", patient, max_examples=100)
settings.load_profile("quick")

MEASURED = "measured"


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Take what a test has measured; it is printed at the end, whichever process the test ran in."""
    return lambda text: record_property(MEASURED, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    found = [
        (report.nodeid, text) for report in reports if report.when == "call"
        for name, text in report.user_properties if name == MEASURED
    ]  # fmt: skip
    if found:
        terminalreporter.section(MEASURED)
    for test, text in found:
        terminalreporter.write_line(f"{test}\n  {text}")
