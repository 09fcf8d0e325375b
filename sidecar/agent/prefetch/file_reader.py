"""Program that reads files into the page cache, as the user that it was started as (stdlib only).

``python file_reader.py BYTES`` takes paths on its input, one a line, and writes counts to its output. A directory
stands for all files under it. Files that the user may not read, files beyond the limit of bytes, and all that are not
regular are left out. The files' directories are listed too, as an interpreter does when it searches for modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator

PIECE = 1 << 20


def read_all(paths: list[bytes], max_bytes: int) -> dict[str, int]:
    """Read files up to ``max_bytes``; return counts of files, bytes, and files left out."""
    counts = {"files": 0, "bytes": 0, "left_out": 0}
    buffer = bytearray(PIECE)
    listed: set[bytes] = set()
    for path in _files(paths):
        _list_around(path, listed)
        size = _read(path, max_bytes - counts["bytes"], buffer)
        counts["files" if size is not None else "left_out"] += 1
        counts["bytes"] += size or 0
    return counts


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
    """Read a whole file; return its bytes, or None if it may not or need not be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Only the open file counts: its name may lead to another one by now.
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > left:
            return None
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < status.st_size and (count := os.readv(file, [buffer])):
            done += count
    except OSError:
        return None
    else:
        return done
    finally:
        os.close(file)


if __name__ == "__main__":
    # The jobs that run here have the CPUs first.
    os.nice(10)
    wanted = [line for line in sys.stdin.buffer.read().split(b"\n") if line]
    json.dump(read_all(wanted, int(sys.argv[1])), sys.stdout)
