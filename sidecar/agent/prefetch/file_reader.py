"""Reads files into the page cache, as the user it was started as: a program of its own, stdlib only.

``python readfiles.py BYTES`` takes paths on its input, one a line, and says on its output what it has read. A directory
stands for all files under it. What the user may not read, what is no regular file, and what is beyond the bytes is left
out. Directories of the files are listed too: an interpreter that looks for modules does that first.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator

PIECE = 1 << 20


def read_all(paths: list[bytes], most: int) -> dict[str, int]:
    """Read files until ``most`` bytes are through; return how many files, bytes, and how many were left out."""
    told = {"files": 0, "bytes": 0, "left_out": 0}
    buffer = bytearray(PIECE)
    listed: set[bytes] = set()
    for path in _files(paths):
        _list_around(path, listed)
        size = _read(path, most - told["bytes"], buffer)
        told["files" if size is not None else "left_out"] += 1
        told["bytes"] += size or 0
    return told


def _files(paths: list[bytes]) -> Iterator[bytes]:
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 - bytes, which pathlib does not take
            for folder, _, names in os.walk(path):
                yield from (os.path.join(folder, name) for name in sorted(names))  # noqa: PTH118
        else:
            yield path


def _list_around(path: bytes, listed: set[bytes]) -> None:
    """List a file's directory, and that above a ``__pycache__``."""
    folder = os.path.dirname(path)  # noqa: PTH120
    if folder in listed:
        return
    listed.add(folder)
    with contextlib.suppress(OSError):
        os.listdir(folder)  # noqa: PTH208
    if folder.endswith(b"/__pycache__"):
        _list_around(folder, listed)


def _read(path: bytes, left: int, buffer: bytearray) -> int | None:
    """Read one file whole; return its bytes, or None when it may not or need not be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > left:
            return None
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < found.st_size and (count := os.readv(file, [buffer])):
            done += count
    except OSError:
        return None
    else:
        return done
    finally:
        os.close(file)


if __name__ == "__main__":
    os.nice(10)
    wanted = [line for line in sys.stdin.buffer.read().split(b"\n") if line]
    json.dump(read_all(wanted, int(sys.argv[1])), sys.stdout)
