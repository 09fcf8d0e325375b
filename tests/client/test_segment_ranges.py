"""The parts of an allocator's segments that are copied when addresses stay, and the environment that asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza.sidecar import wire
from cadenza.sidecar.agent.addresses import link
from cadenza.sidecar.client.bootstrap import run_script
from cadenza.sidecar.client.offload.addresses import address_survey, preloaded
from cadenza.sidecar.client.offload.addresses.segment_ranges import plan
from cadenza.sidecar.client.offload.copy_plan import AddressPlan

MIB = 1 << 20


def segment(address: int, *blocks: tuple[int, str], **fields: Any) -> dict[str, Any]:
    sizes = [{"size": size, "state": state} for size, state in blocks]
    total = sum(size for size, _ in blocks)
    return {"address": address, "total_size": total, "device": 0, "segment_pool_id": (0, 0), "blocks": sizes, **fields}


def ranges(*segments: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    served = {one["address"]: (number, one["total_size"]) for number, one in enumerate(segments, 1)}
    found = plan(segments, served)
    assert isinstance(found, AddressPlan)
    return [(one.segment, one.address, one.nbytes, one.offset) for one in found.ranges]


def test_blocks_in_use_are_copied_with_small_gaps_and_without_large_ones() -> None:
    used, waiting, free = "active_allocated", "active_pending_free", "inactive"
    blocks = [(512, free), (4 * MIB, used), (MIB, free), (512, waiting), (2 * MIB, free), (3 * MIB, used), (MIB, free)]
    first = 512
    assert ranges(segment(0, *blocks)) == [
        (1, first, 5 * MIB + 512, 0),
        (1, first + 7 * MIB + 512, 3 * MIB, 5 * MIB + 512),
    ]


def test_a_private_pool_is_copied_whole_and_an_empty_segment_not_at_all() -> None:
    graph = segment(64 * MIB, (MIB, "inactive"), (MIB, "active_allocated"), segment_pool_id=(0, 1))
    empty = segment(32 * MIB, (20 * MIB, "inactive"))
    assert ranges(graph, empty) == [(1, 64 * MIB, 2 * MIB, 0)]
    found = plan([graph, empty], {64 * MIB: (1, 2 * MIB), 32 * MIB: (2, 20 * MIB)})
    assert isinstance(found, AddressPlan)
    assert (found.segments, found.nbytes, found.host_bytes) == ((2, 1), 22 * MIB, 2 * MIB)


def test_segments_that_the_library_has_not_served_give_the_reason() -> None:
    one = segment(0, (2 * MIB, "active_allocated"))
    assert "runtime of its own" in str(plan([one], {}))
    assert "runtime of its own" in str(plan([one], {0: (1, 4 * MIB)})), "another size"
    assert "expandable segments" in str(plan([{**one, "is_expandable": True}], {}))
    assert plan([], {}) == AddressPlan((), (), (), 0)


def test_the_command_gets_the_library_only_if_it_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "package" / preloaded.NAME
    place.parent.mkdir()
    monkeypatch.setenv(wire.SOCKET_ENV, str(tmp_path / "agent.sock"))
    monkeypatch.setattr(preloaded, "PACKAGE", tmp_path / "none")
    asks = {preloaded.ADDRESSES_ENV: preloaded.STAY, "LD_PRELOAD": "/other.so"}
    assert run_script.with_addresses({}) == {}
    assert run_script.with_addresses(asks) == asks
    assert preloaded.NAME in capsys.readouterr().err
    assert "no agent on this host has" in str(address_survey.missing())
    place.touch()
    link.link(place, tmp_path)
    assert "--cadenza=graphs" in str(address_survey.missing())
    found = run_script.with_addresses(asks)
    assert found["LD_PRELOAD"] == f"{place}:/other.so"
    assert found[preloaded.NCCL_GRAPHS] == "0"
    assert run_script.with_addresses(found) == found, "a command within the command"
    twice = run_script.with_addresses({**found, "LD_PRELOAD": f"/elsewhere/{preloaded.NAME}:/other.so"})
    assert twice == found, "the plugin's, and that of the client's own environment"
