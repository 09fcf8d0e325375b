"""Fair share: accounts first, then users, and what is ranked counts."""

from __future__ import annotations

from hypothesis import given, settings
from snapshots import job
from strategies import NOW, queues

from cadenza.policies.core.model import Progress
from cadenza.policies.ordering.fairshare import CHARGE_S, fairshare
from cadenza.policies.ordering.ranking import Queue


def one(number: int, user: str, account: str = "lab", gpus: int = 1):
    progress = Progress(at_s=NOW, total_s=1.0)
    return job(
        number, user=user, account=account, gpus=gpus, submit_s=NOW - 1000 + number, state="PENDING", progress=progress
    )


def users(*jobs, first: int | None = None, **facts) -> str:
    ranked = fairshare(Queue(NOW, jobs, {"": 8}, **facts)).jobs
    return "".join(job.user for job in ranked[:first])


def crowd(user: str, start: int, count: int, account: str = "lab", gpus: int = 1):
    return [one(start + number, user, account, gpus) for number in range(count)]


def test_two_users_with_equal_shares_take_turns():
    assert users(*crowd("a", 0, 3), *crowd("b", 10, 3)) == "ababab"


def test_two_to_one_shares_give_twice():
    ranked = users(*crowd("a", 0, 30), *crowd("b", 100, 30), shares={"lab/a": 2.0}, first=30)
    assert ranked.count("a") == 20


def test_bigger_jobs_cost_more_turns():
    assert users(*crowd("a", 0, 2, gpus=4), *crowd("b", 10, 8), first=9) == "abbbbabbb"


def test_past_usage_is_paid_back_first():
    assert users(*crowd("a", 0, 2), *crowd("b", 10, 4), usage={"lab/a": 2.5 * CHARGE_S}) == "bbbaba"


def test_accounts_share_before_their_users_do():
    jobs = [*crowd("a", 0, 2), *crowd("b", 10, 2), *crowd("c", 20, 4, account="bio")]
    assert users(*jobs) == "acbcacbc"
    assert users(*jobs, usage={"bio": 9 * CHARGE_S}) == "ababcccc"


def test_an_account_without_usage_of_its_own_has_the_sum_of_its_users():
    jobs = [*crowd("a", 0, 2), *crowd("c", 20, 2, account="bio")]
    gone = {"lab/left": 9 * CHARGE_S}
    assert users(*jobs, usage=gone) == "ccaa"
    assert users(*jobs, usage={**gone, "lab": 0.0}) == "acac"


def test_no_shares_at_all_go_last():
    assert users(*crowd("a", 0, 2), *crowd("b", 10, 2), shares={"lab/a": 0.0}) == "bbaa"
    assert users(*crowd("a", 0, 2), *crowd("c", 10, 2, account="bio"), shares={"lab": 0.0}) == "ccaa"


def test_jobs_without_an_account_have_the_empty_one():
    jobs = [one(1, "a", account=""), one(2, "b", account="")]
    assert users(*jobs, usage={"/a": 1.0}) == "ba"


@settings(max_examples=50)
@given(queues(12))
def test_the_next_job_is_always_that_of_the_least_used(found):
    """The greedy rule itself, step by step, compared with the sort that replaces it."""
    ranked = fairshare(found).jobs
    usage = _account_usage(found)
    turns: dict[str, int] = {}
    for index, chosen in enumerate(ranked):
        rest = ranked[index:]
        heads = {job.account: job for job in reversed(rest)}
        urgency = {
            account: (_ratio(found, usage, account), turns.get(account, 0), head.submit_s, head.key)
            for account, head in heads.items()
        }
        assert min(urgency, key=urgency.__getitem__) == chosen.account
        usage[chosen.account] = usage.get(chosen.account, 0.0) + chosen.gpus * CHARGE_S
        turns[chosen.account] = turns.get(chosen.account, 0) + 1


def _account_usage(found: Queue) -> dict[str, float]:
    names = {job.account for job in found.jobs}
    return {name: found.usage.get(name, _of_users(found, name)) for name in names}


def _of_users(found: Queue, account: str) -> float:
    return sum(found.usage[key] for key in sorted(found.usage) if "/" in key and key.split("/")[0] == account)


def _ratio(found: Queue, usage: dict[str, float], name: str) -> float:
    share = found.shares.get(name, 1.0)
    return usage.get(name, 0.0) / share if share else float("inf")
