"""The helper process: carries out calls of CUDA's checkpoint API, each in a thread, until the agent is gone.

It keeps CUDA initialized, which takes seconds and which a restore needs (cuCheckpointProcessRestore). A call that hangs
delays no other. When the agent's end of the socket closes, processes that are locked and not checkpointed are unlocked;
checkpointed processes are left to the next agent, whose helper waits for this one to end.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path

import msgspec

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.driver.cuda import Cuda, CudaError
from cadenza.sidecar.agent.driver.inspection import Inspector
from cadenza.sidecar.agent.driver.protocol import MAX_PACKET, Call, Called, Hello, InspectCall, Reply, Request
from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.telemetry.gpus import driver_version
from cadenza.sidecar.clock import Clock, SystemClock

LEAVE_TIMEOUT_S = 120.0
"""Time allowed to calls under way once the agent is gone: a copy that is cut off may spoil its process."""
RETRY_INTERVAL_S = 0.2


class Helper:
    """Answers the requests on a socket."""

    def __init__(self, sock: socket.socket, cuda: Cuda, inspector: Inspector, clock: Clock) -> None:
        self._sock, self._cuda, self._inspector, self._clock = sock, cuda, inspector, clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._state = threading.Condition()
        self._locked: dict[int, int] = {}
        """Start times by pid of the processes known to be locked and not checkpointed."""
        self._busy: Counter[int] = Counter()
        """Requests under way by pid; 0 stands for inspections."""

    def serve(self) -> None:
        """Answer until the other end closes."""
        decoder = msgspec.msgpack.Decoder(Request)
        while packet := self._receive():
            request = decoder.decode(packet)
            with self._state:
                self._busy[_pid(request)] += 1
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(MAX_PACKET)
        except OSError:
            return b""

    def _answer(self, request: Request) -> None:
        """Carry out one request and reply."""
        reply: Reply = self._inspector.inspect(request) if isinstance(request, InspectCall) else self._call(request)
        with self._state:
            self._busy[_pid(request)] -= 1
            self._state.notify_all()
        self.send(reply)

    def send(self, reply: Reply) -> None:
        """Send one packet, unless the agent is gone."""
        try:
            self._sock.send(self._encode(reply))
        except OSError:
            return

    def _call(self, call: Call) -> Called:
        """Make a call on a process, if pid and start time still match."""
        if start_ticks(call.pid) != call.start_ticks:
            return Called(call.id, error="it has ended", gone=True)
        try:
            return Called(call.id, self._operate(call))
        except (CudaError, RuntimeError) as error:
            return Called(call.id, error=str(error), gone=start_ticks(call.pid) != call.start_ticks)

    def _operate(self, call: Call) -> str:
        """Call the driver and keep track of locked processes; return the state if that was requested."""
        state = ""
        if call.operation == "state":
            state = self._cuda.state(call.pid)
        elif call.operation == "lock":
            self._cuda.lock(call.pid, call.timeout_ms)
        elif call.operation == "checkpoint":
            self._cuda.checkpoint(call.pid)
        elif call.operation == "restore":
            self._cuda.restore(call.pid, call.pairs)
        else:
            self._cuda.unlock(call.pid)
        with self._state:
            if call.operation in {"lock", "restore"} or state == "locked":
                self._locked[call.pid] = call.start_ticks
            elif call.operation != "state" or state:
                self._locked.pop(call.pid, None)
        return state

    def leave(self) -> None:
        """Unlock all locked processes, also those that calls under way still lock, and wait for these within limits."""
        deadline = self._clock.monotonic() + LEAVE_TIMEOUT_S
        asked: set[int] = set()
        while (left := deadline - self._clock.monotonic()) > 0:
            with self._state:
                if not self._locked and not self._busy.total():
                    return
                locked = {pid: ticks for pid, ticks in self._locked.items() if not self._busy[pid]}
            for pid, ticks in locked.items():
                if pid not in asked:
                    asked.add(pid)
                    threading.Thread(target=self._release, args=(pid, ticks, asked), daemon=True).start()
            with self._state:
                self._state.wait(min(left, RETRY_INTERVAL_S))

    def _release(self, pid: int, ticks: int, asked: set[int]) -> None:
        """Unlock one process."""
        answer = self._call(Call(0, "unlock", pid, ticks))
        if answer.error and not answer.gone:
            self._call(Call(0, "state", pid, ticks))  # removes it from the record if it is not locked
        with self._state:
            if answer.gone:
                self._locked.pop(pid, None)
            asked.discard(pid)


def _pid(request: Request) -> int:
    return request.pid if isinstance(request, Call) else 0


def main(lock: str) -> None:
    """Serve on standard input's socket; one helper a host at a time."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the agent is the end of its socket
    sock = socket.socket(fileno=0)
    with Path(lock).open("a", encoding="ascii") as file:
        # The helper of an earlier agent may still be copying: two helpers would call the driver for one process.
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            cuda = Cuda()
        except EnvironmentLacks as error:
            sock.send(msgspec.msgpack.encode(Hello(problem=str(error))))
            return
        helper = Helper(sock, cuda, Inspector(), SystemClock())
        helper.send(Hello(cuda.version, driver=driver_version()))
        helper.serve()
        helper.leave()
        os._exit(0)  # threads may hang in the driver


if __name__ == "__main__":
    main(sys.argv[1])
