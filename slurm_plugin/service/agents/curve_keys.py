"""CURVE keys of the link: the service's own pair, and the public key of each host's agent."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import zmq.auth

from cadenza.slurm_plugin.errors import HubError

log = logging.getLogger(__name__)

SERVICE, AGENT_FOLDER = "service", "agents"
PUBLIC, SECRET, REPLACED = ".key", ".key_secret", ".key.old"
"""Endings of ``agents/HOST``: its public key, its secret one, and the public key before the last rotation."""


def service_pair(folder: Path) -> tuple[bytes, bytes]:
    """Return the service's public and secret key in z85; raise HubError when there are none."""
    path = folder / f"{SERVICE}{SECRET}"
    public, secret = _certificate(path)
    if secret is None:
        raise HubError(f"{path}: holds no secret key; write new ones with `cadenza keygen`")
    if path.stat().st_mode & 0o077:
        log.warning("%s is readable by others than its owner; chmod 600 it", path)
    return public, secret


@dataclass
class AgentKeys:
    """The public keys ``agents/HOST.key``, each for the host that its name says.

    A credentials provider for ``zmq.auth``: called for each new connection in the authenticator's thread. A host's
    replaced key is accepted until its agent has come with the new one.
    """

    folder: Path
    _hosts: dict[bytes, frozenset[str]] = field(default_factory=dict)
    """The hosts for which each key speaks."""
    _replaced: dict[str, bytes] = field(default_factory=dict)

    def load(self) -> None:
        """Read the keys again; raise HubError when there is none at all or one is malformed."""
        folder = self.folder / AGENT_FOLDER
        current, replaced = host_keys(folder, PUBLIC), host_keys(folder, REPLACED)
        if not current:
            raise HubError(f"{folder}: no agent's key there; write them with `cadenza keygen HOST...`")
        hosts: dict[bytes, frozenset[str]] = {}
        for host, key in (*current.items(), *replaced.items()):
            hosts[key] = hosts.get(key, frozenset()) | {host}
        self._hosts = hosts
        self._replaced = {host: key for host, key in replaced.items() if key != current.get(host)}

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 (zmq.auth's)
        """Return whether this z85 public key may connect (zmq.auth calls this)."""
        trusted = key in self._hosts
        if not trusted:
            log.warning("an agent with an unknown key was refused; is its host's key in %s?", self.folder)
        return trusted

    def hosts_of(self, user_id: str) -> frozenset[str]:
        """Return the hosts for which the key with this z85 text speaks."""
        return self._hosts.get(user_id.encode(), frozenset())

    def may_send_as(self, user_id: str, host: str) -> bool:
        """Return whether the key with this z85 text may send as ``host``."""
        return host in self.hosts_of(user_id)

    def came(self, user_id: str, host: str) -> None:
        """Stop accepting a host's replaced key once its agent comes with another one."""
        old = self._replaced.get(host)
        if old is None or user_id.encode() == old:
            return
        self._replaced.pop(host, None)
        self._hosts = {
            key: left for key, hosts in self._hosts.items() if (left := hosts - {host} if key == old else hosts)
        }
        path = self.folder / AGENT_FOLDER / f"{host}{REPLACED}"
        try:
            path.unlink()
        except OSError as error:
            log.warning("%s is no longer needed: delete it (%s)", path, error.strerror)
        log.info("agent HOST=%s has come with its new key", host)


def public_key(path: Path) -> bytes:
    """Return the public key in a file; raise HubError when there is none."""
    return _certificate(path)[0]


def host_keys(folder: Path, ending: str) -> dict[str, bytes]:
    """Return the public keys of all hosts whose files end so; raise HubError for a malformed one."""
    return {path.name.removesuffix(ending): _certificate(path)[0] for path in sorted(folder.glob(f"*{ending}"))}


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        # zmq calls a file that is not there an invalid one
        fault = "missing" if not path.exists() else getattr(error, "strerror", None) or error
        raise HubError(f"{path}: {fault}; write keys with `cadenza keygen`") from None


def make_keys(folder: Path, hosts: Collection[str], *, rotate: bool = False, force: bool = False) -> list[Path]:
    """Write the pairs that are missing or to be replaced; return the paths of the new files. Raise OSError.

    ``rotate`` keeps each host's present public key as ``agents/HOST.key.old``, unless its agent has not even come with
    that one.
    """
    agents, written = folder / AGENT_FOLDER, list[Path]()
    if not (folder / f"{SERVICE}{PUBLIC}").exists() or (force and not hosts):
        written += _write_pair(folder, SERVICE)
    for host in hosts:
        current, replaced = agents / f"{host}{PUBLIC}", agents / f"{host}{REPLACED}"
        kept = replaced if rotate and current.exists() and not replaced.exists() else None
        written += _write_pair(agents, host, kept)
        if force and kept is None:
            replaced.unlink(missing_ok=True)
    return written


def _write_pair(folder: Path, name: str, kept: Path | None = None) -> tuple[Path, Path]:
    """Write a key pair, and keep the public key before it as ``kept``; on an error the pair before it stays.

    No other user can read the secret half at any time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}{PUBLIC}", folder / f"{name}{SECRET}"
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as drafts:
        zmq.auth.create_certificates(drafts, name)
        for path, mode in zip(paths, (0o644, 0o600), strict=True):
            draft = Path(drafts, path.name)
            draft.chmod(mode)
            if path.exists():
                before = path.stat()
                os.chown(draft, before.st_uid, before.st_gid)
        if kept is not None:
            paths[0].rename(kept)
        for path in paths:
            Path(drafts, path.name).replace(path)
    return paths
