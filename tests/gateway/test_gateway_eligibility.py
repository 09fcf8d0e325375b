"""Nodes that a job's own request rules out, as sbatch(1) describes the constraint and Slurm treats reservations."""

from __future__ import annotations

from typing import Any

import pytest
from test_gateway_translate import ANSWERS, raw_job

from cadenza.slurm_plugin.gateway.eligibility import met, parse
from cadenza.slurm_plugin.gateway.translate import snapshot

NOW_S = 1000.0
ALL = {"node1", "node1-l1", "node2", "node2-l1"}


@pytest.mark.parametrize(
    ("constraint", "suits"),
    [
        ("a", True),
        ("c", False),
        ("a&c", False),
        ("a|c", True),
        ("c|d", False),
        ("c&a|b", True),  # from left to right
        ("(a|c)&b", True),
        ("(c|d)&b", False),
        ("[c|b]", True),
        ("[(a&c)|b]", True),
        ("c*1", False),
        ("a*1", True),
    ],
)
def test_a_constraint_of_one_node(constraint: str, suits: bool) -> None:
    term = parse(constraint, one_node=True)
    assert term is not None
    assert met(term, frozenset("ab")) == suits


@pytest.mark.parametrize("text", ["a&", "&a", "(a", "a)", "a b", "!a", "((((a))))", "a(b)", "a" * 5000, "{a}"])
def test_text_that_is_no_constraint(text: str) -> None:
    assert parse(text, one_node=True) is None


def test_a_constraint_that_binds_several_nodes_together_is_left_to_slurm() -> None:
    assert parse("[rack1|rack2]", one_node=False) is None
    assert parse("a*2&b*1", one_node=False) is None
    lanes = parse("a&[lane0|lane1]", one_node=False)
    assert lanes is not None
    assert met(lanes, frozenset({"a", "lane1"}))


def barred(*reservations: dict[str, Any], **changes: object) -> set[str]:
    comment = '{"cadenza":{"v":1,"share":true}}'
    job = raw_job(state="PENDING", comment=comment, num_nodes=1, allocated_nodes=[], **changes)
    answer = {**ANSWERS[0], "time_s": NOW_S, "jobs": [job], "reservations": list(reservations)}
    (found,) = snapshot(answer).jobs
    assert not found.unmanageable
    return set(found.barred)


def test_constraints_and_excluded_nodes() -> None:
    assert not barred()
    assert barred(constraints=["lane0"]) == {"node1-l1", "node2-l1"}
    assert barred(constraints=["lane0", "lane1"]) == ALL, "pyslurm splits at commas, which mean AND"
    assert barred(excluded_nodes=["node1"]) == {"node1", "node1-l1"}, "a host has the same GPUs in all lanes"


def test_reservations_by_name_and_time_limit() -> None:
    """Slurm starts no job that could reach into a reservation of others, and one with its own nowhere else."""
    near = {"name": "maint", "start_time": NOW_S + 3600, "nodes": ["node1"]}
    assert barred(near, time_limit=30) == set()
    assert barred(near, time_limit=90) == {"node1", "node1-l1"}
    assert barred(near, time_limit=None) == {"node1", "node1-l1"}
    course = {"name": "course", "start_time": NOW_S - 5, "nodes": ["node2"]}
    assert barred(course, time_limit=1) == {"node2", "node2-l1"}
    assert barred(course, time_limit=1, reservation="course") == ALL - {"node2"}
    assert barred(near, time_limit=1, reservation="maint") == ALL, "it has not begun"


def test_a_constraint_that_cannot_be_read_leaves_the_job_alone() -> None:
    job = raw_job(comment='{"cadenza":{"v":1,"share":true}}', num_nodes=2, constraints=["[rack1|rack2]"])
    (found,) = snapshot({**ANSWERS[0], "jobs": [job]}).jobs
    assert "Slurm chooses the nodes" in found.unmanageable
