"""A link next to the agent's socket that leads jobs to the library of addresses that stay."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libcadenza-addresses.so")
"""It comes with the agent's package; a bare checkout has it after `make`."""


def link(library: Path, folder: Path) -> None:
    """Let the link in a folder lead to the library; without a library there is none.

    The plugin and `cadenza run` read it: they belong to other packages, perhaps in another environment. It is no copy,
    because /run may be mounted so that nothing there can be loaded (noexec).
    """
    place, made = folder / library.name, folder / f".{library.name}.new"
    try:
        if library.is_file():
            made.unlink(missing_ok=True)
            made.symlink_to(library)
            made.replace(place)
        else:
            place.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: jobs find no library of addresses that stay: %s", place, error.strerror or error)
