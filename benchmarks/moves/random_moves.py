"""A training that is moved at random boundaries, many times in one run, against the same training left alone.

It has what moves used to lose: accumulation with a boundary after each micro-batch, an evaluation with boundaries,
ReduceLROnPlateau, early stopping, two optimizers, dropout and a ResumableSampler. Each of its starts is a forked
process, whose agent here orders a checkpoint at a random boundary and kills it after the answer, as a requeue does.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.checkpoints import ResumableSampler

SAMPLES, BATCH, ACCUMULATE = 44, 4, 3
BATCHES = SAMPLES // BATCH
EVALUATION = 4
"""Boundaries of one evaluation."""
PATIENCE = 2
PATIENCE_S = 60.0
GAP = 16
"""Longest distance of an order from the start, in boundaries."""


class Training:
    """The training; ``run`` goes on where its checkpoint is, and returns a digest of all that it has come to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data = torch.randn(SAMPLES, 6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(12, 1)
        self.optimizers = [
            torch.optim.AdamW(self.body.parameters(), lr=0.05),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0], factor=0.5, patience=0)
        self.sampler = ResumableSampler(SAMPLES, seed=1)
        self.stopping = {"best": 1e9, "bad": 0, "stages": 0, "evaluations": 0}

    def run(self, folder: Path, epochs: int) -> str:
        """Train to the end of an epoch."""
        session = client.attach(self.body, self.optimizers[0], self.head, self.optimizers[1])
        keeper = client.checkpoint(
            folder, model=[self.body, self.head], optimizer=self.optimizers, scheduler=self.scheduler,
            sampler=self.sampler, own={"stopping": self.stopping},
        )  # fmt: skip
        keeper.restore()
        loader = torch.utils.data.DataLoader(self.data, batch_size=BATCH, sampler=self.sampler)
        for epoch in range(self.sampler.epoch, epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.sampler.batches(loader):
                self.learn(batch)
                session.boundary(len(batch))
            self.evaluate(session.boundary)
        return json.dumps({"state": self.digest(), **self.stopping})

    def learn(self, batch: torch.Tensor) -> None:
        """Learn from a micro-batch; step with every third, and with the epoch's last."""
        loss = (self.head(self.body(batch)) - batch.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        number = self.sampler.position // BATCH
        if number % ACCUMULATE == 0 or number == BATCHES:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def evaluate(self, boundary: Callable[..., object]) -> None:
        """Evaluate; lower the rate on a plateau, and begin a new head where training would stop."""
        total = 0.0
        self.body.eval()
        for part in self.data.chunk(EVALUATION):
            with torch.no_grad():
                total += float((self.head(self.body(part)) - part.sum(1, keepdim=True)).pow(2).mean())
            boundary(training=False)
        self.body.train()
        self.scheduler.step(total)
        state = self.stopping
        state["evaluations"] += 1
        better = total < 0.99 * state["best"]
        state["best"], state["bad"] = (total, 0) if better else (state["best"], state["bad"] + 1)
        if state["bad"] > PATIENCE:
            state.update(best=1e9, bad=0, stages=state["stages"] + 1)
            for module in (self.head, self.body[0]):
                module.reset_parameters()
            for group in self.optimizers[0].param_groups:
                group["lr"] = 0.05

    def digest(self) -> int:
        """Return a checksum of parameters, buffers, optimizers, scheduler and random numbers."""
        found = [*self.body.state_dict().items(), *self.head.state_dict().items()]
        for optimizer in self.optimizers:
            found += [(key, value) for one in optimizer.state_dict()["state"].values() for key, value in one.items()]
            found += [("lr", group["lr"]) for group in optimizer.param_groups]
        plain = {key: value for key, value in self.scheduler.state_dict().items() if key != "optimizer"}
        texts = [f"{key}={value.tolist() if isinstance(value, torch.Tensor) else value}" for key, value in found]
        return zlib.crc32("\n".join([*texts, repr(plain), str(torch.get_rng_state().tolist())]).encode())


@dataclass
class Played:
    """A training moved so many times: its digest and the one without moves, and the seconds of a move."""

    digest: str
    alone: str
    moves: int
    seconds: float


class Job:
    """Starts the training as one job in forked processes, and moves it."""

    def __init__(self, number: int, folder: Path, epochs: int) -> None:
        self._number, self._folder, self._epochs = number, folder, epochs
        self._starts = 0
        self._output = folder / f"output-{number}.txt"
        self._receipt: dict[str, object] = {}

    def start(self, stop: int) -> str | None:
        """Start it once, with an order at a boundary (0: none); return its digest, or None if it was moved."""
        self._starts += 1
        path = self._folder / f"agent-{self._number}-{self._starts}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(PATIENCE_S)
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                self._be_the_job(path, writing)
            os.close(writing)
            try:
                connection, _ = listener.accept()
                connection.settimeout(PATIENCE_S)
                with connection:
                    moved = self._follow(connection, stop)
                with os.fdopen(reading, closefd=False) as answer:
                    digest = None if moved else answer.read()
                if digest == "":
                    raise RuntimeError(self._output.read_text())
                return digest
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(reading)
                path.unlink()

    def _be_the_job(self, path: Path, writing: int) -> None:
        """Train in the forked process, write the digest, and end."""
        os.environ.update({"SLURM_JOB_ID": str(self._number), "SLURM_RESTART_COUNT": str(self._starts - 1)})
        os.environ[wire.SOCKET_ENV] = str(path)
        with self._output.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            digest = Training().run(self._folder / f"checkpoints-{self._number}", self._epochs)
            os.write(writing, digest.encode())
            client.detach()
        except BaseException:  # noqa: BLE001 - a forked process must not go on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _follow(self, connection: socket.socket, stop: int) -> bool:
        """Give a rank its page, and go on with the order; return whether its checkpoint is on the disk."""
        hello = wire.decode(connection.recv(wire.MAX_PACKET))
        descriptor = os.memfd_create("page")
        os.ftruncate(descriptor, wire.PAGE_BYTES)
        page = memoryview(mmap.mmap(descriptor, wire.PAGE_BYTES)).cast("Q")
        page[wire.PAGE_STEP], page[wire.PAGE_PURPOSE] = hello["step"], wire.PURPOSE_CHECKPOINT
        page[wire.PAGE_ORDER], page[wire.PAGE_STOP] = 1, stop
        attached = wire.encode("attached", state="held", rank=0, receipt=self._receipt)
        socket.send_fds(connection, [attached], [descriptor])
        os.close(descriptor)
        while packet := connection.recv(wire.MAX_PACKET):
            message = wire.decode(packet)
            if message.get("refused") or message.get("error") or message["type"] == "unrestored":
                raise RuntimeError(f"{message}\n{self._output.read_text()}")
            if message["type"] == "arrived":
                connection.send(wire.encode("commit", order=1))
            elif message["type"] == "checkpointed":
                kept = {name: message[name] for name in ("step", "paths")}
                self._receipt = {**kept, "restart": self._starts, "away_s": 0.0}
                return True
        return False


def warm_up() -> None:
    """Import here what the forked processes would each import at their first step."""
    training = Training()
    training.learn(training.data)
    training.evaluate(lambda **_: None)
    for _ in training.sampler.batches(torch.utils.data.DataLoader(training.data, batch_size=BATCH)):
        pass
    import_module("cadenza.sidecar.client.session.job_session")
    import_module("cadenza.sidecar.client.offload.exports")
    import_module("torch.distributed")
    gc.collect()
    gc.freeze()  # searches of the forked processes would copy every object that they look at


def play(folder: Path, moves: int, seed: int) -> Played:
    """Move the training at random boundaries, so many times, to its end; and train it alone."""
    warm_up()
    per_epoch = BATCHES + EVALUATION
    epochs = 2 + moves * GAP // per_epoch
    draw = random.Random(seed)
    alone = Job(1, folder, epochs).start(0)
    job = Job(2, folder, epochs)
    made, began, digest = 0, time.monotonic(), None
    while digest is None:
        digest = job.start(draw.randint(1, GAP) if made < moves else 0)
        made += digest is None
    return Played(digest, str(alone), made, (time.monotonic() - began) / max(1, made))


def main(folder: Path, moves: int, seed: int) -> int:
    """Print a comparison; return 1 if a move changed anything."""
    torch.set_num_threads(1)
    played = play(folder, moves, seed)
    same = played.digest == played.alone and played.moves == moves
    print(f"random moves, seed {seed}: {played.moves} of {moves} moves, {1000 * played.seconds:.0f} ms each: ", end="")
    print("bit-identical" if same else f"DIFFERS: {played.digest} in place of {played.alone}")
    sys.stdout.flush()
    return 0 if same else 1
