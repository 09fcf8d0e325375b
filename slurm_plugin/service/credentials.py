"""Users who ask from a host without a key: munge, or Slurm itself by a token, names them.

munge (munge(1)) names the user who made a credential, and accepts each of them once and for a minute. Ours seals the
question and the key of the connection, so that it is good for no other question and over no other connection, and a
credential that a user made for another program, such as Slurm, is none for a question.

A token of Slurm (``scontrol token``, auth/jwt) is looked into by slurmctld only: with its key this service could make
tokens of any user.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import pwd
import re
import subprocess
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from cadenza.sidecar.local_socket import MAX_REQUEST
from cadenza.slurm_plugin.errors import ServiceError

TOKEN = "SLURM_JWT"  # noqa: S105 (the name of a variable)
TIMEOUT_S = 5.0
TTL_S = 60
"""Age of a credential that munge accepts, and difference of two clocks that it allows."""
SPOKEN = re.compile(rb"STATUS:\s+Success \(0\)\nUID:[^\n]*\((\d{1,10})\)\n\n([0-9a-f]{64})")
"""Output of unmunge for a good credential of ours."""
ISSUED = re.compile(rb"SLURM_JWT=[\w-]+\.([\w-]+)\.[\w-]+\s*")


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question with a credential of munge or a token of Slurm."""

    question: Annotated[bytes, Meta(max_length=MAX_REQUEST)]
    munge: Annotated[str, Meta(max_length=1024, pattern=r"\A(MUNGE:[A-Za-z0-9+/=]+:)?\Z")] = ""
    token: Annotated[str, Meta(max_length=4096, pattern=r"\A([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){2})?\Z")] = ""


class _Claims(msgspec.Struct, frozen=True):
    """The part of a token of Slurm that names its user."""

    sun: str


def missing() -> str:
    """Return the sentence that says why this user has no credential, or nothing."""
    if os.environ.get(TOKEN):
        return ""
    try:
        _output("munge", "--no-input")
    except ServiceError as error:
        return f"{error}; `export $(scontrol token)`"
    return ""


def sealed(question: bytes, key: str) -> bytes:
    """Return this user's question for a connection with a public key; raise ServiceError where munge refuses."""
    if token := os.environ.get(TOKEN):
        return msgspec.json.encode(Question(question, token=token))
    credential = _output("munge", f"--ttl={TTL_S}", data=_digest(question, key)).decode(errors="replace").strip()
    return msgspec.json.encode(Question(question, munge=credential))


def uid_of(asked: Question, key: str) -> int:
    """Return the user who asked over a connection with a public key; raise ServiceError unless that is certain."""
    if asked.token:
        return _uid_by_slurm(asked.token)
    if not asked.munge:
        raise ServiceError("no credential came with this question")
    spoken = SPOKEN.fullmatch(_output("unmunge", "--keys=STATUS,UID", data=asked.munge.encode()))
    if spoken is None or spoken[2] != _digest(asked.question, key):
        raise ServiceError("this credential of munge is for another question")
    return int(spoken[1])


def _digest(question: bytes, key: str) -> bytes:
    return hashlib.sha256(b"cadenza question\n" + key.encode() + b"\n" + question).hexdigest().encode()


def _uid_by_slurm(token: str) -> int:
    # ``scontrol token`` with the user's token in SLURM_JWT fails unless Slurm takes it, and the token that it prints
    # names the user that Slurm took, whatever the first one says. If Slurm ever ignored the first one, that would be
    # the service's own user, who may not ask here.
    try:
        issued = ISSUED.fullmatch(_output("scontrol", "token", "lifespan=10", extra={TOKEN: token}))
    except ServiceError as error:
        raise ServiceError(f"{error}; for a new {TOKEN}: `export $(scontrol token)`") from None
    try:
        claims = issued[1] + b"==" if issued else b""
        name = msgspec.json.decode(base64.urlsafe_b64decode(claims), type=_Claims).sun
        return pwd.getpwnam(name).pw_uid
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, KeyError, ValueError):
        raise ServiceError("Slurm names no user of its machine for this token") from None


def _output(*words: str, data: bytes = b"", extra: Mapping[str, str] | None = None) -> bytes:
    """Return the output of a command; raise ServiceError with its reason where it refuses."""
    environment = {**os.environ, **(extra or {})}
    try:
        done = subprocess.run(words, input=data, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ServiceError(f"{words[0]} does not answer") from None
    except OSError as error:
        raise ServiceError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        said = done.stderr or done.stdout.partition(b"\n")[0]  # where unmunge says that one is replayed or expired
        text = " ".join(said.decode(errors="replace").split()).removeprefix(f"{words[0]}: ")
        raise ServiceError(f"{words[0]}: {text or f'exit code {done.returncode}'}")
    return done.stdout
