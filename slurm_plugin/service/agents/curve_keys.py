"""CURVE keys of the link: the service's own pair, and the public keys of its agents."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import zmq.auth

from cadenza.slurm_plugin.service.errors import HubError

log = logging.getLogger(__name__)

SHARED_AGENT = "agent.key"
AGENT_FOLDER = "agents"


def service_pair(folder: Path) -> tuple[bytes, bytes]:
    """Return the service's public and secret key in z85; raise HubError when there are none."""
    path = folder / "service.key_secret"
    public, secret = _certificate(path)
    if secret is None:
        raise HubError(f"{path}: holds no secret key; write new ones with `cadenza keygen`")
    if path.stat().st_mode & 0o077:
        log.warning("%s is readable by others than its owner; chmod 600 it", path)
    return public, secret


@dataclass
class AgentKeys:
    """The agents' public keys: one ``agent.key`` for all hosts, or ``agents/HOST.key`` for one host each.

    A credentials provider for ``zmq.auth``: called for each new connection in the authenticator's thread.
    """

    folder: Path
    _hosts: dict[bytes, str] = field(default_factory=dict)

    def load(self) -> None:
        """Read the keys again; raise HubError when there is none at all or one is malformed."""
        hosts = {}
        shared = self.folder / SHARED_AGENT
        if shared.exists():
            hosts[_certificate(shared)[0]] = ""
        for path in sorted((self.folder / AGENT_FOLDER).glob("*.key")):
            hosts[_certificate(path)[0]] = path.stem
        if not hosts:
            raise HubError(f"{shared}: no agent key there; write one with `cadenza keygen`")
        self._hosts = hosts

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 (zmq.auth's)
        """Return whether this z85 public key may connect (zmq.auth calls this)."""
        trusted = key in self._hosts
        if not trusted:
            log.warning("an agent with an unknown key was refused; is its agent.key the service's?")
        return trusted

    def may_send_as(self, user_id: str, host: str) -> bool:
        """Return whether the key with this z85 text may send as ``host``."""
        bound = self._hosts.get(user_id.encode())
        return bound is not None and bound in ("", host)


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except OSError as error:
        raise HubError(f"{path}: {error.strerror or error}; write keys with `cadenza keygen`") from None
    except ValueError as error:
        raise HubError(f"{path}: {error}; write keys with `cadenza keygen`") from None
