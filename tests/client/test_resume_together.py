"""A rank whose state is back stands until that of the others is, or moves it out again when one cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from client_peer import Peer, Rank, Script

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import MoveError
from cadenza.sidecar.client.offload.engine import Offload

SIZES = (1, 700, 90_001)


def content() -> list[torch.Tensor]:
    return [torch.arange(size, dtype=torch.float32) for size in SIZES]


def complete(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(now, then) for now, then in zip(tensors, content(), strict=True))


def standing(job: Peer) -> Rank:
    """Let a rank yield and resume together with others; return it as it stands."""
    rank = job.rank(stop=1)
    assert rank.hello["together"]
    rank.hear("arrived")
    rank.say("commit", order=1)
    rank.hear("yielded")
    rank.clear()
    rank.say("resume", order=2, together=True)
    assert rank.hear("resumed")["standing"]
    return rank


def test_a_rank_moves_out_again_when_another_has_no_room_and_runs_on_when_all_are_back(job: Peer) -> None:
    tensors, empty, called = content(), list[bool](), list[str]()

    def script() -> list[dict[str, Any]]:
        rank = standing(job)
        rank.say("cancel", order=1, reason="of a stop that is over")
        rank.say("cancel", order=2, reason="no room")
        again = rank.hear("yielded")
        empty.append(all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors))
        called.append("away")
        rank.say("resume", order=3, together=True)
        back = rank.hear("resumed")
        called.append("all back")
        rank.say("commit", order=3)
        return [again, back, rank.hear("resumed")]

    finish = Script(script, job).finish
    session = client.attach(tensors=tensors)
    session.call(on_yield=lambda: called.append("yield"), on_resume=lambda: called.append("resume"))
    client.boundary()
    again, back, last = finish()
    assert complete(tensors)
    assert (empty, again["bytes"], again.get("error", "")) == ([True], 4 * sum(SIZES), "")
    assert (back["standing"], "standing" in last) == (True, False)
    assert called == ["yield", "away", "all back", "resume"]
    client.detach()


def test_a_rank_that_cannot_move_out_again_says_so_and_runs_on(job: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = content()

    def script() -> list[dict[str, Any]]:
        rank = standing(job)
        monkeypatch.setattr(Offload, "offload", lambda *_: (_ for _ in ()).throw(MoveError("no host memory")))
        rank.say("cancel", order=2, reason="no room")
        return [rank.hear("yielded"), rank.hear("resumed")]

    finish = Script(script, job).finish
    client.attach(tensors=tensors)
    client.boundary()
    assert complete(tensors)
    assert finish()[0]["error"] == "no host memory"
    client.detach()


def test_a_rank_that_loses_the_agent_as_it_stands_runs_on(job: Peer) -> None:
    tensors = content()
    finish = Script(lambda: standing(job) and job.die(), job).finish
    client.attach(tensors=tensors)
    client.boundary()
    assert complete(tensors)
    finish()
    client.detach()
