"""The driver path's state machine: whatever fails, all run, or all are checkpointed, or the job is reported lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.sidecar.agent.driver.events import (
    Answered,
    Command,
    Ended,
    Event,
    HelperLost,
    Inspect,
    Inspected,
    Operate,
    Restart,
    Thaw,
    Tick,
)
from cadenza.sidecar.agent.driver.machine import GPU_MARGIN_BYTES, MAX_LEFT_BYTES, MAX_TRIES, Limits, Machine
from cadenza.sidecar.agent.leases.lease_table import GpuProcess

GB = 1 << 30
LIMITS = Limits(lock_s=5.0, answer_s=20.0, memory_wait_s=30.0)
BEFORE = {"lock": "running", "checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}
COPIES = {"checkpoint", "restore"}
AFTER = {"lock": "locked", "checkpoint": "checkpointed", "restore": "locked", "unlock": "running"}


@dataclass
class World:
    """The driver as it really is, with a machine that only hears of it."""

    machine: Machine
    states: dict[int, str]
    now: float = 0.0
    free: int = 80 * GB
    spare: int = GPU_MARGIN_BYTES
    """What was free beside the processes while they ran, if it was less than this."""
    extra: list[int] = field(default_factory=list)
    strangers: bool = False
    """The last inspection saw a process that the machine does not know."""
    under_way: list[Command] = field(default_factory=list)
    done: list[tuple[str, int]] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        """Give an event to the machine, and check what it wants done."""
        for command in self.machine.advance(event, self.now):
            if isinstance(command, Operate):
                self.check(command)
            self.under_way.append(command)
        if any(isinstance(one, Restart) for one in self.under_way):
            self.lose_helper()
        self.check_outcome()

    def check(self, command: Operate) -> None:
        states = {pid: state for pid, state in self.states.items() if pid in self.machine.members}
        busy = [one.pid for one in self.under_way if isinstance(one, Operate)]
        assert command.pid not in busy, "one operation a process at a time"
        if command.operation == "checkpoint":
            assert set(states.values()) <= {"locked", "checkpointed"}, "all are locked before any is checkpointed"
        if command.operation == "unlock" and not self.machine.lost:
            assert "checkpointed" not in states.values(), "all are restored before any is unlocked"
            flying = [one for one in self.under_way if isinstance(one, Operate) and one.pid in self.states]
            assert not [one for one in flying if one.operation in COPIES], "nobody is unlocked while another is copied"
        if command.operation == "restore":
            sizes = [self.machine.members[pid].nbytes for pid in states if states[pid] == "checkpointed"]
            assert self.free >= sum(sizes) + self.spare, "a restore without room is fatal"

    def check_outcome(self) -> None:
        states = [state for pid, state in self.states.items() if pid in self.machine.members]
        if self.machine.outcome == "frozen":
            assert set(states) <= {"checkpointed"}, "the lease would go while a process may run"
            assert not self.strangers
        if self.machine.outcome == "running":
            assert set(states) <= {"running"}, "a process would be left stopped"

    def finish(self, number: int, how: str) -> None:
        """Let something that is under way come back; *error* leaves things as they were, *spoil* does not."""
        command = self.under_way.pop(number % len(self.under_way))
        if isinstance(command, Inspect):
            found = tuple(process(pid) for pid, state in self.states.items() if state in {"running", "locked"})
            if how != "good":
                self.tell(Inspected(refused="NVML: unknown error"))
                return
            self.strangers = bool(self.extra)
            if not self.machine.inspected:
                self.spare = min(self.free, GPU_MARGIN_BYTES)
            self.tell(Inspected((*found, *map(process, self.extra)), {0: self.free}))
        elif isinstance(command, Operate) and command.pid in self.states:
            self.tell(self.operate(command, how))

    def operate(self, command: Operate, how: str) -> Answered:
        pid, operation = command.pid, command.operation
        if how == "spoil" and operation != "state":
            self.states[pid] = "failed"
        if how != "good":
            return Answered(pid, operation, "", "CUDA_ERROR_UNKNOWN")
        if operation == "state":
            return Answered(pid, operation, self.states[pid])
        if self.states[pid] != BEFORE[operation]:
            return Answered(pid, operation, "", "CUDA_ERROR_ILLEGAL_STATE")
        self.states[pid] = AFTER[operation]
        self.done.append((operation, pid))
        return Answered(pid, operation)

    def lose_helper(self) -> None:
        """Let the helper die: each call under way may have taken effect or not, decided by its pid."""
        lost, self.under_way = self.under_way, []
        for command in lost:
            if isinstance(command, Operate) and command.operation in AFTER and command.pid in self.states:
                pid = command.pid
                if (pid + int(self.now)) % 2 and self.states[pid] == BEFORE[command.operation]:
                    self.states[pid] = AFTER[command.operation]
        self.tell(HelperLost("the helper died"))

    def end_process(self, number: int) -> None:
        if self.states:
            pid = sorted(self.states)[number % len(self.states)]
            del self.states[pid]
            self.tell(Ended(pid))

    def settle(self) -> str:
        """Let all go well from here on, and return how it ends."""
        for _ in range(400):
            if self.machine.outcome:
                return self.machine.outcome
            if self.under_way:
                self.finish(0, "good")
            else:
                self.now += 1.0
                self.tell(Tick())
        pytest.fail(f"no end: {self.machine}")


def process(pid: int, size: int = GB) -> GpuProcess:
    return GpuProcess(pid, 1, ((0, size),))


def world(*pids: int, machine: Machine | None = None, state: str = "running") -> World:
    made = World(machine or Machine(LIMITS), dict.fromkeys(pids, state))
    made.tell(Tick())
    return made


ACTIONS = st.tuples(
    st.sampled_from([*["good"] * 5, "error", "spoil", "hang", "helper", "end", "extra", "full", "thaw"]),
    st.integers(0, 7),
)


def play(one: World, actions: list[tuple[str, int]]) -> None:
    """Do what hypothesis wants, as far as it can be done."""
    for action, number in actions:
        if action == "hang":
            one.now += 7.0 * number
            one.tell(Tick())
        elif action == "helper":
            one.lose_helper()
        elif action == "end":
            one.end_process(number)
        elif action == "extra":
            one.extra = [99] if number % 2 else []
        elif action == "full":
            one.free = GB if number % 2 else 80 * GB
            one.machine.enough = False  # what was measured a moment ago is not what this test is about
        elif action == "thaw":
            if one.machine.outcome == "frozen":
                one.tell(Thaw())
        elif one.under_way:
            one.finish(number, action)


@given(ranks=st.integers(1, 4), actions=st.lists(ACTIONS, max_size=40), again=st.lists(ACTIONS, max_size=20))
@settings(max_examples=400, deadline=None)
def test_any_sequence_of_failures_ends_well_or_is_reported(
    ranks: int, actions: list[tuple[str, int]], again: list[tuple[str, int]]
) -> None:
    one = world(*range(10, 10 + ranks))
    play(one, actions)
    ended = one.settle()
    if ended == "frozen":
        one.tell(Thaw())
        play(one, again)
        ended = one.settle()
    if ended == "lost":
        assert one.machine.reason
        one.under_way = [command for command in one.under_way if isinstance(command, Operate)]
        while one.under_way:
            one.finish(0, "good")
        tries = [member.tries for member in one.machine.members.values()]
        assert "locked" not in one.states.values() or max(tries) >= MAX_TRIES, "what is locked is let go"


@given(
    states=st.lists(st.sampled_from(["running", "locked", "checkpointed"]), min_size=1, max_size=4),
    actions=st.lists(ACTIONS, max_size=15),
)
@settings(max_examples=200, deadline=None)
def test_an_agent_that_comes_back_brings_a_job_with_its_lease_back(
    states: list[str], actions: list[tuple[str, int]]
) -> None:
    targets = [process(10 + number) for number in range(len(states))]
    machine = Machine.recovered(targets, resting=False, limits=LIMITS)
    one = World(machine, {10 + number: state for number, state in enumerate(states)})
    one.tell(Tick())
    play(one, actions)
    assert one.settle() in {"running", "lost", "frozen"}


def test_all_are_locked_then_checkpointed_then_restored_then_unlocked() -> None:
    one = world(10, 11, 12)
    assert one.settle() == "frozen"
    one.tell(Thaw())
    assert one.settle() == "running"
    order = [operation for operation, _ in one.done]
    assert order == ["lock"] * 3 + ["checkpoint"] * 3 + ["restore"] * 3 + ["unlock"] * 3


def test_a_lock_that_fails_unlocks_the_others() -> None:
    one = world(10, 11)
    one.finish(0, "good")
    one.finish(0, "good")
    one.finish(0, "error")
    assert one.settle() == "running"
    assert one.machine.undoing
    assert "lock of pid 11: CUDA_ERROR_UNKNOWN" in one.machine.reason
    assert ("checkpoint", 10) not in one.done


def test_a_lock_that_hangs_unlocks_the_others_while_it_hangs() -> None:
    one = world(10, 11)
    one.finish(0, "good")
    one.finish(0, "good")
    one.now += 2 * LIMITS.lock_s
    one.tell(Tick())
    assert Operate(10, "unlock") in one.under_way
    assert Operate(11, "lock") in one.under_way, "not ended: it comes back when the other is unlocked"
    assert one.settle() == "running"


def test_a_checkpoint_that_fails_brings_the_others_back_first() -> None:
    one = world(10, 11)
    for how in ("good", "good", "good", "good", "error"):
        one.finish(0, how)
    assert one.settle() == "running"
    assert one.done[-3:] == [("restore", 10), ("unlock", 10), ("unlock", 11)]
    assert "checkpoint of pid 11" in one.machine.reason


def test_a_restore_that_fails_is_the_end_and_lets_the_others_go() -> None:
    one = world(10, 11)
    one.settle()
    one.tell(Thaw())
    one.finish(0, "good")
    one.finish(0, "spoil")
    assert one.machine.outcome == "lost"
    one.finish(0, "good")
    assert Operate(11, "unlock") in one.under_way


def test_a_restore_waits_for_memory_and_then_gives_the_lease_back() -> None:
    one = world(10)
    one.settle()
    one.free = GB
    one.tell(Thaw())
    one.finish(0, "good")
    assert "GPU 0 has 1024 MB free and a restore wants 1280 MB" in one.machine.stage
    assert one.settle() == "frozen"
    assert one.now >= LIMITS.memory_wait_s
    one.free = 80 * GB
    one.tell(Thaw())
    assert one.settle() == "running"


def test_a_job_that_had_filled_its_gpu_comes_back_to_as_much_memory() -> None:
    one = world(10)
    one.free = 10 << 20
    one.settle()
    one.free = GB + one.free - 1
    one.tell(Thaw())
    one.finish(0, "good")
    assert "a restore wants 1034 MB" in one.machine.stage
    one.free += 1
    assert one.settle() == "running"


def test_a_process_that_came_meanwhile_keeps_the_lease() -> None:
    one = world(10)
    one.finish(0, "good")
    one.extra = [11]
    assert one.settle() == "running"
    assert one.machine.reason == "pid 11 of the job came to its GPUs later"


def test_a_checkpoint_that_leaves_memory_on_the_gpu_keeps_the_lease() -> None:
    """The next job would start into it; what NVML shows counts, and not the driver's word."""
    one = world(10, 11)
    while one.machine.inspection_due is None or not one.machine.inspected:
        one.finish(0, "good")
    one.under_way.clear()
    one.tell(Inspected((process(10, MAX_LEFT_BYTES), process(11, GB)), {0: one.free}))
    assert one.settle() == "running"
    assert one.machine.reason == "pid 11 still has 1024 MB on its GPUs after its checkpoint"


def test_a_job_that_must_be_left_alone_is_not_touched() -> None:
    one = world(10)
    one.finish(0, "error")
    assert one.machine.outcome == "running"
    assert one.machine.refused
    assert not one.done
    empty = world()
    assert empty.settle() == "running"
    assert empty.machine.reason == "no process of the job is on its GPUs"


def test_an_agent_that_comes_back_finds_checkpointed_jobs_as_they_were() -> None:
    one = world(10, 11, machine=Machine.recovered([process(10), process(11)], resting=True, limits=LIMITS),
                state="checkpointed")  # fmt: skip
    assert one.machine.outcome == "", "nothing is known before the driver has said so"
    assert one.settle() == "frozen"
    one.tell(HelperLost("killed"))
    assert one.machine.outcome == "frozen"


def test_a_job_that_somebody_else_brought_back_is_lost() -> None:
    one = world(10, machine=Machine.recovered([process(10)], resting=True, limits=LIMITS))
    assert one.settle() == "lost"


def test_nobody_is_unlocked_before_it_is_known_who_is_checkpointed() -> None:
    one = world(10, 11)
    for _ in range(3):
        one.finish(0, "good")
    one.now = 1.0
    one.lose_helper()
    assert one.states == {10: "checkpointed", 11: "locked"}
    one.finish(1, "good")
    assert Operate(11, "unlock") not in one.under_way
    assert one.settle() == "running"
    assert one.done[-3:] == [("restore", 10), ("unlock", 10), ("unlock", 11)]


def test_an_unlock_that_fails_again_and_again_is_reported() -> None:
    one = world(10)
    one.settle()
    one.tell(Thaw())
    for _ in range(20):
        unlocks = isinstance(one.under_way[0], Operate) and one.under_way[0].operation == "unlock"
        one.finish(0, "error" if unlocks else "good")
        if one.machine.outcome:
            break
    assert one.machine.outcome == "lost"
    assert "unlock of pid 10" in one.machine.reason


def test_a_helper_that_cannot_be_had_ends_in_lost() -> None:
    one = world(10)
    one.settle()
    one.tell(Thaw())
    for _ in range(MAX_TRIES + 1):
        one.lose_helper()
    assert one.machine.outcome == "lost"
