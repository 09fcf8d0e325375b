"""Fair share over accounts and their users: the least used goes next, with what is already ranked counted as used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cadenza.policies.core.model import Job
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival

CHARGE_S = 300.0
"""Usage that a ranked job adds to its user, in seconds for each GPU: the usual length of a round."""


def fairshare(queue: Queue) -> Ranking:
    """Order by usage over shares, ascending: of accounts, then of users in the account, then by submission.

    Slurm's classic fair-share factor is 2^(-usage/shares), so a smaller ratio is a higher factor. Each ranked job
    counts as a round of its GPUs for its user and account, so that a round's GPUs go round and not to one user.

    ``queue.usage`` (GPU seconds) and ``queue.shares`` are keyed by account name and by ``account/user``, as in
    ``{"physics": 2, "physics/ann": 1}``; jobs without an account have the account ``""`` and the key ``/user``. An
    account without usage has the sum of its users'; who has no shares entry has 1; who has 0 shares goes last.
    """
    people: defaultdict[str, defaultdict[str, list[Job]]] = defaultdict(lambda: defaultdict(list))
    for job in sorted(queue.jobs, key=arrival):
        people[job.account][f"{job.account}/{job.user}"].append(job)
    usage: defaultdict[str, float] = defaultdict(float)
    for key in sorted(queue.usage):
        account, slash, _ = key.rpartition("/")
        if slash:
            usage[account] += queue.usage[key]
    usage.update(queue.usage)
    accounts = {account: _take_turns(people[account], usage, queue.shares) for account in sorted(people)}
    return Ranking(tuple(_take_turns(accounts, usage, queue.shares)))


def _take_turns(
    owners: Mapping[str, Sequence[Job]], usage: Mapping[str, float], shares: Mapping[str, float]
) -> list[Job]:
    """Return the owners' jobs merged: the next is always the first job of whoever has the least usage over shares.

    Ties go to who has had fewer turns, then to the earlier job. An owner's usage before each of their jobs depends
    on their own earlier ones alone and never falls, so sorting by it is this merge.
    """
    keyed = []
    for owner, jobs in owners.items():
        used, share = usage.get(owner, 0.0), shares.get(owner, 1.0)
        for turn, job in enumerate(jobs):
            ratio = used / share if share > 0 else float("inf")
            keyed.append((ratio, turn, *arrival(job), job))
            used += job.gpus * CHARGE_S
    keyed.sort()  # keys are unique: jobs themselves are never compared
    return [entry[-1] for entry in keyed]
