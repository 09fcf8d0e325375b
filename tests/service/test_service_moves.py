"""Moves from the checkpoint to the new node, over the real loop, link and store; only Slurm's books are a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from msgspec import structs
from service_rig import FileSlurm, Peer, books, job, lease, node
from test_service_loop import Rig, heard

from cadenza.policies.core.actions import Action, Outcome, Place, Release, Requeue
from cadenza.policies.core.model import Job, JobKey, Options, Share
from cadenza.policies.core.move import Leaving, Move, Ordered, Over, Placed, Requeued, Wanted
from cadenza.policies.sharing.state.settings import held_for_us
from cadenza.policies.sharing.turns.slurm_sync import release_plan
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import CheckpointOrder, ResumeOrder
from cadenza.slurm_plugin.errors import RequestError
from cadenza.slurm_plugin.service import move_requests as moves
from cadenza.slurm_plugin.service.loop import Loop, Parts
from cadenza.slurm_plugin.service.store.writer import SqliteStore

NEXT = JobKey(1, 1)
NODES = (node("n1"), node("n2"))


class Slurm(FileSlurm):
    """Books in which jobs are requeued and placed as well; ``refuse`` names the actions that fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.refuse: set[type[Action]] = set()
        self.resized: list[Share] = []

    def apply(self, action: Action) -> Outcome:
        if type(action) in self.refuse:
            return Outcome(ok=False, error="refused by Slurm")
        if isinstance(action, Requeue | Place | Release):
            self.change(action.job, self._after(action))
            self.resized += action.shares if isinstance(action, Place) and action.resize else ()
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"{type(action).__name__} {action.job}\n")
            return Outcome(ok=True)
        return super().apply(action)

    def change(self, key: JobKey, change: Callable[[Job], Job]) -> None:
        snapshot = self.read()
        self.write(replace(snapshot, jobs=tuple(change(one) if one.key == key else one for one in snapshot.jobs)))

    def _after(self, action: Requeue | Place | Release) -> Callable[[Job], Job]:
        def after(found: Job) -> Job:
            if isinstance(action, Requeue):
                key = JobKey(found.key.id, found.key.restart + 1)
                return replace(found, key=key, state="PENDING", nodes=(), slurm_priority=int(not action.hold))
            gone = isinstance(action, Release) and action.unpin
            nodes = action.nodes if isinstance(action, Place) else () if gone else found.required_nodes
            return replace(found, slurm_priority=1, required_nodes=nodes)

        return after

    def start(self) -> None:
        self.change(NEXT, lambda found: replace(found, state="RUNNING", nodes=found.required_nodes or ("n2",)))


class Site:
    """A loop with one job on n1 that can save checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.slurm = self.rig.slurm = Slurm(self.rig.slurm.path)
        self.rig.loop._gateway._slurm = self.slurm
        self.slurm.write(books(job(1, options=Options(min_gpus=1, max_gpus=4)), nodes=NODES))
        self.agent: Peer = self.rig.agent()
        self.says("held")

    def says(self, state: str, **changes: object) -> None:
        heard(self.rig, self.agent, lease(1, state, **{"checkpoints": True, **changes}))

    def left(self) -> None:
        """The agent reports that the job has left its host."""
        if self.rig.hub.agents()["n1"].report.leases:
            heard(self.rig, self.agent)

    def round(self) -> Move:
        assert self.rig.loop.round()
        return self.move

    @property
    def move(self) -> Move:
        (found,) = self.rig.store.memory().moves
        return found

    def request(self, *nodes: str, gpus: int | None = None) -> None:
        moves.write(self.rig.store.path, moves.requested_move(self.slurm.read(), 1, nodes, gpus, "by hand"))

    def saved(self) -> None:
        """Order the checkpoint and have it saved."""
        self.request("n2")
        assert isinstance(self.round().phase, Ordered)
        self.agent.receive(CheckpointOrder)
        self.says("stopping", saved=True)

    def aged(self, seconds: float) -> None:
        """Let a phase have begun so long ago."""
        memory = self.rig.store.memory()
        phase = memory.moves[0].phase
        moved = replace(memory.moves[0], phase=structs.replace(phase, since_s=phase.since_s - seconds))
        self.rig.store.adopt(replace(memory, moves=(moved,)))

    def restart(self) -> None:
        """Kill the service and start another one on its store."""
        path, clock = self.rig.store.path, SystemClock()
        self.rig.store.close()
        self.rig.store = SqliteStore(path, clock)
        parts = Parts(self.slurm, self.rig.hub, self.rig.store)
        self.rig.loop = Loop(self.rig.loop.settings, parts, clock, Random(1))  # noqa: S311


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    for one in found.rig.peers:
        one.close()
    found.rig.close()


def test_a_job_goes_to_another_node_and_keeps_its_history(site: Site) -> None:
    site.saved()
    assert isinstance(site.round().phase, Requeued)
    assert site.slurm.actions() == ["Requeue 1"]
    site.left()
    assert isinstance(site.round().phase, Placed)
    assert site.slurm.actions()[1:] == ["Place 1.1"]
    found = site.slurm.read().job(NEXT)
    assert found is not None
    assert (found.required_nodes, found.held) == (("n2",), False)
    site.slurm.start()
    assert isinstance(site.round().phase, Over)
    assert "went to n2 in" in site.move.outcome
    with site.rig.reader() as reader:
        kinds = [row.kind for row in reversed(reader.job_record(1).actions) if row.allowed]
        assert kinds == ["Migrate", "Requeue", "Place"]
        assert "went to n2" in reader.job_record(1).reason


def test_a_service_killed_between_any_two_rounds_goes_on_where_it_was(site: Site) -> None:
    site.saved()
    for phase in (Requeued, Placed):
        site.restart()
        assert isinstance(site.round().phase, phase)
        site.left()
    site.slurm.start()
    site.restart()
    assert "went to n2" in site.round().outcome
    assert site.slurm.actions() == ["Requeue 1", "Place 1.1"]


def test_what_a_killed_service_left_held_is_released_by_the_watchdog(site: Site) -> None:
    site.saved()
    site.round()
    snapshot, memory = site.slurm.read(), site.rig.store.memory()
    plan = release_plan(snapshot, memory, "killed")
    assert [type(action) for action in plan] == [Release]
    site.round()
    found = site.slurm.read().job(NEXT)
    assert found is not None
    owners = replace(found, slurm_priority=0)  # a hold after our release is its owner's
    assert not held_for_us(owners, site.rig.store.memory())


def test_a_yielded_job_is_asked_to_save_without_its_gpus_and_moves(site: Site) -> None:
    site.says("yielded", saves_away=True)
    site.request("n2")
    assert isinstance(site.round().phase, Ordered)
    assert site.agent.receive(CheckpointOrder).away
    site.says("yielded", saves_away=True, saving=True, saved=True)
    assert isinstance(site.round().phase, Requeued)


def test_a_job_whose_checkpoint_fails_stays_and_nothing_is_requeued(site: Site) -> None:
    site.request("n2")
    site.round()
    site.aged(30)
    site.says("held", note="rank 0 could not save a checkpoint: No space left on device")
    assert isinstance(site.round().phase, Over)
    assert "its checkpoint failed" in site.move.outcome
    assert site.slurm.actions() == []


def test_a_requeue_that_slurm_refuses_lets_the_job_go_on(site: Site) -> None:
    site.saved()
    site.slurm.refuse = {Requeue}
    assert isinstance(site.round().phase, Requeued)
    site.aged(30)
    assert isinstance(site.round().phase, Over)
    assert site.agent.receive(ResumeOrder).job == 1  # type: ignore[union-attr]


def test_a_placement_that_fails_is_tried_again_and_then_the_job_is_released_as_it_is(site: Site) -> None:
    site.saved()
    site.round()
    site.left()
    site.slurm.refuse = {Place}
    assert isinstance(placed := site.round().phase, Placed)
    assert placed.attempts == 1
    assert isinstance(placed := site.round().phase, Placed)
    assert placed.attempts == 2
    assert isinstance(site.round().phase, Leaving)
    found = site.slurm.read().job(NEXT)
    assert found is not None
    assert (found.held, found.required_nodes) == (False, ())
    assert "released as it is" in site.round().outcome


def test_a_job_that_does_not_start_there_may_start_anywhere(site: Site) -> None:
    site.saved()
    for _ in range(2):
        site.round()
        site.left()
    site.aged(1000)
    assert isinstance(site.round().phase, Leaving)
    found = site.slurm.read().job(NEXT)
    assert found is not None
    assert found.required_nodes == ()


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda found: replace(found, slurm_priority=5), "released by its owner"),
        (lambda found: replace(found, required_nodes=("n1",)), "released as it is"),
    ],
    ids=["release", "update"],
)
def test_the_owner_wins_while_the_job_is_held(site: Site, change: Callable[[Job], Job], outcome: str) -> None:
    site.saved()
    site.round()
    site.left()
    site.slurm.change(NEXT, change)
    site.aged(10)
    site.round()
    if not site.move.over:
        site.round()
    assert outcome in site.move.outcome
    assert "Place 1.1" not in site.slurm.actions()


def test_a_job_that_is_still_leaving_its_nodes_is_waited_for(site: Site) -> None:
    site.saved()
    site.round()
    site.left()
    held = site.slurm.read().job(NEXT)
    assert held is not None
    site.slurm.change(NEXT, lambda found: replace(found, state="OTHER", slurm_priority=5))
    assert isinstance(site.round().phase, Requeued)
    site.slurm.change(NEXT, lambda _: held)
    assert isinstance(site.round().phase, Placed)


def test_a_job_cancelled_while_it_moves_is_forgotten(site: Site) -> None:
    site.saved()
    site.round()
    site.slurm.write(books(nodes=NODES))
    site.left()
    assert site.rig.loop.round()
    assert site.rig.store.memory().moves == ()


def test_a_hold_of_the_owner_after_our_release_stays(site: Site) -> None:
    site.saved()
    for _ in range(2):
        site.round()
        site.left()
    site.slurm.change(NEXT, lambda found: replace(found, slurm_priority=0))
    site.aged(10)
    assert "held by its owner" in site.round().outcome
    site.round()
    found = site.slurm.read().job(NEXT)
    assert found is not None
    assert found.held


def test_a_move_waits_for_a_job_that_cannot_be_stopped_yet_and_gives_up_in_the_end(site: Site) -> None:
    site.says("yielded")
    site.request("n2")
    assert isinstance(site.round().phase, Wanted)
    site.says("held")
    site.aged(10000)
    assert "could not be stopped" in site.round().outcome


def test_jobs_that_save_no_checkpoints_or_belong_to_another_owner_of_requeue_are_never_moved(site: Site) -> None:
    site.request("n2")
    site.says("held", requeue_owner="submitit")
    assert "saves no checkpoints" in site.round().outcome
    assert site.slurm.actions() == []


def test_a_resize_is_placed_with_its_shares(site: Site) -> None:
    site.request("n2", gpus=2)
    assert site.round().resize
    site.agent.receive(CheckpointOrder)
    site.says("stopping", saved=True)
    site.round()
    site.left()
    site.round()
    with site.rig.reader() as reader:
        place = next(row for row in reader.job_record(1).actions if row.kind == "Place")
    assert place.reason.startswith("goes to n2 with 2 GPUs")
    assert site.slurm.resized == [Share("n2", 2, 8, 2000)]


def test_impossible_requests_are_refused_at_once(site: Site) -> None:
    snapshot = site.slurm.read()
    for nodes, gpus, why in (
        (("n9",), None, "n9: no node of partition gpu"),
        (("n1", "n2"), None, "job 1 is on 1 nodes"),
        (("n2",), 8, "runs with 1 to 4 GPUs, not with 8"),
        (("n1", "n2"), 3, "cannot be split evenly"),
    ):
        with pytest.raises(RequestError, match=why):
            moves.requested_move(snapshot, 1, nodes, gpus, "r")
    assert Share("n2", 1, 4, 1000) in moves.requested_move(snapshot, 1, ("n2",), None, "r").shares
