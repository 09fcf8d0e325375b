"""Requests to the service by hand: files in folders next to the store, where only root and its own user may write."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cadenza.slurm_plugin.errors import RequestError


def folder(store: Path, kind: str) -> Path:
    """Return the folder of one kind of requests to a store's service."""
    return store.with_name(f"{store.name}.{kind}")


def write(place: Path, request: object, use: str) -> None:
    """Write a request in place of an earlier one; raise RequestError when this user may not, or there is no folder.

    ``use``: what such requests are for, as an infinitive without "to".
    """
    draft = place.with_suffix(".new")
    try:
        draft.write_bytes(msgspec.json.encode(request))
        draft.chmod(0o644)  # the service reads it, and the folder is its own alone
        draft.replace(place)
    except OSError as error:
        raise RequestError(f"{place}: {error.strerror}; only root and cadenzad itself may {use}") from None
