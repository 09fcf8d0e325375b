"""The rule who may see a job: for ``why``, ``top`` and ``report`` at a socket, and for the pages of ``cadenza web``.

A user sees their own jobs; an Operator or Administrator of Slurm's accounting, and who may read the service's store,
all jobs; an account's coordinator those of the account (slurm.conf(5), PrivateData; sacctmgr(1), AdminLevel).
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cadenza.policies.core.errors import CadenzaError
from cadenza.sidecar.clock import Clock
from cadenza.slurm_plugin.gateway.slurm_gateway import answer_of, slurm_config

NAME = re.compile(r"[\w.@+-]{1,64}", re.ASCII)
KEEP_S = 300.0
"""Time for which Slurm's word on a user holds."""
MAX_KEPT = 10_000
TIMEOUT_S = 5.0
ALL_PRIVATE = frozenset({"jobs", "nodes"})


class Owner(NamedTuple):
    """The user and the account of a job."""

    user: str
    account: str = ""


class Viewer(NamedTuple):
    """A person; without a name they see counts only, as does everyone of the jobs of others."""

    user: str = ""
    everything: bool = False
    accounts: frozenset[str] = frozenset()
    """Accounts that they coordinate."""
    ids: bool = False
    """True if Slurm shows all users which job has which GPUs: PrivateData is without ``jobs``."""
    hosts: bool = False
    """True if Slurm shows all users its nodes: PrivateData is without ``nodes``. Else they see those of their jobs."""

    def may_read(self, owner: str, account: str = "") -> bool:
        """Return whether they may read the record of a job of ``owner`` in an account."""
        return self.everything or (self.user != "" and self.user == owner) or account in self.accounts


class JobAccess:
    """The viewers of a store, by the rights of the store's file and by Slurm's own word."""

    def __init__(self, store: Path, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._kept: dict[str, tuple[float, Viewer]] = {}
        """Each user with what Slurm says of them, and the monotonic time until which that holds."""
        self._private = ALL_PRIVATE
        """Slurm's last word on what it hides; while it has not answered yet, all."""

    def of_uid(self, uid: int) -> Viewer:
        """Return the user of this machine who the kernel says has connected."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return self.nobody()._replace(everything=uid in (0, os.geteuid()))
        if uid in (0, os.geteuid()):
            return Viewer(entry.pw_name, everything=True)
        return self._of_entry(entry)

    def nobody(self) -> Viewer:
        """Return a person without a name."""
        return self._by_slurm("")

    def of_name(self, name: str) -> Viewer:
        """Return the user that a proxy or a relay names; one may be called root, too, and is an ordinary user here."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError:  # Slurm's users need not be known here
            entry = None
        if name.casefold() == "root" or (entry is not None and entry.pw_uid == 0):
            # Slurm's accounting has a root that is an Administrator, and this need not be the same person.
            return self._by_slurm(name)._replace(everything=False, accounts=frozenset())
        return self._by_slurm(name) if entry is None else self._of_entry(entry)

    def relayed(self, uid: int, here: Collection[str] | None) -> Viewer | None:
        """Return the user that an agent asks for; None for one that it may not ask for.

        ``here``: the users with a job on the agent's host, which its word shows no jobs of others; None where root has
        registered the host as a relay.
        """
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            return None
        # No host asks for root or the service: elsewhere these uids are another's.
        if uid in (0, os.geteuid()) or (here is not None and name not in here):
            return None
        viewer = self.of_name(name)
        return viewer if here is None else viewer._replace(everything=False, accounts=frozenset())

    def _of_entry(self, entry: pwd.struct_passwd) -> Viewer:
        viewer = self._by_slurm(entry.pw_name)
        return viewer._replace(everything=viewer.everything or self._reads_store(entry))

    def _reads_store(self, entry: pwd.struct_passwd) -> bool:
        try:
            status = self._store.stat()
        except OSError:
            return False
        of_group = status.st_mode & stat.S_IRGRP and status.st_gid in os.getgrouplist(entry.pw_name, entry.pw_gid)
        return entry.pw_uid == status.st_uid or bool(of_group)

    def _by_slurm(self, name: str) -> Viewer:
        now_s = self._clock.monotonic()
        kept = self._kept.pop(name, None)
        if kept is None or kept[0] < now_s:
            with suppress(CadenzaError, KeyError):
                self._private = frozenset(slurm_config()["PrivateData"].split(","))
            kept = now_s + KEEP_S, by_slurm(name, self._private)
        self._kept[name] = kept
        if len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        return kept[1]


def by_slurm(name: str, private: Collection[str]) -> Viewer:
    """Return a user with the rights that Slurm's accounting gives them; without its answer they have none.

    ``private``: what Slurm hides from users (slurm.conf(5), PrivateData).
    """
    viewer = Viewer(name, ids="jobs" not in private, hosts="nodes" not in private)
    if not NAME.fullmatch(name):
        return viewer
    question = ("sacctmgr", "--noheader", "--parsable2", "show", "user", f"name={name}", "withcoord")
    try:
        answer = answer_of((*question, "format=user,adminlevel,coordinators"), TIMEOUT_S)
    except CadenzaError:
        return viewer
    for user, _, rights in (line.partition("|") for line in answer.splitlines()):
        if user.casefold() == name.casefold():  # Slurm's own rule; and no sign in a name may lead to another user
            level, _, accounts = rights.partition("|")
            everything = level in ("Operator", "Administrator")
            return viewer._replace(everything=everything, accounts=frozenset(accounts.split(",")) - {""})
    return viewer
