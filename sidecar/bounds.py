"""Types of what others send to a daemon, each with its bounds: past the decoder nothing raises on content.

Text is valid Unicode in one line, without surrogates, control characters and marks of direction. Numbers are finite and
fit into 64 bits. Lists are bounded. A value outside of its type is refused by the decoder that meets it first.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

MAX_NAME = 255
MAX_TEXT = 4096
MAX_NUMBER = 2**62
MAX_STEP = 2**60
"""A rank's steps; stop steps, which are beyond them, go up to MAX_NUMBER."""
MAX_SECONDS = 1e12
"""Some 30,000 years, so that epoch times fit too."""
MAX_GPUS = 64
MAX_JOBS = 2**16
MAX_PATHS = 20_000
MAX_RECEIPT_PATHS = 8
MAX_RECEIPT_PATH = 1000
"""Paths of a receipt and the characters of each, so that it fits into one packet to a rank."""
MAX_TAKEN = 64
"""Processes that a report names."""
CLEAN = r"\A[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]*\Z"
"""Text without control characters (Cc), separators of lines, marks of direction (UAX #9) and surrogates."""

JobId: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Restart: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
Uid: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
"""Ranks, hosts, lanes, processes: numbers of things."""
RankStep: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Step: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""A training step, or the number of an order."""
Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Megabytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**43)]
Number: TypeAlias = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
VirtualSeconds: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""Held time over weight."""
Moment: TypeAlias = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
"""A time on a clock in seconds, or a difference of two."""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
"""CPUs, weights, rates: any number that cannot be below 0."""
Index: TypeAlias = Annotated[int, Meta(ge=0, le=1023)]
Gpus: TypeAlias = Annotated[tuple[Index, ...], Meta(max_length=MAX_GPUS)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME, pattern=CLEAN)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT, pattern=CLEAN)]
Paths: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=MAX_PATHS)]
ReceiptPath: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_RECEIPT_PATH, pattern=CLEAN)]
ReceiptPaths: TypeAlias = Annotated[tuple[ReceiptPath, ...], Meta(max_length=MAX_RECEIPT_PATHS)]
