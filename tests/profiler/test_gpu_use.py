"""Which of the node's GPUs a measured command may use, and their type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cadenza.profiler.measure import gpu_use

A, B = "NVIDIA A30", "NVIDIA H100 80GB HBM3"


def node(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    devices = tuple(
        SimpleNamespace(index=number, names=(str(number), f"GPU-{number}a-0b"), kind=kind)
        for number, kind in enumerate(kinds)
    )
    monkeypatch.setattr(gpu_use, "nvml_devices", lambda: devices)


def numbers(environ: dict[str, str]) -> list[int]:
    return [device.index for device in gpu_use.visible(environ)]


@pytest.mark.parametrize(
    ("named", "found"),
    [(None, [0, 1, 2]), ("1", [1]), ("2, 0", [2, 0]), ("GPU-1", [1]), ("GPU-2a-0b,0", [2, 0]), ("GPU-", [0, 1, 2]),
     ("GPU-9", [0, 1, 2]), ("7", [0, 1, 2]), ("MIG-1a", [0, 1, 2]), ("²", [0, 1, 2])],
)  # fmt: skip
def test_on_a_node_of_one_type_numbers_and_uuids_name_gpus(
    monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[int]
) -> None:
    node(monkeypatch, A, A, A)
    assert numbers({} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == found


def test_with_several_types_cudas_numbers_are_nvmls_in_the_order_of_the_bus_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node(monkeypatch, A, B)
    assert numbers({"CUDA_VISIBLE_DEVICES": "0"}) == [0, 1]
    assert numbers({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [0]
    assert numbers({"CUDA_VISIBLE_DEVICES": "GPU-1a"}) == [1]


def test_the_type_is_that_of_the_first_gpu_that_the_command_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    node(monkeypatch, A, B)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a-0b")
    assert gpu_use.kind() == B
    node(monkeypatch)
    assert gpu_use.kind() == ""
