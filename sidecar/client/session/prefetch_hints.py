"""Files that this process has imported or will read, for the host to which its job moves to read in advance.

They are the lines of a memfd that the agent finds among the process's open files (``wire.FILES_NAME``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from cadenza.sidecar import wire


class FileList:
    """The list of one process; rewritten after further imports."""

    def __init__(self) -> None:
        self._modules = 0
        self._named: dict[str, None] = {}
        self._descriptor: int | None = None

    def name(self, *paths: str | os.PathLike[str]) -> None:
        """Add files or directories that the process will read again after a restart."""
        self._named.update((os.path.abspath(path), None) for path in paths)  # noqa: PTH100 - links stay
        self._modules = 0
        self.publish()

    def publish(self) -> None:
        """Bring the list up to date, if the system has memfds and modules were imported since the last time."""
        if len(sys.modules) == self._modules or not hasattr(os, "memfd_create"):
            return
        self._modules = len(sys.modules)
        if self._descriptor is None:
            self._descriptor = os.memfd_create(wire.FILES_NAME)
        text = "".join(f"{path}\n" for path in (*imported(), *self._named))
        data = text.encode("utf-8", errors="surrogateescape")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)

    def close(self) -> None:
        """Withdraw the list."""
        descriptor, self._descriptor, self._modules = self._descriptor, None, 0
        if descriptor is not None:
            os.close(descriptor)


def imported() -> Iterator[str]:
    """Yield the file that each imported module was read from, the compiled one where there is one."""
    for module in list(sys.modules.values()):
        attributes: dict[str, Any] = getattr(module, "__dict__", {})
        spec = attributes.get("__spec__")
        path = getattr(spec, "cached", None) or getattr(spec, "origin", None) or attributes.get("__file__")
        if isinstance(path, str) and os.path.isabs(path):  # noqa: PTH117 - no object for each of thousands
            yield path
