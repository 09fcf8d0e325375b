"""Program that appends lines from its standard input to a job's record file, as the job's user.

It takes exactly the job's rights before it opens any path, so it can do nothing that the job could not. It guards
against other users: the directory must be the user's own and writable for the user alone, links are not followed, and a
file is either new or a plain one of the user's with a single name. A file system that hangs delays this process
alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from typing import BinaryIO

ARGUMENTS = 7
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class RecordRefusedError(Exception):
    """The directory or file is unsafe to write to; the job's owner must name another."""


def become(uid: int, gid: int, groups: list[int]) -> None:
    """Give up root for a user's rights, for good; raise OSError if that fails. Without root, do nothing."""
    if os.geteuid() == 0:
        # Groups come first: without root's uid the process may not change them any more.
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def open_directory(path: str) -> int:
    """Return a descriptor of the directory, made if only its last part is missing.

    Raise RecordRefusedError for a link, another user's directory or one that others may write to; otherwise OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102 - descriptors from here on
    try:
        directory = os.open(path, DIRECTORY_FLAGS)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise RecordRefusedError(f"{path}: a link or no directory: name the directory itself") from None
        raise
    status = os.fstat(directory)
    if status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE:
        return directory
    os.close(directory)
    raise RecordRefusedError(f"{path}: must belong to uid {os.geteuid()} and be writable for it alone")


def open_file(directory: int, name: str) -> int:
    """Return a descriptor that appends to the file; raise RecordRefusedError if it is not the user's plain file."""
    try:
        return os.open(name, FILE_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    except FileExistsError:
        pass
    try:
        # O_NONBLOCK: a FIFO under this name would make open(2) wait for a reader.
        file = os.open(name, FILE_FLAGS, dir_fd=directory)
    except OSError as error:
        raise RecordRefusedError(f"{name}: exists and cannot be appended to ({error.strerror}): remove it") from None
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
        return file
    os.close(file)
    raise RecordRefusedError(f"{name}: not a plain file of uid {os.geteuid()} with one name: remove it")


def append(lines: BinaryIO, directory: int, name: str, limit: int) -> None:
    """Copy all lines; at ``limit`` bytes the file becomes ``NAME.1`` and a new one begins."""
    file = open_file(directory, name)
    size = os.fstat(file).st_size
    for line in lines:
        if size and size + len(line) > limit:
            os.close(file)
            os.rename(name, f"{name}.1", src_dir_fd=directory, dst_dir_fd=directory)
            file, size = open_file(directory, name), 0
        os.write(file, line)
        size += len(line)
    os.close(file)


def main(arguments: list[str]) -> int:
    """Run as ``recorder UID GID GROUP,… DIRECTORY NAME LIMIT``; return 1 if that file cannot be written."""
    if len(arguments) != ARGUMENTS:
        print("usage: recorder UID GID GROUP,... DIRECTORY NAME LIMIT_BYTES", file=sys.stderr)  # noqa: T201
        return 2
    uid, gid, groups, path, name, limit = arguments[1:]
    try:
        become(int(uid), int(gid), [int(group) for group in groups.split(",") if group])
        append(sys.stdin.buffer, open_directory(path), name, int(limit))
    except (RecordRefusedError, OSError) as error:
        told = ascii(f"no records of {name} in {path}: {error}")[1:-1]  # one line, whatever the path is
        print(told, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
