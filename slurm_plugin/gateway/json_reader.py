"""The process that reads Slurm's JSON for the service: lists of jobs and nodes, of which it tells what has changed.

``python -m cadenza.slurm_plugin.gateway.json_reader FD`` serves requests on the socket FD until its other end closes.
It is a process of its own because the list of 60,000 jobs is 240 MB of text: the service's threads go on while it is
read, and its memory stays as it is. A record is decoded only if its bytes are others than before, and is sent only if
what is read of it is.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar import clock
from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway import slurm_json
from cadenza.slurm_plugin.gateway.commands import Refusal, json_answer
from cadenza.slurm_plugin.gateway.slurm_json import NotSlurms, Refused
from cadenza.slurm_plugin.gateway.supervisor import Supervisor, WorkerSettings
from cadenza.slurm_plugin.gateway.worker import send

COMMAND = (sys.executable, "-m", "cadenza.slurm_plugin.gateway.json_reader")
KINDS = {"jobs": "id", "nodes": "name"}
"""The lists, each with the field by which its records are known."""
TIMEOUT_S = 120.0
"""Longest time for a list: squeue itself gives up before, but 100,000 jobs take some seconds to decode."""

Fields: TypeAlias = dict[str, Any]


class Changes:
    """One kind of list as it was answered last, in digests."""

    def __init__(self, key: str) -> None:
        self._key, self._name = key, KINDS[key]
        self._seen: dict[bytes, int | str] = {}
        """Name of each record by the digest of its bytes."""
        self._sent: dict[int | str, bytes] = {}
        """Digest of the fields of each record by its name."""

    def since_last(self, data: bytes) -> Fields:
        """Return the names of all records in their order, the fields of those that changed, and the refused ones."""
        raws, version = slurm_json.raw_records(data, self._key)
        names: list[int | str] = []
        changed: list[Fields] = []
        refused: list[Refused] = []
        seen: dict[bytes, int | str] = {}
        sent: dict[int | str, bytes] = {}
        for raw in raws:
            digest = _digest(bytes(raw))
            name = self._seen.get(digest)
            if name is None:
                found, bad = slurm_json.decode_records([raw], version, self._key)
                refused += bad
                if not found:
                    continue
                name, fields = found[0][self._name], _digest(json.dumps(found[0]).encode())
                if self._sent.get(name) != fields:
                    changed += found
                sent[name] = fields
            else:
                sent[name] = self._sent[name]
            seen[digest] = name
            names.append(name)
        whole = not self._sent
        self._seen, self._sent = seen, sent
        return {"names": names, "changed": changed, "refused": refused, "whole": whole}


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class JsonReader:
    """The service's end: keeps the records, so that one that has not changed is the same object as before."""

    def __init__(self) -> None:
        self._process = Supervisor(WorkerSettings(command=COMMAND, request_timeout_s=TIMEOUT_S))
        self._records: dict[str, dict[int | str, Fields]] = {}
        self.waited_s = 0.0
        """Time for which Slurm's commands have waited so far, seconds: slurmctld's, without that of making the JSON."""

    def read(self, key: str, words: Sequence[str]) -> tuple[list[Fields], list[Refused]]:
        """Return the records of an answer and those that could not be read; raise as ``json_answer`` does."""
        answer = self._process.ask(f"reading {key}", "read", key=key, words=list(words))
        if "refusal" in answer:
            raise Refusal(answer["refusal"], answer["errno"])
        if "lacks" in answer:
            raise EnvironmentLacks(answer["lacks"])
        if "not_slurms" in answer:
            raise SlurmUnavailable(f"{' '.join(words)}: {answer['not_slurms']}")
        self.waited_s += answer["waited_s"]
        name = KINDS[key]
        known = {} if answer["whole"] else self._records.get(key, {})
        known |= {one[name]: one for one in answer["changed"]}
        records = [known[one] for one in answer["names"]]
        self._records[key] = {one[name]: one for one in records}
        return records, [Refused(*one) for one in answer["refused"]]

    def close(self) -> None:
        """End the process."""
        self._process.close()


def answer(lists: Mapping[str, Changes], request: Mapping[str, Any]) -> Fields:
    """Return the answer to one request; a failure of Slurm's is an answer."""
    began_s, used_s = clock.monotonic(), _used_s()
    try:
        data = json_answer(*request["words"])
        waited_s = max(clock.monotonic() - began_s - (_used_s() - used_s), 0.0)
        return lists[request["key"]].since_last(data) | {"waited_s": waited_s}
    except Refusal as error:
        return {"refusal": error.msg, "errno": error.errno}
    except EnvironmentLacks as error:
        return {"lacks": str(error)}
    except NotSlurms as error:
        return {"not_slurms": str(error)}


def _used_s() -> float:
    """Return the CPU time of the commands that have ended, seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> int:
    """Serve on the file descriptor given."""
    channel = socket.socket(fileno=int(arguments[0]))
    lists = {key: Changes(key) for key in KINDS}
    send(channel, {"greeting": {}})
    with channel.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            send(channel, {"id": request["id"], "result": answer(lists, request)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
