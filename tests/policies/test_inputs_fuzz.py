"""No text makes a reader do anything but return or raise InputError, with one line that names the source."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.costs import read_costs
from cadenza.policies.inputs.csv_table import decode
from cadenza.policies.inputs.failures import read_failures
from cadenza.policies.inputs.interference import read_interference, read_packed_rows
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.policies.inputs.published import synergy_profiles, text_of
from cadenza.policies.inputs.trace import read_trace
from cadenza.policies.simulator.load_sweep import read_loads
from cadenza.policies.simulator.result_file import decode as decode_saved
from cadenza.policies.simulator.workloads.catalogue import parse_workload

NODES = read_cluster("2x8:24:500")
READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "trace": (
        lambda text: read_trace(text, "F", synergy_profiles()),
        "job,submit_s,gpus,model,iterations,user,min_gpus,vc\n1,0,1,gnmt,5,a,1,x\n2,7.5,8,m5,5,,,\n",
    ),
    "profiles": (lambda text: read_profiles(text, "F"), text_of("synergy.json")[:900] + "}]}"),
    "cluster": (lambda text: read_cluster(text[:60]), "16x8:24:500:V100,2x4:12:448"),
    "costs": (lambda text: read_costs(text, "F"), "start_s = 1\ncopy_gb_s = 10.5\n"),
    "failures": (lambda text: read_failures(text, "F", NODES), "node,start_s,end_s\nn0001,0,5\nn0002,1e3,2e3\n"),
    "interference": (lambda text: read_interference(text, "F"), "model,other,speed,other_speed\na,b,0.5,1\n"),
    "table 1": (lambda text: read_packed_rows(text, "F"), text_of("gandiva-table1.csv")),
    "workload": (parse_workload, "synergy:load=8,split=20/70/10,jobs=90,gpus=single,seed=4"),
    "loads": (read_loads, "4:10:0.5"),
    "saved": (lambda text: decode_saved(text.encode("utf-8", "replace"), "F"), '{"label":"a","arguments":[],"gpus":1}'),
}
PIECES = [
    "", "nan", "inf", "-1", "1e999", "9" * 5000, "0", "٣", "\x00", "\ufeff", "\r", "\r\n", "\n", ",", ",,", '"', "'",
    ":", "x", "=", "-", "/", "{", "}", "[", "]", "null", "true", "1_0", "\u2028", "\ud800", " ", "#", "é",
    "job", "[" * 3000,
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """Replace a few stretches of a valid text with what tends to break readers."""
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(text)))
        end = min(begin + draw(st.integers(0, 12)), len(text))
        text = text[:begin] + draw(st.sampled_from(PIECES) | st.text(max_size=4)) + text[end:]
    return text


def survives(read: Callable[[str], object], text: str) -> None:
    said = "fine"
    try:
        read(text)
    except InputError as error:
        said = str(error)
    assert said
    assert "\n" not in said
    assert len(said) < 700


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60)
@given(data=st.data())
def test_mutated_files(name: str, data: st.DataObject) -> None:
    read, valid = READERS[name]
    survives(read, data.draw(mutated(valid)))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=25)
@given(text=st.text(max_size=60))
def test_any_text(name: str, text: str) -> None:
    survives(READERS[name][0], text)


@given(data=st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    survives(lambda _: decode(data, "F"), "")
    survives(lambda _: decode_saved(data, "F"), "")
