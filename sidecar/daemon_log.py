"""The daemons' log: text on standard error; under systemd with fields, by which the journal finds a job's lines."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from typing import TextIO

from cadenza.policies.core.model import JobKey

SOCKET = "/run/systemd/journal/socket"
FIELD = "CADENZA_"
"""Attributes of a record with this prefix (``extra``) are fields in the journal: ``journalctl CADENZA_JOB=24``."""
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Priorities of syslog from each level on."""


def set_up_logging(name: str, *, debug: bool) -> logging.Handler:
    """Configure the root logger of a daemon, and return its handler; ``name`` is the daemon's in the journal."""
    if "JOURNAL_STREAM" in os.environ:  # set by systemd where standard error goes to the journal (systemd.exec(5))
        handler: logging.Handler = JournalHandler(name)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])
    return handler


class JournalHandler(logging.StreamHandler[TextIO]):
    """Sends each record with its fields to journald; one that journald does not take goes to standard error."""

    def __init__(self, name: str, path: str = SOCKET) -> None:
        super().__init__(sys.stderr)
        self._name, self._path = name, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, in the form of systemd's page Native Journal Protocol, where a value may have any bytes."""
        fields = {name: value for name, value in vars(record).items() if name.startswith(FIELD)}
        arguments = record.args if isinstance(record.args, tuple) else ()
        key = next((one for one in arguments if isinstance(one, JobKey)), None)
        if key is not None:
            fields.setdefault("CADENZA_JOB", key.id)
        fields["MESSAGE"], fields["SYSLOG_IDENTIFIER"], fields["LOGGER"] = self.format(record), self._name, record.name
        fields["PRIORITY"] = next((number for level, number in PRIORITIES if record.levelno >= level), 7)
        values = {name: str(value).encode(errors="replace") for name, value in fields.items()}
        parts = (b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(it)), it) for name, it in values.items())
        try:
            self._socket.sendto(b"".join(parts), self._path)
        except OSError:  # no journald, or more than a datagram holds
            super().emit(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()
