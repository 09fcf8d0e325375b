"""Max-min fair shares of time on several GPU types, by linear programming (Gavel, OSDI'20 §4)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import coo_array, hstack, vstack

from cadenza.policies.core.errors import SolverError

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

LEVELS = 8
"""Most rounds of water filling; what is left after them goes where it gives most."""
SLACK = 1e-9
"""Relative amount by which a class may fall below its level later: the solver's tolerance."""


def time_shares(speeds: Floats, gpus: Floats, counts: Floats, capacity: Floats) -> Floats:
    """Return X[class, type], the share of time that each job of a class is to run on each GPU type.

    A job's throughput is ``sum_t speed[t] X[t]`` times its GPUs, over what an equal split of every type's time would
    give it. The least of these is made as large as possible, then the least of those that can still grow, and so on
    (Gavel §4.1, §4.3). A class of which one job needs more GPUs than a type has runs elsewhere, with 0 there.

    Args:
        speeds: [class, type], positive, in any unit of a class' own.
        gpus: [class], GPUs of one job.
        counts: [class], jobs.
        capacity: [type], GPUs, positive.

    Raises:
        SolverError: HiGHS found no optimum, though X = 0 always is feasible.

    """
    fits = gpus[:, None] <= capacity[None, :]
    rates = normalized(np.where(fits, speeds, 0.0), gpus, capacity)
    shares = np.zeros(speeds.shape)
    able = np.flatnonzero(fits.any(axis=1))
    if able.size:
        shares[able] = _fill(rates[able], (gpus * counts)[able], capacity)
    return shares


def normalized(speeds: Floats, gpus: Floats, capacity: Floats) -> Floats:
    """Return [class, type]: GPUs times speed over the speed at an equal split of time; 0 where a job does not fit."""
    equal = speeds @ capacity / capacity.sum()
    return np.asarray(speeds * gpus[:, None] / np.where(equal > 0, equal, 1.0)[:, None])


def _fill(rates: Floats, demand: Floats, capacity: Floats) -> Floats:
    """Return X by water filling; ``demand``: [class], GPUs of all its jobs."""
    floors = np.zeros(len(rates))
    rising = np.ones(len(rates), dtype=bool)
    for _ in range(LEVELS):
        # Maximize the level that all rising classes reach while the others keep their floors.
        objective = np.append(np.zeros(rates.size), -1.0)
        found = _solve(objective, rates, demand, capacity, np.where(rising, 0.0, floors), rising)
        level = found.x[-1]
        # A positive price says that the class is at the level in every optimum: it cannot rise further.
        full = rising & (-found.ineqlin.marginals[: len(rates)] > SLACK)
        floors = np.where(rising, level * (1 - SLACK), floors)
        rising &= ~full
        if not rising.any() or not full.any():
            break
    if rising.any():  # maximize the sum over all jobs while every class keeps its floor
        objective = np.append((-rates * demand[:, None] / demand.sum()).ravel(), 0.0)
        found = _solve(objective, rates, demand, capacity, floors, np.zeros(len(rates), dtype=bool))
    return np.asarray(found.x[:-1]).reshape(rates.shape).clip(0.0, 1.0)


def _solve(
    objective: Floats, rates: Floats, demand: Floats, capacity: Floats, floors: Floats, rising: Flags
) -> OptimizeResult:
    """Minimize over X, row by row, and the level: rates·X ≥ floor (+ level), sum_t X ≤ 1, demand·X ≤ capacity."""
    classes, types = rates.shape
    rows = np.repeat(np.arange(classes), types)
    columns = np.arange(rates.size)
    per_type = np.tile(np.arange(types), classes)
    reach = coo_array((-rates.ravel(), (rows, columns)), shape=(classes, rates.size))
    whole = coo_array((np.ones(rates.size), (rows, columns)), shape=(classes, rates.size))
    room = coo_array((np.repeat(demand, types), (per_type, columns)), shape=(types, rates.size))
    level = np.concatenate((rising.astype(float), np.zeros(classes + types)))
    matrix = hstack((vstack((reach, whole, room)), coo_array(level[:, None])), format="csr")
    limits = np.concatenate((-floors, np.ones(classes), capacity))
    top = np.append(np.where(rates.ravel() > 0, 1.0, 0.0), np.inf)
    bounds = np.column_stack((np.zeros(rates.size + 1), top))
    found = linprog(objective, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    if found.status != 0:
        raise SolverError(f"max-min shares of {classes} classes on {types} GPU types: {found.message}")
    return found
