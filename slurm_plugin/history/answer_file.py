"""A file that one of Slurm's commands has written."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from cadenza.policies.core.errors import InputError

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
"""Beginnings of files of gzip, bzip2, xz and zstd."""


def read_answer(path: str, option: str) -> str:
    """Return a file's text, in which users' bytes need not be UTF-8; raise InputError naming the option."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{option}: {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data.startswith(COMPRESSED):
        raise InputError(f"{option}: {path!r} is compressed: unpack it first, as gunzip does")
    if not data.strip():
        raise InputError(f"{option}: {path!r} is empty: the command that was to write it printed nothing")
    wide = data.startswith((BOM_UTF16_BE, BOM_UTF16_LE))
    return data.decode("utf-16" if wide else "utf-8-sig", "replace")
