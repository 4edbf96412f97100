"""Profiles: interpolation, merging, refusals with paths, and the way through YAML and back."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from specs import gpt_spec, plain_spec

from whale_trainer.cluster import load_cluster
from whale_trainer.errors import ConfigError
from whale_trainer.planning.simulation.curves import Curve
from whale_trainer.planning.simulation.profile import (
    Profile,
    check_profile,
    equal_layers,
    identity_of,
    load_profile,
    merge_profiles,
    with_measured_memory,
)

SPEC = gpt_spec(num_blocks=2)


def row(samples: int, forward_s: float, part: float = 1.0) -> dict[str, Any]:
    return {"samples": samples, "part": part, "forward_s": forward_s, "backward_s": 2 * forward_s}


def kind(
    *, measured_at: str = "2026-01-31T09:30:00Z", memory_bytes: int | None = 1 << 30, **changes: Any
) -> dict[str, Any]:
    """A block takes 1 ms and 2 ms a sample; half of it 1 ms and 1.1 ms a sample."""
    return {
        "device": "a processor",
        "machine": "desk",
        "torch": "2.13.0",
        "measured_at": measured_at,
        "memory_bytes": memory_bytes,
        "optimizer": {"optimizer": "AdamW", "fixed_s": 1e-5, "element_s": 1e-9},
        "layers": [
            {"layer": "embed", "rows": [row(1, 1e-4), row(2, 2e-4)]},
            {
                "layer": "blocks.0",
                "same": ["blocks.1"],
                "cut_share": 0.9,
                "rows": [row(1, 3e-3), row(2, 5e-3), row(4, 9e-3), row(1, 2.1e-3, 0.5), row(4, 5.4e-3, 0.5)],
            },
            {"layer": "head", "rows": [], "failed": [{"samples": 1, "reason": "out of memory"}]},
        ],
    } | changes


def plain(**kinds: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "model": identity_of(SPEC).model_dump(),
        "precision": "32-true",
        "kinds": kinds or {"CPU": kind()},
    }


PROFILE = load_profile(plain())


def test_measured_points_and_between_them() -> None:
    assert PROFILE.pass_s("CPU", "blocks.0", 2, 1.0) == pytest.approx((5e-3, 1e-2))
    assert PROFILE.pass_s("CPU", "blocks.1", 3, 1.0) == pytest.approx((7e-3, 14e-3))
    assert PROFILE.pass_s("CPU", "blocks.0", 1.5, 1.0) == pytest.approx((4e-3, 8e-3))
    assert PROFILE.pass_s("CPU", "blocks.0", 1, 0.75) == pytest.approx((2.55e-3, 5.1e-3))


def test_beyond_the_measured_points() -> None:
    last_slope, fixed = 2e-3, 1e-3
    assert PROFILE.pass_s("CPU", "blocks.0", 100, 1.0) == pytest.approx((9e-3 + 96 * last_slope, 18e-3 + 192 * 2e-3))
    for samples in (0.5, 0.125, 1e-6):
        forward, _ = PROFILE.pass_s("CPU", "blocks.0", samples, 1.0) or (0, 0)
        assert forward == pytest.approx(fixed + samples * 2e-3)
    at_a_quarter = 2.1e-3 - 0.9e-3 / 2
    assert PROFILE.pass_s("CPU", "blocks.0", 1, 0.25) == pytest.approx((at_a_quarter, 2 * at_a_quarter))


def test_a_layer_measured_uncut_only_keeps_its_uncut_part() -> None:
    data = plain()
    block = data["kinds"]["CPU"]["layers"][1]
    block["rows"] = [r for r in block["rows"] if r["part"] == 1.0]
    forward, _ = load_profile(data).pass_s("CPU", "blocks.0", 1, 0.5) or (0, 0)
    assert forward == pytest.approx(3e-3 * (0.1 + 0.9 * 0.5))


def test_the_uncut_layer_stands_for_itself() -> None:
    """Cut, this layer takes longer than whole: its lookup masks what others hold."""
    data = plain()
    data["kinds"]["CPU"]["layers"][0]["rows"] = [row(1, 1e-4), row(1, 3e-4, 0.75), row(1, 2e-4, 0.5)]
    profile = load_profile(data)
    found = {part: (profile.pass_s("CPU", "embed", 1, part) or (0,))[0] for part in (1.0, 0.9, 0.75, 0.5)}
    assert found == {part: pytest.approx(time) for part, time in zip(found, (1e-4, 3.6e-4, 3e-4, 2e-4), strict=True)}
    data["kinds"]["CPU"]["layers"][0]["rows"].pop()
    single = load_profile(data)
    assert single.pass_s("CPU", "embed", 1, 0.9) == pytest.approx((3e-4, 6e-4))


def test_what_was_not_measured_is_none() -> None:
    assert PROFILE.pass_s("V100-SXM2-32GB", "blocks.0", 1, 1.0) is None
    assert PROFILE.pass_s("CPU", "blocks.2", 1, 1.0) is None
    assert PROFILE.pass_s("CPU", "head", 1, 1.0) is None, "all its trials failed"
    assert PROFILE.optimizer_s("V100-SXM2-32GB", 10) is None
    assert PROFILE.memory_bytes("V100-SXM2-32GB") is None
    assert PROFILE.lacks("CPU", SPEC.layer_names)
    assert not PROFILE.lacks("CPU", ["embed", "blocks.1"])
    assert PROFILE.lacks("T4", ["embed"])
    assert PROFILE.optimizer_s("CPU", 1e6) == pytest.approx(1.01e-3)
    assert PROFILE.memory_bytes("CPU") == 1 << 30


def test_what_is_free_stands_in_the_cluster() -> None:
    cluster = load_cluster({"nodes": [{"name": "here", "devices": {"CPU": 1, "T4": 1}}]})
    cpu, t4 = with_measured_memory(cluster, PROFILE).nodes[0].devices
    assert cpu.free_bytes == 1 << 30
    assert cpu.memory_bytes == cluster.devices[0].kind.memory_bytes
    assert t4 == cluster.devices[1].kind
    assert t4.free_bytes is None
    unknown = load_profile(plain(CPU=kind(memory_bytes=None)))
    assert with_measured_memory(cluster, unknown) == cluster


def test_a_plan_tells_which_kinds_are_estimated() -> None:
    cluster = load_cluster({"nodes": [{"name": "here", "devices": {"CPU": 1, "T4": 2}}]})
    (note,) = PROFILE.notes_for(cluster, SPEC)
    assert note.startswith("CPU, T4: not every layer was measured")
    data = plain() | {"notes": ["Of one kind the newer times hold."]}
    data["kinds"]["CPU"]["layers"][2] = {"layer": "head", "rows": [row(1, 1e-3)]}
    only_cpu = load_cluster({"nodes": [{"name": "here", "devices": {"CPU": 2}}]})
    assert load_profile(data).notes_for(only_cpu, SPEC) == ("Of one kind the newer times hold.",)


def test_noise_gives_no_falling_times() -> None:
    """Four small sizes take the same time but for noise: the curve is flat there, and rises behind."""
    curve = Curve.through([(1, 3.0), (2, 1.0), (4, 2.0), (8, 4.0)])
    assert [curve.at(x) for x in (1, 2, 3, 4, 8, 16)] == [2, 2, 2, 2, 4, 8]
    assert Curve.through([(4, 2.0)]).at(8) == 4


@given(
    times=st.lists(st.floats(1e-6, 10), min_size=1, max_size=7),
    samples=st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=8),
)
def test_curves_are_positive_and_never_fall(times: list[float], samples: list[float]) -> None:
    curve = Curve.through([(2.0**i, time) for i, time in enumerate(times)])
    found = [curve.at(x) for x in sorted(samples)]
    assert all(y > 0 for y in found)
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(found))


def test_round_trip_through_yaml_and_pickle() -> None:
    PROFILE.pass_s("CPU", "blocks.0", 2, 1.0)
    text = yaml.safe_dump(PROFILE.to_dict(), sort_keys=False)
    assert text.startswith("schema_version: 1\n")
    assert load_profile(yaml.safe_load(text)) == PROFILE
    assert pickle.loads(pickle.dumps(PROFILE)) == PROFILE
    merged = merge_profiles([PROFILE])
    assert load_profile(merged.to_dict()) == merged


def test_profiles_of_two_machines_merge() -> None:
    other = load_profile(plain(T4=kind(machine="rack")))
    merged = merge_profiles([PROFILE, other])
    assert list(merged.kinds) == ["CPU", "T4"]
    assert merged.pass_s("T4", "blocks.1", 2, 1.0) == PROFILE.pass_s("CPU", "blocks.0", 2, 1.0)
    assert merged.notes == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_one_kind_the_newer_times_and_the_smaller_memory_hold(order: tuple[int, int]) -> None:
    newer = kind(measured_at="2026-02-01T00:00:00Z", machine="rack", memory_bytes=2 << 30)
    newer["layers"][1]["rows"] = [row(1, 7e-3)]
    profiles = [PROFILE, load_profile(plain(CPU=newer))]
    merged = merge_profiles([profiles[i] for i in order])
    assert merged.pass_s("CPU", "blocks.0", 1, 1.0) == pytest.approx((7e-3, 14e-3))
    assert merged.memory_bytes("CPU") == 1 << 30
    (note,) = merged.notes
    for word in ("CPU", "desk", "rack", "2026-02-01T00:00:00Z", "newer", "smaller free memory"):
        assert word in note
    assert merge_profiles([merged, merged]) == merged


def test_links_of_one_machine_are_kept_once() -> None:
    link = {
        "what": "point_to_point",
        "kinds": ["CPU", "CPU"],
        "machine": "desk",
        "measured_at": "2026-01-31T09:30:00Z",
        "latency_s": 1e-5,
        "bandwidth_bytes_per_s": 1e9,
        "rows": [{"num_bytes": 1024, "seconds": 1.1e-5}],
    }
    newer = link | {"latency_s": 2e-5, "measured_at": "2026-02-01T00:00:00Z"}
    other = link | {"what": "all_reduce"}
    merged = merge_profiles(
        [load_profile(plain() | {"links": [newer, other]}), load_profile(plain() | {"links": [link]})]
    )
    assert sorted((x.what, x.latency_s) for x in merged.links) == [("all_reduce", 1e-5), ("point_to_point", 2e-5)]


def test_profiles_of_different_models_or_precisions_do_not_merge() -> None:
    other = plain() | {"precision": "64-true", "model": identity_of(gpt_spec(width=192)).model_dump()}
    with pytest.raises(ConfigError) as refusal:
        merge_profiles([PROFILE, load_profile(other)])
    for word in ("cluster.profile[1]", "2 problems", "one model for all", "64-true", "32-true", "mode=calibrate"):
        assert word in str(refusal.value)
    with pytest.raises(ConfigError, match="empty list"):
        merge_profiles([])


def test_a_profile_of_another_model_is_refused() -> None:
    check_profile(PROFILE, SPEC, "32-true")
    other = plain_spec([1.0, 2.0])
    with pytest.raises(ConfigError) as refusal:
        check_profile(PROFILE, other, "bf16-mixed")
    text = str(refusal.value)
    for word in ("cluster.profile", "GPT", "Plain", "another model", "mode=calibrate", "trainer.precision=bf16-mixed"):
        assert word in text


@pytest.mark.parametrize(
    "other",
    [
        gpt_spec(num_blocks=3),
        gpt_spec(num_blocks=2, width=192),
        gpt_spec(num_blocks=2, context=32),
        gpt_spec(num_blocks=2, tied=False),
    ],
    ids=["layers", "width", "context", "tied"],
)
def test_identity_tells_sizes_apart(other: Any) -> None:
    assert identity_of(gpt_spec(num_blocks=2)) == identity_of(SPEC)
    assert identity_of(other).digest != identity_of(SPEC).digest


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, ["cluster.profile", "empty file", "mode=calibrate"]),
        ("16 GB/s", ["cluster.profile", "'16 GB/s'"]),
        ({"nodes": []}, ["no schema_version", "known is 1"]),
        (plain() | {"schema_version": 7}, ["schema_version is 7", "known is 1"]),
    ],
)
def test_what_is_no_profile_is_refused(data: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_profile(data)
    for word in words:
        assert word in str(refusal.value)


def test_all_problems_at_once_with_their_paths() -> None:
    data = copy.deepcopy(plain())
    cpu = data["kinds"]["CPU"]
    cpu["layers"][1]["rows"][0]["forward_s"] = "3 ms"
    cpu["layers"][1]["rows"][1]["samples"] = 0
    cpu["layers"][0]["rows"][0]["backward_s"] = -1.0
    cpu["measured_at"] = "yesterday"
    cpu["memory"] = 1
    data["precision"] = "fp7"
    with pytest.raises(ConfigError) as refusal:
        load_profile(data)
    found = {p.path: p.message for p in refusal.value.problems}
    assert found.keys() == {
        "cluster.profile.precision",
        "cluster.profile.kinds.CPU.measured_at",
        "cluster.profile.kinds.CPU.memory",
        "cluster.profile.kinds.CPU.layers[0].rows[0].backward_s",
        "cluster.profile.kinds.CPU.layers[1].rows[0].forward_s",
        "cluster.profile.kinds.CPU.layers[1].rows[1].samples",
    }
    assert "did you mean memory_bytes?" in found["cluster.profile.kinds.CPU.memory"]
    assert "'3 ms' is not a number" in found["cluster.profile.kinds.CPU.layers[1].rows[0].forward_s"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda layers: layers[1]["rows"].append(row(1, 1.0)), "two rows for 1 sample and part 1"),
        (lambda layers: layers[1]["same"].append("head"), "the layer head is there twice"),
    ],
)
def test_figures_that_stand_twice_are_refused(edit: Any, words: str) -> None:
    data = copy.deepcopy(plain())
    edit(data["kinds"]["CPU"]["layers"])
    with pytest.raises(ConfigError, match=words):
        load_profile(data)


def test_equal_layers_are_one_group() -> None:
    assert equal_layers(gpt_spec(num_blocks=4)) == ((0,), (1, 2, 3, 4), (5,))
    assert equal_layers(plain_spec([1.0, 2.0, 1.0, 1.0])) == ((0,), (1,), (2,), (3,))


def test_a_question_is_answered_once() -> None:
    profile = Profile.model_validate(PROFILE.model_dump())
    first = profile.pass_s("CPU", "blocks.0", 3, 0.5)
    assert profile.pass_s("CPU", "blocks.1", 3, 0.5) is first
