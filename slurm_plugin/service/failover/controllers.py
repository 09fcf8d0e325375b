"""Choice of the controller that acts: the one whose slurmctld is in control, by Slurm's own word (scontrol ping)."""

from __future__ import annotations

import json
import logging

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.text import printable
from cadenza.slurm_plugin.gateway.commands import Refusal, json_answer

log = logging.getLogger(__name__)


class Controllers:
    """The place of this host among ``SlurmctldHost``, in whose order slurmctlds take over from each other."""

    def __init__(self, host: str) -> None:
        self._host = host.partition(".")[0]
        self._reason = ""
        self._alone = False

    def standby_reason(self) -> str:
        """Return why a service on this host must not act, "" if it must; without an answer it stays as it was.

        A site with one slurmctld, or with none on this host, has one service, which always acts; it asks once.
        """
        if self._alone:
            return ""
        try:
            pings = [
                (str(one["hostname"]).partition(".")[0], one["responding"] is True)
                for one in json.loads(json_answer("scontrol", "ping"))["pings"]
            ]
        except (EnvironmentLacks, Refusal, ValueError, LookupError, TypeError) as error:
            log.warning("which slurmctld is in control is not known: %s", printable(str(error)))
            return self._reason
        self._alone = len(pings) == 1 or self._host not in dict(pings)
        self._reason = "" if self._alone else standby_reason(self._host, pings, self._reason)
        return self._reason


def standby_reason(host: str, pings: list[tuple[str, bool]], before: str) -> str:
    """Return why a service on a host must not act, by the slurmctlds in order and whether each answers (pure)."""
    # Those behind the first that answers are in standby, and answer a ping all the same (slurm.conf(5), SlurmctldHost).
    leader = next((name for name, answers in pings if answers), None)
    if leader is None:
        return before
    return "" if leader == host else f"stands by: slurmctld of {leader} is in control"
