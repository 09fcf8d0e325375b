"""Two hypothesis profiles, the figures that tests print, and the time of each test.

``quick`` is the profile of the fast ring, where tests that name a number of random cases draw a fifth of them, and
``thorough`` that of the slow ring and of ``make fuzz``. The duration of a case depends on the machine, so neither has
a deadline.
"""

import gc
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = 5
settings.register_profile("quick", patient, max_examples=QUICK, database=None)
settings.register_profile("thorough", patient, max_examples=100)
settings.load_profile("quick")

MEASURED = "measured"
NUMBER = "_hypothesis_internal_use_settings"
"""The attribute in which hypothesis keeps the settings of a test; it has no public way to change them."""
COMPUTING = "computing"
GROUPS = {
    "test_packing": COMPUTING,
    "test_tuning": COMPUTING,
    "test_turns": COMPUTING,
    "test_gpu_memory": "one GPU",
    "test_lanes": "one GPU",
    "test_agent_tuning_job": "cgroups",
    "test_agent_tuning_v1": "cgroups",
    "test_agent_driver_inspection": "cgroups",
    "test_limits": "cgroups",
    "test_spank_leftover": "cgroups",
    "test_integrations_callbacks": "frameworks",
    "test_integrations_jobs": "frameworks",
    "test_integrations_requested": "frameworks",
}
"""Files whose tests one process takes, one after the other: their jobs compute at full speed while the other cluster's
jobs mostly wait; they share a cluster of their own; they make Slurm's control groups on this machine, of which an agent
sees all; or they import the frameworks, which takes longer than many a test."""
LONGEST = (
    "test_faults", "test_hostile", COMPUTING, "test_elastic", "test_site_rules", "one GPU", "test_moves",
    "test_full_memory", "test_preemption", "test_gpu_acceptance", "test_profile_jobs", "frameworks", "cgroups",
    "test_agent_gpu_turns", "test_checkpoint_shards", "test_checkpoint_jobs",
)  # fmt: skip
"""Groups and files that begin first, or one process would still be busy with them when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and draw fewer cases than a test names under the quick profile."""
    items.sort(key=lambda item: LONGEST.index(group) if (group := group_of(item.path)) in LONGEST else len(LONGEST))
    if settings.get_current_profile_name() != "quick":
        return
    for test in {id(test): test for item in items if hasattr(test := getattr(item, "obj", None), NUMBER)}.values():
        named = getattr(test, NUMBER)
        setattr(test, NUMBER, fewer(named))
    for machine in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls is not None}:
        if isinstance(named := getattr(machine, "settings", None), settings):
            machine.settings = fewer(named)


def fewer(named: settings) -> settings:
    """Return settings with a fifth of the cases."""
    return settings(named, max_examples=min(named.max_examples, max(QUICK, named.max_examples // 5)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and tests that stay to the end."""
    gc.collect()
    gc.freeze()


def group_of(path: Path) -> str:
    """Return the name of the tests that one process takes: those of a file, or of several."""
    return GROUPS.get(path.stem, path.stem)


class GroupScheduling(LoadScopeScheduling):
    """Deals groups of files and then files, in the order of LONGEST (the marks of pytest-xdist need pytest < 9.2)."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(Path(nodeid.partition("::")[0]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Deal tests by GROUPS for ``--dist loadscope``."""
    if config.getoption("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a figure at the end, whichever process the test ran in."""
    return lambda text: record_property(MEASURED, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures, and write the times to the file that tests/rings.py asks for."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    figures = [
        (report.nodeid, text) for report in reports if report.when == "call"
        for name, text in report.user_properties if name == MEASURED
    ]  # fmt: skip
    if figures:
        terminalreporter.section(MEASURED)
    for test, text in figures:
        terminalreporter.write_line(f"{test}\n  {text}")
    if path := os.environ.get("CADENZA_TEST_TIMES"):
        times: Counter[str] = Counter()
        for report in terminalreporter.getreports("") + reports:
            times[report.nodeid.partition("@")[0]] += report.duration
        Path(path).write_text(json.dumps(times.most_common()))
