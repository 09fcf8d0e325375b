"""The prediction of the four jobs: quotas by hand, and CPUs counted as Slurm does."""

from __future__ import annotations

import pytest
from live_tuning_predict import SHARES, kinds, predicted
from replay_cluster import Size

from cadenza.policies.core.profile import Profile, Reference
from cadenza.policies.inputs.profiles import write_profiles

CPUS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
JOBS = {"images-a": "images", "images-b": "images", "text-a": "text", "text-b": "text"}
STARTUP = {"images": 5.0, "text": 3.0}
SIZE = Size(nodes=1, gpus=4, cpus=16, memory_mb=64_000)


def measured(model: str, gpu_s: float, cpu_s: float) -> str:
    """Return a profile of T(c) = max(gpu_s, cpu_s / c), with half a CPU as the share."""
    times = [max(gpu_s, cpu_s / cpus) for cpus in CPUS]
    rows = tuple((times[1] / time_s,) for time_s in times)
    return write_profiles({model: Profile(model, times[1], CPUS, (16.0,), rows, Reference(4, 2, 64))})


def test_four_jobs_in_the_quotas_of_two_cores() -> None:
    by_model, library = kinds([measured("images", 0.03, 0.0225), measured("text", 0.03, 0.003)], 8)
    assert by_model["images"].profile.cpus_per_gpu == tuple(8 * cpus for cpus in CPUS)
    assert by_model["images"].profile.reference == (4, 16, 64)
    assert '"cpus_per_gpu": [2.0, 4.0' in library
    counts = {model: round(60 / kind.best_s) for model, kind in by_model.items()}
    shares = predicted(JOBS, by_model, counts, STARTUP, SHARES, SIZE)
    ours = predicted(JOBS, by_model, counts, STARTUP, "cadenza", SIZE)
    # At half a core images take 1.5 times as long. The texts need two of their four CPUs, and keep a third; the two
    # that they lend are what one of the images needs for its best. The other has its own until the texts have ended.
    assert shares == pytest.approx({"images-a": 95, "images-b": 95, "text-a": 63, "text-b": 63})
    assert ours == pytest.approx({"images-a": 65, "images-b": 84.3, "text-a": 63, "text-b": 63}, rel=1e-3)
