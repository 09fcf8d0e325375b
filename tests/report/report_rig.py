"""Shared parts of the page's tests: saved simulations of a first-come-first-served toy, in the real format."""

from __future__ import annotations

import heapq
import random
from dataclasses import asdict
from itertools import pairwise

from cadenza.policies.simulator.figures import summarize
from cadenza.policies.simulator.result_file import Saved, SweepPoint, encode, save_run
from cadenza.policies.simulator.run_values import Counts, JobResult, Result, Sample
from cadenza.slurm_plugin.report.compare import compare
from cadenza.slurm_plugin.report.loader import load

CLASSES = {"resnet50": "image", "shufflenet": "image", "gnmt": "language", "deepspeech": "speech"}
GPUS, CPUS = 32, 96


def toy(label="fifo", *, seeds=(None,), speed=1.0, jobs=200, loads=(), gpus=GPUS, arguments=None, unfinished=0):
    """Return a saved simulation whose jobs go ``speed`` times faster; the workload depends on the seed alone."""
    results = [toy_result(label, seed or 0, speed, jobs, gpus, unfinished) for seed in seeds]
    return Saved(
        label, tuple(arguments if arguments is not None else ("--trace", "jobs.csv", "--order", label)), gpus, 3 * gpus,
        tuple(save_run(result, seed, asdict(summarize(result))) for result, seed in zip(results, seeds, strict=True)),
        tuple(_point(load, seed or 0, speed) for load in loads for seed in seeds), CLASSES,
    )  # fmt: skip


def loaded(*saved):
    """Return saved simulations as they are read from files named after their labels."""
    return [load(encode(item), f"{item.label}.json") for item in saved]


def comparison(*saved, baseline=None):
    return compare(loaded(*saved), baseline)


def toy_result(label, seed, speed, jobs, gpus=GPUS, unfinished=0):
    drawn = list(_workload(random.Random(seed), jobs))  # noqa: S311 (a workload)
    done = list(_schedule(drawn, speed, random.Random(f"{label}{seed}"), gpus))  # noqa: S311
    end_s = max(job.finish_s for job in done)
    left = done[len(done) - unfinished :]
    samples = _samples(done)
    done[len(done) - unfinished :] = [_cut(job) for job in left]
    counts = Counts(100 + seed, 90 + seed, 0, sum(j.migrations for j in done), sum(j.tunes for j in done))
    return Result(tuple(done), samples, counts, gpus, 3 * gpus, end_s, (0.001, 0.002, 0.0045), 1.5)


def _cut(job):
    return JobResult(job.id, job.submit_s, job.start_s, None, job.gpus, job.model, job.user, job.work_s, 0.0, None)


def _point(load, seed, speed):
    mean_h = (2 + load**2 / 20 + seed / 20 + max(0.0, load - 8 * speed) ** 3) / speed
    return SweepPoint(load, seed, mean_h, min(1.0, load / 9), load <= 8 * speed)


def _workload(rng, jobs):
    at = 0.0
    for number in range(jobs):
        at += rng.expovariate(5.5 / 3600)
        yield number, at, rng.choice((1, 1, 1, 2, 4, 8)), rng.choice(sorted(CLASSES)), 60 * 10 ** rng.uniform(0.5, 2.9)


def _schedule(drawn, speed, rng, gpus_there):
    """Start jobs in order of submission, each when enough GPUs are free."""
    running, free, now = [], gpus_there, 0.0
    for number, submit, gpus, model, work in drawn:
        now = max(now, submit)
        while free < gpus or (running and running[0][0] <= now):
            ended, given = heapq.heappop(running)
            now, free = max(now, ended), free + given
        free -= gpus
        finish = now + work / (speed * rng.uniform(0.85, 1.15))
        heapq.heappush(running, (finish, gpus))
        yield JobResult(
            number, submit, now, finish, gpus, model, "user", work, work, now - submit + work / 50,
            tunes=int(speed > 1) * (number % 3), migrations=int(speed > 1.2 and number % 9 == 0),
        )  # fmt: skip


def _samples(done):
    changes = sorted(
        change
        for job in done
        for change in ((job.submit_s, 0, 0, 1), (job.start_s, job.gpus, 1, -1), (job.finish_s, -job.gpus, -1, 0))
    )
    found, held, running, waiting = [Sample(0.0, 0, 0, 0, 0, 0.0)], 0, 0, 0
    for (at, gpus, more, queued), following in pairwise([*changes, (float("inf"), 0, 0, 0)]):
        held, running, waiting = held + gpus, running + more, waiting + queued
        if following[0] > at:
            found.append(Sample(at, held, 3 * held, running, waiting, 0.8 * held))
    return tuple(found)
