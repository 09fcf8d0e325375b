"""A job that lends CPUs is judged by its iteration times: a loan that costs it speed is undone, any other stands."""

from __future__ import annotations

from dataclasses import replace

from gandiva_rig import NOTHING, SHARING, after, decided, key, of, on, profile, world
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.allocation.cadenza.allocate import cadenza
from cadenza.policies.core.actions import Tune
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Share, StepRate
from cadenza.policies.core.profile import Profile
from cadenza.policies.sharing.elastic.cpu_loans import KEEPS_S, MAX_LOSS
from cadenza.policies.sharing.state.settings import GandivaSettings

LENDER, BORROWER = 1, 2
LEAN = profile(model="lean", cpus_per_gpu=(1.0, 6.0), throughput=((1.0,), (1.0,)), iteration_s=0.1)
HUNGRY = profile(
    model="hungry",
    cpus_per_gpu=tuple(float(n) for n in range(1, 24)),
    throughput=tuple((n / 6,) for n in range(1, 24)),
    iteration_s=0.1,
)
FLOOR = replace(SHARING, floor=True)
JUDGED = replace(NOTHING, introspective=True, measure_s=10.0)


class Host:
    """One host with a lender and a borrower that obey ``lent_s`` and ``own_s``, round after round."""

    def __init__(self, lent_s: float, own_s: float, gandiva: GandivaSettings = JUDGED) -> None:
        self.profile: Profile | None = LEAN
        self.times = {True: lent_s, False: own_s}
        self.gandiva = gandiva
        self.now = 0.0
        self.memory = Memory()
        self.cpus = {LENDER: 6, BORROWER: 6}
        self.pace = StepRate(own_s, 10, 10 * own_s)
        self.reasons = {}
        self.why = []

    @property
    def lends(self) -> bool:
        return self.cpus[LENDER] < 6

    def rounds(self, count: int, seconds: float = 1.0) -> Host:
        for _ in range(count):
            self._round(seconds)
        return self

    def _round(self, seconds: float) -> None:
        self.now += seconds
        self._trains(seconds)
        jobs = [self._job(LENDER, self.profile), self._job(BORROWER, HUNGRY)]
        snapshot = world(*jobs)
        snapshot = replace(snapshot, time_s=snapshot.time_s + self.now)
        decision = decided(snapshot, self.memory, self.gandiva, FLOOR, allocate=cadenza)
        self.memory, self.reasons = after(snapshot, decision), decision.reasons
        for tune in of(Tune, decision):
            self.cpus[tune.job.id] = tune.shares[0].cpus
            if tune.job.id == LENDER:
                self.why.append(tune.reason)

    def _trains(self, seconds: float) -> None:
        each = self.times[self.lends]
        more, before = int(seconds / each), self.pace
        spent = before.iterations * before.iteration_s + more * each
        count = before.iterations + more
        self.pace = StepRate(spent / count, count, before.window_s + seconds)

    def _job(self, number: int, its):
        share = Share("a", 1, self.cpus[number], 8000)
        return on(number, "a", number, profile=its, placement=(share,), pace=self.pace, held_s=self.now)


def test_a_loan_that_costs_nothing_stands():
    host = Host(lent_s=0.1, own_s=0.1).rounds(120)
    assert host.lends
    assert len(host.why) == 1


def test_a_loan_that_slows_its_lender_is_undone_and_the_measurement_is_told():
    host = Host(lent_s=0.12, own_s=0.1).rounds(120)
    assert host.cpus[LENDER] == 6
    assert "has its 6 CPUs back to see whether lending slows it: 120 ms an iteration, 100 promised" in host.why
    assert "keeps its 6 CPUs, because lending slowed it: 120 ms an iteration, 100 with its own" in host.reasons[key(1)]
    assert len(host.why) == 2, "lent once, given back once"


def test_a_lender_that_is_as_slow_with_its_own_lends_on():
    host = Host(lent_s=0.2, own_s=0.2).rounds(120)
    assert host.lends
    assert len(host.why) == 3, "lent, measured with its own, lent again"


def test_a_loan_is_tried_again_after_a_while():
    host = Host(lent_s=0.12, own_s=0.1).rounds(60)
    assert not host.lends
    host.times[True] = 0.1
    assert host.rounds(60, seconds=KEEPS_S / 50).lends


def test_without_introspection_nothing_is_judged():
    host = Host(lent_s=0.2, own_s=0.1, gandiva=replace(JUDGED, introspective=False)).rounds(60)
    assert host.lends
    assert host.memory.sharing.loans == ()


def test_without_a_profile_any_more_nothing_was_promised():
    host = Host(lent_s=0.2, own_s=0.1).rounds(3)
    assert host.lends
    host.profile = None
    host.rounds(1)
    assert not host.lends, "nobody knows that it can"
    assert {loan.own_s for loan in host.rounds(60).memory.sharing.loans} == {0.0}


@given(lent=st.floats(0.05, 0.5), own=st.floats(0.05, 0.5))
def test_who_ends_up_lending_is_who_loses_no_more_than_noise_by_it(lent: float, own: float):
    host = Host(lent_s=lent, own_s=own).rounds(150)
    slow = lent > own * (1 + MAX_LOSS) * 1.001 and lent > 0.1 * (1 + MAX_LOSS) * 1.001
    fine = lent < own * (1 + MAX_LOSS) / 1.001 or lent < 0.1 * (1 + MAX_LOSS) / 1.001
    assert host.lends or not fine
    assert not (host.lends and slow)
