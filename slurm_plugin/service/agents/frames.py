"""Decoding of the agents' frames: a frame that cannot be read costs itself, a row of a report only that row (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cadenza.sidecar.orders import FromAgent, LeaseReport, Prefetched

ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that a decoder raises on content."""

_ANY: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
_ROWS: Mapping[str, msgspec.json.Decoder[Any]] = {
    "leases": msgspec.json.Decoder(LeaseReport),
    "prefetched": msgspec.json.Decoder(Prefetched),
}


def decode(frame: bytes | memoryview) -> tuple[FromAgent, Sequence[str]]:
    """Return a frame's message and the errors of the rows that it had to leave out.

    Raise one of ``ERRORS`` for a frame that is no message, even without those rows.
    """
    try:
        return _ANY.decode(frame), ()
    except ERRORS as error:
        parts = msgspec.json.decode(frame, type=dict[str, msgspec.Raw])
        errors: list[str] = []
        for name, decoder in _ROWS.items():
            if name in parts:
                parts[name] = msgspec.Raw(msgspec.json.encode(_readable(parts[name], decoder, errors)))
        if not errors:
            raise error from None
        return _ANY.decode(msgspec.json.encode(parts)), errors


def _readable(rows: msgspec.Raw, decoder: msgspec.json.Decoder[Any], errors: list[str]) -> list[msgspec.Raw]:
    good = []
    for row in msgspec.json.decode(rows, type=list[msgspec.Raw]):
        try:
            decoder.decode(row)
        except ERRORS as error:
            errors.append(str(error))
        else:
            good.append(row)
    return good
