"""Profile files: both layouts, the way back, and what each mistake is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_data import published

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Demand, Profile, Reference
from cadenza.policies.inputs.profiles import read_profiles, write_profiles
from cadenza.policies.inputs.published import synergy_profiles, text_of

ONE: dict[str, Any] = {
    "schema": "cadenza.profile/1",
    "model": "m",
    "iteration_s": 0.5,
    "cpus_per_gpu": [1, 3],
    "memory_gb_per_gpu": [20, 62.5],
    "throughput": [[0.1, 0.4], [0.1, 1.0]],
}
TABLE: dict[str, Any] = {
    "server": {"gpus": 8, "cpus": 24, "memory_gb": 500},
    "cpus_per_gpu": [1, 3],
    "memory_gb_per_gpu": [20.83, 62.5],
    "models": {
        "m": {"task": "image", "iteration_s": 0.5, "best_cpus": 1, "best_memory_gb": 20, "best_speedup": 1,
              "throughput": [[1, 1], [1, 1]]},
    },
}  # fmt: skip


def same(one: Profile, other: Profile) -> bool:
    names = [item.name for item in fields(Profile) if item.name != "siblings"]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def refusal(value: object) -> str:
    with pytest.raises(InputError) as caught:
        read_profiles(value if isinstance(value, str) else json.dumps(value), "p.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_profile_a_file_and_many() -> None:
    one = read_profiles(json.dumps(ONE), "p.json")
    many = read_profiles(json.dumps({"schema": ONE["schema"], "profiles": [{**ONE, "model": "n"}, ONE]}), "p.json")
    assert list(one) == ["m"]
    assert list(many) == ["n", "m"]
    assert same(one["m"], many["m"])
    assert one["m"].reference == Reference(8, 24, 500)


def test_all_keys_are_read() -> None:
    profile = read_profiles(
        json.dumps({
            **ONE, "gpu": "a100", "task": "image", "reference": {"gpus": 4, "cpus": 12, "memory_gb": 250},
            "storage_mb_s": [[0, 1], [2, 3]], "gpu_memory_gb": {"peak": 9, "low": 1}, "gpu_utilization": 0.5,
            "declared_best": {"cpus": 3, "memory_gb": 62.5}, "source": "s", "license": "l", "note": "n",
        }),
        "p.json",
    )["m"]  # fmt: skip
    assert profile.reference == Reference(4, 12, 250)
    assert profile.storage_mb_s == ((0, 1), (2, 3))
    assert (profile.gpu_memory_peak_gb, profile.gpu_memory_low_gb, profile.gpu_utilization) == (9, 1, 0.5)
    assert profile.declared_best == Demand(3, 62.5)


def test_one_model_on_several_gpus_becomes_siblings() -> None:
    items = [{**ONE, "gpu": "p40"}, {**ONE, "gpu": "p100", "iteration_s": 0.25}]
    found = read_profiles(json.dumps({"schema": ONE["schema"], "profiles": items}), "p.json")
    first = found["m"]
    assert first.gpu == "p40"
    assert first.on("p100").iteration_s == 0.25
    assert first.on("p100").on("p40") is first
    assert first.on("k80") is first
    assert first.relative("p100") == 2.0
    again = read_profiles(write_profiles(found), "again")
    assert same(again["m"].on("p100"), first.on("p100"))


def test_the_published_layout() -> None:
    profile = read_profiles(json.dumps(TABLE), "p.json")["m"]
    assert profile.best == Demand(1, 20.83)
    assert profile.task == "image"


def test_the_shipped_profiles_are_the_published_ones() -> None:
    shipped = synergy_profiles()
    assert len(shipped) == 10
    assert shipped["alexnet"].best_speed == 2.94
    assert shipped["m5"].best == Demand(6, 187.5)
    assert json.loads(text_of("synergy.json"))["license"].startswith("MIT")
    if path := published("synergy-models.json"):
        found = read_profiles(path.read_text(), path.name)
        assert list(found) == list(shipped)
        assert all(same(found[name], shipped[name]) for name in shipped)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"itration_s": 1}, "p.json: unknown key 'itration_s'; did you mean 'iteration_s'?"),
        ({"reference": {"gpu": 1}}, "p.json: unknown key 'gpu' in reference; did you mean 'gpus'?"),
        ({"gpu_memory_gb": {"max": 1}}, "p.json: unknown key 'max' in gpu_memory_gb; known here: peak, low"),
        ({"schema": "cadenza.profile/2"}, "p.json: schema: invalid enum value"),
        ({"iteration_s": "1"}, "p.json: iteration_s: expected `float`, got `str`"),
        ({"iteration_s": -1}, "p.json: model 'm': iteration_s: must be a number above 0"),
        ({"iteration_s": 0}, "p.json: model 'm': iteration_s: must be"),
        ({"model": " "}, "p.json: model: must not be empty"),
        ({"cpus_per_gpu": []}, "p.json: model 'm': cpus_per_gpu: must not be empty"),
        ({"cpus_per_gpu": [3, 1]}, "p.json: model 'm': cpus_per_gpu: must ascend"),
        ({"cpus_per_gpu": [1, 1]}, "p.json: model 'm': cpus_per_gpu: must ascend"),
        ({"memory_gb_per_gpu": [0, 62.5]}, "p.json: model 'm': memory_gb_per_gpu: every value"),
        ({"throughput": [[0.1, 0.4]]}, "p.json: model 'm': throughput: must have 2 rows (CPUs) of 2 values (memory)"),
        ({"throughput": [[1], [1, 1]]}, "p.json: model 'm': throughput: must have 2 rows"),
        ({"throughput": [[0, 1], [1, 1]]}, "p.json: model 'm': throughput: every value must be a number above 0"),
        ({"throughput": [[9, 90], [90, 245]]}, "p.json: model 'm': throughput must be relative to the proportional"),
        ({"storage_mb_s": [[1]]}, "p.json: model 'm': storage_mb_s: must have 2 rows"),
        ({"storage_mb_s": [[1, -1], [1, 1]]}, "p.json: model 'm': storage_mb_s: every value must be a number from 0"),
        ({"gpu_utilization": 87}, "p.json: model 'm': gpu_utilization: must be from 0 to 1"),
        ({"gpu_memory_gb": {"peak": 1, "low": 2}}, "p.json: model 'm': gpu_memory_gb.low: 2 is above the peak, 1"),
        ({"reference": {"gpus": 0}}, "p.json: model 'm': reference.gpus: must be a number above 0"),
        ({"declared_best": {"cpus": 0, "memory_gb": 1}}, "p.json: model 'm': declared_best.cpus: must be"),
        ({"declared_best": {"cpus": 1}}, "p.json: declared_best: object missing required field `memory_gb`"),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], said: str) -> None:
    assert refusal({**ONE, **change}).startswith(said)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "p.json:1: not JSON"),
        ('{"a": 1,\n\n]', "p.json:3: not JSON"),
        ("[" * 100_000, "p.json: not JSON of ours: nested too deeply"),
        ("[1]", "p.json: must be an object"),
        ('{"model": "a", "model": "b"}', "p.json: key 'model' is there twice in one object"),
        ('{"iteration_s": NaN}', "p.json: NaN is not a number that JSON has"),
        ('{"iteration_s": ' + "9" * 5000 + "}", "p.json: not JSON: "),
        ({key: value for key, value in ONE.items() if key != "schema"}, "p.json: key 'schema' is missing"),
        ({"schema": ONE["schema"], "profiles": [ONE, ONE]}, "p.json: model 'm' is there twice"),
        ({"schema": ONE["schema"], "profiles": [{"modl": 1}]}, "p.json: unknown key 'modl' in profiles[0]; did you"),
        ({"schema": ONE["schema"], "profiles": [{**ONE, "gpu": 3}]}, "p.json: profiles[0].gpu: expected `str`"),
        ({"profiles": [ONE]}, "p.json: top level: object missing required field `schema`"),
    ],
)
def test_a_wrong_file_is_named(value: object, said: str) -> None:
    assert refusal(value).startswith(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table["models"]["m"].update(best_speedup=2), "p.json: models.m: best_speedup is '2.0' where"),
        (lambda table: table["models"]["m"].pop("best_cpus"), "p.json: models.m: best_cpus and best_memory_gb go"),
        (lambda table: table["models"]["m"].update(best_cpus=-1), "p.json: models.m: best_cpus and best_memory_gb"),
        (lambda table: table["models"]["m"].update(tusk=""), "p.json: unknown key 'tusk' in models.m; did you mean"),
        (lambda table: table["models"]["m"].pop("iteration_s"), "p.json: models.m: object missing required field"),
        (lambda table: table.pop("server"), "p.json: top level: object missing required field `server`"),
        (lambda table: table.update(memory_gb_per_gpu=[]), "p.json: model 'm': memory_gb_per_gpu: must not be empty"),
        (lambda table: table.update(models=3), "p.json: models: expected `object`"),
    ],
)
def test_a_wrong_published_table_is_named(change: Callable[[dict[str, Any]], object], said: str) -> None:
    table = json.loads(json.dumps(TABLE))
    change(table)
    assert refusal(table).startswith(said)


grids = st.lists(st.floats(0.25, 512), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    cpus, memory = draw(grids), draw(grids)
    values = st.floats(0.6, 1.4)
    rows = st.lists(st.lists(values, min_size=len(memory), max_size=len(memory)).map(tuple),
                    min_size=len(cpus), max_size=len(cpus)).map(tuple)  # fmt: skip
    reference = Reference(draw(st.integers(1, 16)), draw(st.floats(1, 128)), draw(st.floats(1, 4096)))
    rest = Profile("m", 1.0, tuple(cpus), tuple(memory), ((1.0,) * len(memory),) * len(cpus), reference)
    share = rest.speed(reference.cpus / reference.gpus, reference.memory_gb / reference.gpus)
    low = draw(st.none() | st.floats(0, 8))
    return Profile(
        model=draw(st.text(min_size=1).filter(str.strip)),
        iteration_s=draw(st.floats(1e-4, 1e4)),
        cpus_per_gpu=tuple(cpus),
        memory_gb_per_gpu=tuple(memory),
        throughput=draw(rows) if share == 1.0 else ((1 / share,) * len(memory),) * len(cpus),
        reference=reference,
        gpu=draw(st.text(max_size=4)),
        task=draw(st.text(max_size=4)),
        storage_mb_s=draw(st.just(()) | rows),
        gpu_memory_peak_gb=None if low is None else low + 1,
        gpu_memory_low_gb=low,
        gpu_utilization=draw(st.none() | st.floats(0, 1)),
        declared_best=draw(st.none() | st.builds(Demand, st.floats(0.5, 64), st.floats(1, 512))),
    )


@given(profiles())
def test_what_is_written_is_read_back(profile: Profile) -> None:
    again = read_profiles(write_profiles({profile.model: profile}, source="here"), "w.json")
    assert same(again[profile.model], profile)
