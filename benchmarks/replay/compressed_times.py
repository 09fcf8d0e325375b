"""The shipped policy's times that are no settings, divided by a factor on a cluster in containers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cluster import PYTHON, Cluster

TIMES = {
    "cadenza.policies.ordering.levels": {"THRESHOLDS": "tuple(one / {factor} for one in {name})"},
    "cadenza.policies.sharing.preemption.standing": {
        "COST_S": "{name} / {factor}", "MOST_SERVED_S": "{name} / {factor}", "STARVING_S": "{name} / {factor}",
        "MOVES_A_DAY": "{name} * {factor}",
    },
    "cadenza.policies.sharing.preemption.join_idle": {"JOIN_AFTER_S": "{name} / {factor}"},
    "cadenza.policies.sharing.preemption.site_factor": {"BEHIND_S": "{name} / {factor}"},
}  # fmt: skip
"""By module, and what becomes of each.

``AGAIN_S`` of making way follows ``COST_S``. The limits on the steps of a move (``MIN_SAVE_S`` and others) are for what
stops, saves and starts in real time, and stay.
"""


def compress(cluster: Cluster, factor: float) -> None:
    """Divide the times by a factor, and start the service anew with them."""
    for module, names in TIMES.items():
        lines = "".join(f"{name} = {form.format(name=name, factor=factor)}\n" for name, form in names.items())
        code = f"import {module} as module; open(module.__file__, 'a').write({lines!r})"
        cluster.run(cluster.controller, PYTHON, "-c", code)
    cluster.service(cluster.controller, "restart", "cadenzad")
