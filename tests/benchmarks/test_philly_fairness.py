"""The fair GPU time of accounts on contended days, and what they lack of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from philly_fairness import Floats, Lack, Recorder, Span, by_day, fair_parts, fair_time, lack
from philly_sample import DAY_S

from cadenza.policies.inputs.trace import TraceJob

AMOUNTS = st.floats(0.0, 1000.0)


def gpu_days(*rows: tuple[float, ...]) -> Floats:
    """Return GPU seconds of days in GPU days."""
    return np.array(rows) * DAY_S


def test_the_recorder_has_each_time_on_gpus_and_ends_it_where_their_number_changes() -> None:
    recorder = Recorder([TraceJob(1, 0.0, 4, 60.0, account="a"), TraceJob(2, 0.0, 1, 60.0, account="b")])
    for change in ((10, 1, 4), (20, 2, 1), (30, 1, 0), (50, 1, 2), (60, 1, 4), (70, 1, 0), (80, 2, 0)):
        recorder(*change)
    assert recorder.spans == [("a", 10, 30, 4), ("a", 50, 60, 2), ("a", 60, 70, 4), ("b", 20, 80, 1)]


def test_a_span_counts_for_each_day_that_it_touches() -> None:
    spans = [Span("a", 0.5 * DAY_S, 2.25 * DAY_S, 4), Span("b", DAY_S, 2 * DAY_S, 1)]
    assert (by_day(spans, ("a", "b"), 3) == gpu_days((2, 0), (4, 1), (1, 0))).all()


def test_what_an_account_does_not_ask_for_goes_to_the_others_by_their_shares() -> None:
    shares = np.array([0.5, 0.3, 0.2])
    assert fair_parts(10, np.array([20.0, 20.0, 20.0]), shares).tolist() == pytest.approx([5, 3, 2])
    assert fair_parts(10, np.array([2.0, 20.0, 20.0]), shares).tolist() == pytest.approx([2, 4.8, 3.2])
    assert fair_parts(10, np.array([2.0, 4.0, 20.0]), shares).tolist() == pytest.approx([2, 4, 4])


def test_a_day_counts_if_jobs_ask_for_more_than_the_cluster_has() -> None:
    had, shares = gpu_days((7, 1), (7, 1)), np.array([0.5, 0.5])
    lacked, fair = fair_time(had, gpu_days((7, 1), (12, 3)), shares, 8)
    assert (fair == gpu_days((0, 0), (5, 3))).all()
    assert (lacked == gpu_days((0, 0), (0, 2))).all()
    found = lack(had, gpu_days((7, 1), (12, 3)), shares, 8, ("a", "b"))
    assert found == (2 / 8, {"a": 0, "b": pytest.approx(2 / 3)}, 2 * DAY_S)
    assert found.worst == (pytest.approx(2 / 3), "b")


def test_an_account_with_hardly_any_fair_time_is_not_the_worst_one_and_no_contention_lacks_nothing() -> None:
    wanted, shares = gpu_days((990, 990, 1)), np.array([0.5, 0.4, 0.1])
    assert lack(gpu_days((600, 400, 0)), wanted, shares, 1000, ("a", "b", "c")).worst[1] == "b"
    none = lack(gpu_days((1, 1, 0)), wanted, shares, 2000, ("a", "b", "c"))
    assert none == (0, {}, 0)
    assert none.worst == (0, "")


def test_what_an_account_lacks_beyond_another_run_is_the_most_of_those_that_count_in_both() -> None:
    ours, slurm = Lack(0.2, {"a": 0.3, "b": 0.5, "c": 0.9}, 1.0), Lack(0.3, {"a": 0.1, "b": 0.6}, 1.0)
    assert ours.beyond(slurm) == (pytest.approx(0.2), "a")
    assert slurm.beyond(ours) == (pytest.approx(0.1), "b")


@given(st.lists(st.tuples(AMOUNTS, st.floats(0.01, 1.0)), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_fair_parts_share_out_all_and_nobody_has_more_who_could_give_to_one_that_wants_it(
    accounts: list[tuple[float, float]], load: float
) -> None:
    wanted, shares = np.array(accounts).T
    whole = load * wanted.sum()
    parts = fair_parts(whole, wanted, shares)
    assert parts.sum() == pytest.approx(whole)
    assert ((parts >= 0) & (parts <= wanted)).all()
    unmet = parts < wanted - 1e-6
    if unmet.any():  # all that want more are at one level, and no other is above it
        level = parts / shares
        assert level[unmet].tolist() == pytest.approx([level[unmet].max()] * int(unmet.sum()), abs=1e-6)
        assert (level <= level[unmet].max() + 1e-6).all()


@given(st.lists(st.lists(st.tuples(AMOUNTS, st.floats(0.0, 1.0)), min_size=3, max_size=3), min_size=1, max_size=4))
def test_an_account_lacks_what_others_have_too_much_and_nothing_where_it_asks_for_nothing(
    days: list[list[tuple[float, float]]],
) -> None:
    wanted, served = gpu_days(*np.array(days)[:, :, 0]), np.array(days)[:, :, 1]
    had, shares = wanted * served, np.array([0.5, 0.3, 0.2])
    lacked, fair = fair_time(had, wanted, shares, 100)
    assert (lacked[wanted == 0] == 0).all()
    assert ((lacked >= 0) & (lacked <= fair)).all()
    contended = wanted.sum(axis=1) > 100 * DAY_S
    assert not fair[~contended].any()
    too_much = np.maximum(had - fair, 0)[contended]
    assert lacked[contended].sum(axis=1).tolist() == pytest.approx(too_much.sum(axis=1).tolist(), rel=1e-6, abs=1e-3)
    found = lack(had, wanted, shares, 100, "abc")
    assert all(0 <= part <= 1 for part in (found.whole, *found.parts.values()))
