"""A mix like that of Gandiva's 180-GPU cluster run (OSDI'18, p. 606): 1,000 jobs over two hours, models of Table 1.

The paper gives the number of jobs, the two hours, the shares of models of low, medium and high utilization (0.3, 0.25
and 0.45), 2 or 4 GPUs for the last two models, 30 to 45 minutes on a P40, and half P100 and half P40. What it leaves
open is assumed as follows; everything with a key can be set.

* Table 1's eight models: low are the first two, medium the next three, high the last three; equal shares within.
* ResNet-50 and ResNext-50 take 4 GPUs with probability ``wide`` (0.5), else 2; all others 1.
* A P100 runs every model ``p100`` (1.5) times as fast as a P40.
* Start to first iteration: ``startup`` (5) seconds a GPU, after Figure 12: 5.5, 10.3, 19.7 s at 1, 2, 4 GPUs.
* Jobs of one model differ in batch size: an iteration takes 1 / Table 1's sliced rate times a factor, drawn evenly on
  a logarithmic scale from ``scale`` (1-30). So 100 mini-batches take 1 s to 5 min, and none over the 6 s of p. 603.
* CPUs and memory matter to none of them beyond 1 CPU and 16 GB a GPU: what packed jobs lose to each other, CPUs
  included, is in Table 1.
* GPU memory as in ``MEMORY_GB``; the paper's table does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import MappingProxyType

from cadenza.policies.core.profile import Profile, Reference
from cadenza.policies.inputs.interference import PackedRow
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.workloads.spec import Draws

CLUSTER = "23x4:12:448:P40,22x4:12:448:P100"
"""45 servers, 180 GPUs, of 4 GPUs, 12 cores and 448 GB (p. 603): half of each type but for one server."""
REFERENCE = Reference(4, 12, 448)
NEEDS = (1.0, 16.0)
"""CPUs and GB of host memory for each GPU; less is slower, more changes nothing."""
GROUPS = ((0, 1), (2, 3, 4), (5, 6, 7))
"""Rows of Table 1 of low, medium and high utilization."""
WIDE_FROM = 6
"""Row from which models use several GPUs."""
MEMORY_GB: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "VAE": (1.0, 0.1),
        "SuperResolution": (1.5, 0.1),
        "RHN": (4.0, 0.5),
        "SCRNN": (4.0, 0.5),
        "MI-LSTM": (4.0, 0.5),
        "LSTM": (6.0, 0.8),
        "ResNet-50": (9.0, 0.3),
        "ResNext-50": (9.0, 0.3),
    }
)
"""GPU memory for each GPU, GB: peak, and at a boundary (about three times the checkpoint of Figure 13)."""
DEFAULT_GB = (9.0, 0.8)


@dataclass(frozen=True, slots=True)
class Gandiva:
    """Parameters of the generator; the module's docstring has the meaning and source of each."""

    jobs: int
    span_s: float
    mix: tuple[float, ...]
    minutes: tuple[float, float]
    wide: float
    startup_s: float
    scale: tuple[float, float]

    def generate(self, rng: Draws, profiles: Mapping[str, Profile]) -> tuple[TraceJob, ...]:
        """Return the jobs, numbered from 0 in order of submission; times in seconds.

        ``work_s`` is the run time on P40s, ``iterations`` over it the job's own iteration time. Each draws in turn:
        submission, group, model, GPUs, run time, iteration time; so a seed gives the same jobs whatever the costs.
        """
        drawn = sorted((self._draw(rng, tuple(profiles.values())) for _ in range(self.jobs)), key=lambda job: job[0])
        return tuple(self._job(number, *job) for number, job in enumerate(drawn))

    def _draw(self, rng: Draws, models: Sequence[Profile]) -> tuple[float, Profile, int, float, float]:
        submit_s = rng.uniform(0, self.span_s)
        draw, bounds = rng.random(), accumulate(part / sum(self.mix) for part in self.mix)
        group = next((group for group, bound in zip(GROUPS, bounds, strict=True) if draw < bound), GROUPS[-1])
        row = group[rng.randrange(len(group))]
        several = rng.random()
        duration_s = 60 * rng.uniform(*self.minutes)
        factor = self.scale[0] * (self.scale[1] / self.scale[0]) ** rng.random()
        gpus = 1 if row < WIDE_FROM else (4 if several < self.wide else 2)
        return submit_s, models[row], gpus, duration_s, models[row].iteration_s * factor

    def _job(
        self, number: int, submit_s: float, profile: Profile, gpus: int, work_s: float, iteration_s: float
    ) -> TraceJob:
        return TraceJob(
            id=number,
            submit_s=submit_s,
            gpus=gpus,
            work_s=work_s,
            model=profile.model,
            profile=profile,
            iterations=max(round(work_s / iteration_s), 1),
            startup_s=self.startup_s * gpus,
        )


@cache
def table1_profiles(rows: tuple[PackedRow, ...], p100: float = 1.5) -> Mapping[str, Profile]:
    """Return a profile for each row of Table 1 on a P40, with a sibling on a P100 that is ``p100`` times as fast.

    The same arguments always give the same objects, since profiles compare by identity.
    """
    return MappingProxyType({row.model: _profile(row, p100) for row in rows})


def _profile(row: PackedRow, p100: float) -> Profile:
    siblings: dict[str, Profile] = {}
    peak, low = MEMORY_GB.get(row.model, DEFAULT_GB)
    for gpu, faster in (("P40", 1.0), ("P100", p100)):
        siblings[gpu] = Profile(
            model=row.model,
            iteration_s=1 / row.sliced / faster,
            cpus_per_gpu=NEEDS[:1],
            memory_gb_per_gpu=NEEDS[1:],
            throughput=((1.0,),),
            reference=REFERENCE,
            gpu=gpu,
            gpu_memory_peak_gb=peak,
            gpu_memory_low_gb=low,
            gpu_utilization=row.utilization,
            siblings=MappingProxyType(siblings),
        )
    return siblings["P40"]
