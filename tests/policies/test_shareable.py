"""Jobs that can never share a GPU, against each pair tried by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.shareable import unshareable_jobs

NODES = read_cluster("2x8:24:500")


def model(state_gb: float) -> Profile:
    return Profile("m", 1.0, (3.0,), (20.0,), ((1.0,),), gpu_memory_low_gb=state_gb)


def test_the_proportional_memory_shares_nothing_and_says_so() -> None:
    jobs = [TraceJob(number, 0.0, 1, 10.0, user="ada") for number in range(4)]
    found = unshareable_jobs(jobs, NODES, between_users=True)
    assert found.memory == 4
    assert found.text().startswith("4 of 4 jobs can share no GPU: 4 ask for so much memory")
    assert not unshareable_jobs(JOBS_OF_30_GB, NODES, between_users=True).text()


JOBS_OF_30_GB = tuple(TraceJob(number, 0.0, 1, 10.0, user="ada", memory_gb_per_gpu=30.0) for number in range(4))


def test_a_user_with_one_job_shares_with_no_other_unless_users_share() -> None:
    jobs = [*JOBS_OF_30_GB, TraceJob(9, 0.0, 1, 10.0, user="bob", memory_gb_per_gpu=1.0)]
    assert unshareable_jobs(jobs, NODES, between_users=False)[1:] == (1, 0, 0)
    assert unshareable_jobs(jobs, NODES, between_users=True)[1:] == (0, 0, 0)


def test_the_state_of_a_job_that_waits_needs_host_memory() -> None:
    jobs = [TraceJob(number, 0.0, 1, 10.0, memory_gb_per_gpu=30.0, profile=model(5.0)) for number in range(2)]
    assert unshareable_jobs(jobs, NODES, between_users=True)[1:] == (0, 0, 2)


ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 80), st.integers(0, 20)), min_size=1, max_size=8)


@given(ROWS, st.booleans())
def test_it_finds_what_a_look_at_each_pair_finds(rows: list[tuple[str, int, int]], between: bool) -> None:
    jobs = [
        TraceJob(number, 0.0, 1, 10.0, user=user, memory_gb_per_gpu=memory, profile=model(state))
        for number, (user, memory, state) in enumerate(rows)
    ]
    alone = 0
    for at, (user, memory, _) in enumerate(rows):
        others = [row for number, row in enumerate(rows) if number != at and (between or row[0] == user)]
        alone += not any(memory + other + state <= 62.5 for _, other, state in others)
    found = unshareable_jobs(jobs, NODES, between_users=between)
    assert sum(found[1:]) == alone
