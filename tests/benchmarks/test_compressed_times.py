"""The names of compressed_times.py against the policy: a replay would show a time that is not divided as a defect."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

import pytest
from compressed_times import TIMES

from cadenza.policies.sharing import preemption

LEFT = {
    "AGAIN_S",  # follows COST_S
    "CALC_PERIOD_S",  # the simulator's rounds alone
    "NO_LIMIT_S",  # longer than anything else
    "BELIEVED_S",  # the jobs of a replay have one name
    "NEWS_S",
}


@pytest.mark.parametrize("module", TIMES)
def test_each_name_is_a_time_of_its_module_that_a_factor_changes(module: str) -> None:
    before = vars(import_module(module))
    after = dict(before)
    for name, form in TIMES[module].items():
        exec(f"{name} = {form.format(name=name, factor=48.0)}", after)  # noqa: S102 (as the cluster runs it)
    assert all(after[name] != before[name] for name in TIMES[module])


def test_each_long_time_of_the_stage_is_divided_or_known_to_stay() -> None:
    found = set()
    for info in pkgutil.iter_modules(preemption.__path__):
        name = f"{preemption.__name__}.{info.name}"
        module = import_module(name)
        source = Path(str(module.__file__)).read_text()
        found |= {key for key, value in vars(module).items() if key.endswith("_S") and f"\n{key} = " in source}
    assert found == LEFT | {key for names in TIMES.values() for key in names if key.endswith("_S")}
