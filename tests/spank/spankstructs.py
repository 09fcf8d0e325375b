"""The structs of slurm_plugin/spank/cadenza.h for ctypes."""

from __future__ import annotations

import ctypes

GRANTED, ABSENT, SILENT, GIVES_UP = range(4)


class Options(ctypes.Structure):
    _fields_ = (
        ("share", ctypes.c_bool),
        ("min_gpus", ctypes.c_long),
        ("max_gpus", ctypes.c_long),
        ("priority", ctypes.c_long),
        ("model", ctypes.c_char * 65),
        ("iterations", ctypes.c_long),
        ("duration_s", ctypes.c_long),
        ("batch_per_gpu", ctypes.c_bool),
        ("late", ctypes.c_bool),
        ("graphs", ctypes.c_bool),
        ("summary", ctypes.c_bool),
        ("checkpoints", ctypes.c_bool),
    )


class Config(ctypes.Structure):
    _fields_ = (("socket", ctypes.c_char * 108), ("wait_s", ctypes.c_int))


class Job(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint32),
        ("restart", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("hosts", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("lane", ctypes.c_int),
        ("managed", ctypes.c_bool),
        ("gpu_count", ctypes.c_size_t),
        ("gpus", ctypes.c_int * 64),
        ("cpus", ctypes.c_uint32),
        ("memory_mb", ctypes.c_uint64),
        ("user", ctypes.c_char * 256),
        ("node", ctypes.c_char * 256),
        ("options", ctypes.c_char * 256),
        ("batch_per_gpu", ctypes.c_bool),
        ("late", ctypes.c_bool),
        ("graphs", ctypes.c_bool),
        ("summary", ctypes.c_bool),
        ("unheard", ctypes.c_bool),
    )


TELLER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Job), ctypes.c_char_p)


def job(*, lane: int = 0, managed: bool = True, user: str = "alice", options: str = "") -> Job:
    """Return job 7.2 with GPUs 0 and 3."""
    node = f"node1-l{lane}" if lane else "node1"
    return Job(
        id=7, restart=2, step=0xFFFFFFFB, hosts=2, uid=1000, lane=lane, managed=managed, gpu_count=2,
        gpus=(ctypes.c_int * 64)(0, 3), cpus=6, memory_mb=2**40,
        user=user.encode(), node=node.encode(), options=options.encode(),
    )  # fmt: skip
