"""Decoding of the frames between agents and service: a bad frame costs itself, a bad row only that row (pure).

A frame is one struct of :mod:`cadenza.sidecar.orders`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from cadenza.sidecar.bounds import MAX_JOBS, Count
from cadenza.sidecar.orders import VERSION, FromAgent, JobFacts, LeaseReport, Prefetched, ToAgent

ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that a decoder raises on content."""
MAX_REPAIRED = 2**20
"""Bytes of a frame of which single rows may be left out; a larger one is taken or refused as a whole."""

T = TypeVar("T")


class OtherVersionError(msgspec.ValidationError):
    """A frame of a side that speaks another version, ``theirs``: nothing else of it was read."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"wire version {theirs}")
        self.theirs = theirs


class _Versioned(msgspec.Struct):
    """The part of a frame that all versions have."""

    v: Count


_VERSIONED = msgspec.json.Decoder(_Versioned)


class Frames(Generic[T]):
    """The decoder of one direction; ``rows`` are the types of the lists whose rows may be left out, by field."""

    def __init__(self, kind: Any, rows: Mapping[str, Any]) -> None:
        self._any: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._rows: Mapping[str, msgspec.json.Decoder[Any]] = {
            name: msgspec.json.Decoder(row) for name, row in rows.items()
        }

    def decode(self, frame: bytes | memoryview) -> tuple[T, Sequence[str]]:
        """Return a frame's message and the errors of the rows that it had to leave out.

        Raise one of ``ERRORS`` for a frame that is no message, even without those rows, or is of another version.
        """
        if (theirs := _VERSIONED.decode(frame).v) != VERSION:
            raise OtherVersionError(theirs)
        try:
            return self._any.decode(frame), ()
        except ERRORS as error:
            if len(frame) > MAX_REPAIRED:
                raise
            parts = msgspec.json.decode(frame, type=dict[str, msgspec.Raw])
            errors: list[str] = []
            for name, decoder in self._rows.items():
                if name in parts:
                    parts[name] = msgspec.Raw(msgspec.json.encode(_readable(parts[name], decoder, errors)))
            if not errors:
                raise error from None
            return self._any.decode(msgspec.json.encode(parts)), errors


def _readable(rows: msgspec.Raw, decoder: msgspec.json.Decoder[Any], errors: list[str]) -> list[msgspec.Raw]:
    good = []
    for row in msgspec.json.decode(rows, type=Annotated[list[msgspec.Raw], Meta(max_length=MAX_JOBS)]):
        try:
            decoder.decode(row)
        except ERRORS as error:
            errors.append(str(error))
        else:
            good.append(row)
    return good


FROM_AGENT: Frames[FromAgent] = Frames(FromAgent, {"leases": LeaseReport, "prefetched": Prefetched})
TO_AGENT: Frames[ToAgent] = Frames(ToAgent, {"jobs": JobFacts})
