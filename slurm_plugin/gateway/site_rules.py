"""The site's rules on who goes first, as Slurm has them in force: weights, tiers, QOS, fair share.

Each part comes from one of Slurm's commands. A part that cannot be read keeps its last answer, so that a slurmdbd that
is away never ends a round. A record that cannot be read costs itself only. This module imports the standard library and
little else, because the worker around pyslurm runs it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from math import isnan
from typing import Any

from cadenza.policies.core.errors import CadenzaError
from cadenza.slurm_plugin.gateway.commands import Refusal, answer

log = logging.getLogger(__name__)

TIMEOUT_S = 4.0
"""All commands together stay within the time that the worker has for an answer."""
MAX_LINES, MAX_NAME = 2**16, 256
MAX_NUMBER = 2**32 - 1
MAX_LEVEL = 1e9
"""LevelFS of those who have used nothing: sshare says ``inf``."""
WEIGHTS = ("age", "assoc", "fairshare", "jobsize", "partition", "qos")
PARTS = {"weights": "weights", "tiers": "partitions", "qos_priority": "QOS", "fair_share": "fair shares"}
"""Parts of the rules with their names for admins."""
NO_ACCOUNTING = frozenset({"", "(null)", "accounting_storage/none"})
DAY_S = 86400.0
DEFAULT_MAX_AGE_S = 7 * DAY_S
_CONFIG = re.compile(r"^(Priority\w+|AccountingStorageType)[ ]*=[ ]?(.*)$", re.MULTILINE | re.ASCII)
_AGE = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):(\d\d):(\d\d)", re.ASCII)
_PARTITION = re.compile(r"^PartitionName=(\S+) .*?\bPriorityTier=(\d{1,10})\b", re.MULTILINE | re.ASCII)
_QOS = re.compile(r"^QOS=(.+)\(\d{1,10}\)$|^    Priority=(\d{1,10})$", re.MULTILINE | re.ASCII)
_TRES_WEIGHT = re.compile(r"[^,=]+=(\d{1,10}(?:\.\d{1,6})?)", re.ASCII)


class SiteReader:
    """Reads the rules; the answer of :meth:`read` is plain data, as the worker sends it."""

    def __init__(self) -> None:
        self._rules: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._accounted = True

    def read(self) -> dict[str, Any]:
        """Return the rules, those that cannot be read now as they were; raise nothing."""
        self._part(config_rules, "scontrol", "show", "config")
        self._part(tiers, "scontrol", "--all", "--oneliner", "show", "partition")
        # A site without accounting has no QOS, and one whose priority has no weight for fair share has no rule on it,
        # whatever sshare would say.
        if self._accounted:
            self._part(qos_priorities, "sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,priority")
            # A service that starts while slurmdbd is away asks slurmctld, which lists each user's usage, too.
            if "qos_priority" not in self._rules:
                self._part(cached_priorities, "scontrol", "show", "assoc_mgr", "flags=qos")
        else:
            self._rules["qos_priority"] = {}
        if self._accounted and self._rules.get("weights", {}).get("fairshare"):
            self._part(fair_shares, "sshare", "--all", "--long", "--parsable2")
        else:
            self._rules["fair_share"] = {}
        unread = sorted(PARTS[name] for name in PARTS.keys() - self._rules.keys())
        return self._rules | {"unread": unread}

    def _part(self, read: Callable[[str], dict[str, Any]], *words: str) -> None:
        try:
            rules = read(answer(*words, timeout_s=TIMEOUT_S).decode("utf-8", "replace"))
            self._accounted = rules.pop("accounting", self._accounted)
            self._rules |= rules
            self._failed.discard(words[0] + read.__name__)
        except (Refusal, CadenzaError, ValueError) as error:
            if words[0] + read.__name__ not in self._failed:
                log.warning("the site's rules: %s; what was known of them before still counts", error)
            self._failed.add(words[0] + read.__name__)


def config_rules(text: str) -> dict[str, Any]:
    r"""Return the type of priority, its weights that are not 0, and the age of the whole weight, of the configuration.

    >>> text = "PriorityMaxAge = 1-00:00:00\nPriorityType = priority/multifactor\nPriorityWeightAge = 5\n"
    >>> config_rules(text)
    {'multifactor': True, 'weights': {'age': 5}, 'max_age_s': 86400.0, 'accounting': False}
    """
    found = {key.lower(): value.strip() for key, value in _CONFIG.findall(text)}
    if "prioritytype" not in found:
        raise ValueError("scontrol show config: there is no PriorityType")
    return {
        "multifactor": found["prioritytype"] == "priority/multifactor",
        "weights": weights_of(found),
        "max_age_s": _age_s(found.get("prioritymaxage", "")),
        "accounting": found.get("accountingstoragetype", "") not in NO_ACCOUNTING,
    }


def weights_of(config: Mapping[str, str]) -> dict[str, int]:
    """Return the weights of a configuration that are not 0, by the last word of their names in lower case."""
    found = {key.lower(): value for key, value in config.items()}
    weights = {name: _whole(found.get(f"priorityweight{name}", "")) for name in WEIGHTS}
    parts = _TRES_WEIGHT.findall(found.get("priorityweighttres", ""))
    weights["tres"] = min(int(sum(map(float, parts))), MAX_NUMBER)
    return {name: weight for name, weight in weights.items() if weight}


def tiers(text: str) -> dict[str, Any]:
    """Return the PriorityTier of each partition."""
    found = _PARTITION.findall(text)[:MAX_LINES]
    return {"tiers": {name: _whole(tier) for name, tier in found if _is_name(name)}}


def qos_priorities(text: str) -> dict[str, Any]:
    r"""Return the priority of each QOS.

    >>> qos_priorities("normal|0\nhigh|100\nodd|many\n")
    {'qos_priority': {'normal': 0, 'high': 100}}
    """
    pairs = [line.rpartition("|") for line in text.splitlines()[:MAX_LINES]]
    return {"qos_priority": {name: int(number) for name, _, number in pairs if _is_name(name) and _is_whole(number)}}


def cached_priorities(text: str) -> dict[str, Any]:
    r"""Return the priority of each QOS as slurmctld has it in its memory.

    >>> cached_priorities("QOS=high(2)\n    MinPrioThresh=\n    Priority=100\nQOS=odd(3)\n")
    {'qos_priority': {'high': 100}}
    """
    found: dict[str, int] = {}
    name = ""
    for named, number in _QOS.findall(text):
        if named:
            name = named if len(found) < MAX_LINES and _is_name(named) else ""
        elif name and _is_whole(number):
            found.setdefault(name, int(number))
    if not found:
        raise ValueError("scontrol show assoc_mgr: there is no QOS")
    return {"qos_priority": found}


def fair_shares(text: str) -> dict[str, Any]:
    """Return the LevelFS of accounts (``ACCOUNT``) and their users (``ACCOUNT/USER``).

    Under ``PriorityFlags=NO_FAIR_TREE`` sshare has no such column: it is the share over the usage, too.
    """
    return {"fair_share": dict(_levels(text))}


def _levels(text: str) -> Iterator[tuple[str, float]]:
    heading, *lines = text.splitlines()[:MAX_LINES] or [""]
    columns = heading.split("|")
    if not {"Account", "User", "NormShares", "EffectvUsage"} <= set(columns):
        raise ValueError(f"sshare: its columns are {heading[:200]!r}")
    for line in lines:
        row = dict(zip(columns, line.split("|"), strict=False))
        account, user = row["Account"].strip(), row.get("User", "").strip()
        level = _level(row)
        if level is not None and _is_name(account) and (not user or _is_name(user)):
            yield (f"{account}/{user}" if user else account), level


def _level(row: Mapping[str, str]) -> float | None:
    """Return a row's LevelFS, None if it has none, as the root account."""
    try:
        share, usage = float(row["NormShares"]), float(row["EffectvUsage"])
        # Until Slurm has added up the use of a new account its LevelFS is 0, as if it had had too much.
        level = MAX_LEVEL if share > 0 and usage <= 0 else float(row["LevelFS"] if "LevelFS" in row else share / usage)
    except (ValueError, KeyError, ZeroDivisionError):
        return None
    return None if isnan(level) or level < 0 else min(level, MAX_LEVEL)


def _age_s(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        return DEFAULT_MAX_AGE_S
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * DAY_S + hours * 3600.0 + minutes * 60.0 + seconds


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text[:12]) <= MAX_NUMBER and len(text) <= len(str(MAX_NUMBER))


def _whole(text: str) -> int:
    """Return a number that is not negative; 0 for a text that is none."""
    return int(text) if _is_whole(text) else 0
