"""The exact division of nodes: against brute force, and compiled against interpreted."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, profiles

from cadenza.policies.allocation import pareto
from cadenza.policies.allocation.cadenza import knapsack
from cadenza.policies.allocation.cadenza.arrays import Arrays
from cadenza.policies.allocation.cadenza.assignment import Assignment
from cadenza.policies.allocation.cadenza.initial import assign_evenly, keep, order
from cadenza.policies.allocation.cadenza.knapsack import Search
from cadenza.policies.allocation.pareto import CPU_UNITS, CPUS, MEMORY_MB, MEMORY_UNITS, SPEED, Kind, derive, kinds
from cadenza.policies.allocation.problem import Case, Server, proportional_share, share_speed
from cadenza.policies.core.model import Share
from cadenza.policies.core.profile import Profile


def interpreted() -> ModuleType:
    """The division as it is where numba is not installed."""
    spec = spec_from_file_location("knapsack_interpreted", knapsack.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with patch.dict(sys.modules, {"numba": None}):
        spec.loader.exec_module(module)
    return module


BOTH = [interpreted(), knapsack]
EVEN = Profile("even", 1.0, (3.0,), (62.5,), ((1.0,),))


def seated(case: Case) -> Arrays:
    """The case's jobs that have one GPU, dealt out."""
    jobs = tuple(replace(job, gpus=1, placement=()) for job in case.jobs)
    assignment = Assignment(
        replace(case, jobs=jobs, runnable=min(len(jobs), sum(server.gpus for server in case.servers)))
    )
    items = order(assignment, keep(assignment))
    assert not assign_evenly(assignment, items, items, tight=False)
    return Arrays(assignment)


@pytest.mark.parametrize("by", BOTH)
@settings(max_examples=25, deadline=None)
@given(case=cases(4, max_nodes=2, gpus=(1,)))
def test_a_node_is_divided_as_well_as_by_trying_everything(by, case):
    arrays = seated(case)
    assignment, field = arrays.assignment, arrays.field
    choice, total = np.zeros(len(assignment.gpus), np.int32), np.zeros(len(assignment.servers), np.int64)
    by.divide(field, arrays.nodes, np.arange(len(assignment.servers), dtype=np.int32), choice, total)
    for node, members in enumerate(assignment.members):
        kind = assignment.kind_of[node]
        tables = [assignment.rows[item][kind].table for item in members]
        server = assignment.kinds[kind]
        best = max(
            (
                sum(round(one[SPEED] * arrays.scale) for one in chosen)
                for chosen in product(*(table.T for table in tables))
                if sum(one[CPU_UNITS] for one in chosen) <= server.cpu_units
                and sum(one[MEMORY_UNITS] for one in chosen) <= server.memory_units
            ),
        )
        assert total[node] == best == sum(int(field.value[choice[item]]) for item in members)
        assert sum(arrays.cpus[choice[item]] for item in members) <= server.cpus
        assert sum(arrays.memory_mb[choice[item]] for item in members) <= server.memory_mb


@settings(max_examples=25, deadline=None)
@given(case=cases(10, max_nodes=3, gpu_types=("", "v100")), moves=st.integers(0, 3))
def test_compiled_and_interpreted_loops_agree(case, moves):
    arrays = seated(case)
    field, nodes = arrays.field, arrays.nodes
    count = len(nodes.filled)
    which = np.arange(count, dtype=np.int32)
    field.home[:] = np.arange(len(field.home)) % (count + 1) - 1
    field.cost[:] = 1000 * (np.arange(len(field.home)) % 7)
    answers = []
    for by in BOTH:
        tables = np.full((count, nodes.items.shape[1] + 1, field.size.max()), -1, np.int32)
        full, gains = np.full((count, field.size.max()), -1, np.int32), np.zeros(count, np.int64)
        for node in range(count):
            by.leave_out(field, nodes, node, tables[node])
        by.fill(field, nodes, which, full)
        found = [by.exchange(field, nodes, node, Search(which, which, tables, moves)) for node in range(count)]
        joined = []
        for item in range(len(field.gpus)):
            by.joins(field, nodes.kind, item, full, gains)
            joined.append(gains.tolist())
        items = [nodes.items[node, : nodes.filled[node]] for node in range(count)]
        worth = [by.worth(field, int(kind), some) for kind, some in zip(nodes.kind, items, strict=True)]
        answers.append((np.maximum(tables, -1).tolist(), np.maximum(full, -1).tolist(), found, joined, worth))
    assert answers[0] == answers[1]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(profiles(gpu_types=("v100",)), min_size=1, max_size=3),
    st.sampled_from([(8, 24, 512000), (4, 190, 773000), (8, 256, 2063000), (2, 9, 64512), (1, 5, 40960)]),
    st.sampled_from(["", "v100"]),
    st.sampled_from([0.0, 0.1]),
)
def test_options_are_what_the_profile_says_and_none_is_idle(made, shape, gpu_type, margin):
    server = Server("", *shape, gpu_type)
    kind = kinds([server], made)[server[1:]]
    for gpus in range(1, server.gpus + 1):
        key = derive(dict.fromkeys(made), kind, gpus, margin)
        fair = proportional_share(server, gpus)
        for one in dict.fromkeys(made):
            table = one.derived[key].table
            floor = (1 + margin) * share_speed(one, fair, gpu_type)
            for column in table.T:
                share = Share("", gpus, int(column[CPUS]), int(column[MEMORY_MB]))
                assert column[SPEED] == pytest.approx(share_speed(one, share, gpu_type))
                assert share == fair or column[SPEED] >= floor - 1e-9
                assert column[CPU_UNITS] * kind.cpu_step >= share.cpus
                assert column[MEMORY_UNITS] * kind.memory_mb >= share.memory_mb * kind.memory_units
                within = (table[CPUS] <= column[CPUS]) & (table[MEMORY_MB] <= column[MEMORY_MB])
                assert (table[SPEED, within] >= column[SPEED]).sum() == 1


def test_proportional_shares_always_fit_in_units():
    for gpus, cpus, memory_mb in product((1, 2, 3, 8), (1, 9, 24, 190, 256), (1000, 512000, 773123)):
        kind = next(iter(kinds([Server("", gpus, cpus, memory_mb)], ()).values()))
        shares = [pareto.unmeasured(kind, 1).table[:, 0]] * gpus
        assert sum(share[CPU_UNITS] for share in shares) <= kind.cpu_units
        assert sum(share[MEMORY_UNITS] for share in shares) <= kind.memory_units


def test_memory_is_divided_as_finely_as_grids_need():
    def of(*grid: float) -> Kind:
        made = replace(EVEN, memory_gb_per_gpu=grid, throughput=((1.0,) * len(grid),))
        return kinds([Server("", 8, 24, 512000)], [made])[8, 24, 512000, ""]

    assert of(20.83, 62.5, 125.0).memory_units == 24
    assert of(31.25, 62.5).memory_units == 48
    assert of(5.0, 62.5, 77.0).memory_units == 96


def test_a_node_with_many_cpus_is_divided_in_steps():
    kind = next(iter(kinds([Server("", 8, 256, 512000)], ()).values()))
    assert (kind.cpu_step, kind.cpu_units) == (2, 128)
    assert next(iter(kinds([Server("", 8, 250, 512000)], ()).values())).cpu_step == 1


def test_without_numba_the_interpreter_runs_the_loops():
    assert not hasattr(interpreted().divide, "py_func")
    pytest.importorskip("numba", reason="extra speed")
    assert hasattr(knapsack.divide, "py_func")


def test_options_are_worked_out_once_for_each_profile():
    server = Server("", 8, 24, 512000)
    kind = kinds([server], [EVEN])[server[1:]]
    assert pareto.part(EVEN, kind, 2, 0.0) is pareto.part(EVEN, kind, 2, 0.0)
