"""The library of addresses that stay, as the plugin writes it into LD_PRELOAD."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from spankstructs import Config

NAME = "libcadenza-addresses.so"
PATH_MAX = 4096


def found(library: ctypes.CDLL, folder: Path) -> str:
    """Return what the plugin finds beside the agent's socket."""
    path = ctypes.create_string_buffer(PATH_MAX)
    config = Config(str(folder / "agent.sock").encode(), 1)
    return path.value.decode() if library.preload_find(ctypes.byref(config), path) else ""


def test_the_agents_link_is_resolved(library: ctypes.CDLL, tmp_path: Path) -> None:
    """A container has the agent's folder at the same path, and perhaps without what the link leads to."""
    assert not found(library, tmp_path)
    place = tmp_path / "site-packages" / NAME
    (tmp_path / NAME).symlink_to(place)
    assert not found(library, tmp_path), "the agent's package has gone"
    place.parent.mkdir()
    place.touch()
    assert found(library, tmp_path) == str(place)


def test_a_path_that_ld_preload_cannot_say_is_not_used(library: ctypes.CDLL, tmp_path: Path) -> None:
    place = tmp_path / "two words"
    place.touch()
    (tmp_path / NAME).symlink_to(place)
    assert not found(library, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        (f"/a/{NAME}", ""),
        (f"/a/{NAME}:/b/other.so", "/b/other.so"),
        (f"/b/other.so /a/{NAME} {NAME}:/c/third.so", "/b/other.so:/c/third.so"),
        (f"/b/{NAME}.1::/c/third.so", f"/b/{NAME}.1:/c/third.so"),
    ],
)
def test_the_library_is_taken_out(library: ctypes.CDLL, before: str, after: str) -> None:
    value = ctypes.create_string_buffer(before.encode())
    library.preload_without(value)
    assert value.value.decode() == after
