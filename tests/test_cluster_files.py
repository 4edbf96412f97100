"""`cluster.profile` and `cluster=PATH.yaml`: read, merged, refused in words, wherever the command was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import edited, small_config
from specs import gpt_spec

from whale_trainer.cli import compose_config, config_groups, plain_of
from whale_trainer.config import Config, load_config
from whale_trainer.errors import ConfigError
from whale_trainer.overrides import prepare
from whale_trainer.planning.simulation.profile import identity_of

CLUSTER = {
    "nodes": [{"name": "desk", "devices": {"own": 2}, "link": {"bandwidth_gbit_per_s": 8}}],
    "kinds": {"own": {"peak_tflops": {"fp32": 1.0}, "memory_gib": 2, "memory_bandwidth_gb_per_s": 20}},
}


def profile(kind: str, *, width: int = 96) -> dict[str, Any]:
    times = {"samples": 1, "forward_s": 1e-3, "backward_s": 2e-3}
    return {
        "schema_version": 1,
        "model": identity_of(gpt_spec(width=width)).model_dump(),
        "precision": "32-true",
        "kinds": {
            kind: {
                "device": "a device",
                "machine": "desk",
                "torch": "2.13.0",
                "measured_at": "2026-01-31T09:30:00Z",
                "layers": [{"layer": "embed", "rows": [times]}],
            }
        },
    }


def write(path: Path, data: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return str(path)


def loaded(**cluster: Any) -> Config:
    edits = {f"cluster.{key}": value for key, value in cluster.items()}
    return load_config(edited(small_config(), edits))


def refused(**cluster: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as refusal:
        loaded(**cluster)
    return {p.path: p.message for p in refusal.value.problems}


def composed(start: Path, *arguments: str) -> Config:
    return load_config(plain_of(compose_config(prepare(arguments, config_groups())), str(start)))


def test_without_a_profile_there_is_none() -> None:
    assert loaded().profile is None
    assert loaded(profile=None).profile is None


def test_one_profile_or_several(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "profile.yaml", profile("CPU"))
    second = write(tmp_path / "b.yaml", profile("T4"))
    found = loaded(profile=first).profile
    assert found is not None
    assert found.pass_s("CPU", "embed", 1, 1.0) == (1e-3, 2e-3)
    both = loaded(profile=[str(tmp_path / "a"), second])
    assert both.profile is not None
    assert list(both.profile.kinds) == ["CPU", "T4"]
    assert both.resolved["cluster"]["profile"] == [str(tmp_path / "a"), second]


def test_paths_are_those_of_the_place_where_the_command_was_given(tmp_path: Path) -> None:
    write(tmp_path / "my runs" / "profile.yaml", profile("CPU"))
    write(tmp_path / "b.yaml", profile("T4"))
    one = composed(tmp_path, "cluster.profile=my runs/profile.yaml")
    assert one.profile is not None
    assert one.resolved["cluster"]["profile"] == f"{tmp_path}/my runs/profile.yaml"
    two = composed(tmp_path, "cluster.profile=['my runs',b.yaml]")
    assert two.profile is not None
    assert list(two.profile.kinds) == ["CPU", "T4"]


def test_a_cluster_file_stands_where_a_shipped_name_does(tmp_path: Path) -> None:
    write(tmp_path / "a b" / "mine.yaml", CLUSTER)
    config = composed(tmp_path, "cluster=a b/mine.yaml", "cluster.network=pcie3")
    assert str(config.cluster) == "desk: 2 x own"
    assert config.cluster.network.name == "pcie3"
    assert config.resolved["cluster"]["nodes"] == CLUSTER["nodes"], "the run folder's config needs no other file"
    assert "file" not in config.resolved["cluster"]


def test_a_cluster_file_may_name_the_profile_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "run" / "profile.yaml", profile("own"))
    write(tmp_path / "run" / "cluster.yaml", {**CLUSTER, "profile": "profile.yaml"})
    config = composed(tmp_path, "cluster=run/cluster.yaml")
    assert config.profile is not None
    assert composed(tmp_path, "cluster=run/cluster.yaml", "cluster.profile=null").profile is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert "none.yaml cannot be read: No such file" in refused(profile=missing)["cluster.profile"]
    assert "No such file" in refused(nodes="auto", file=missing)["cluster.file"]
    garbage = write(tmp_path / "garbage.yaml", "a: [1")
    assert "garbage.yaml is no YAML" in refused(profile=garbage)["cluster.profile"]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "is no YAML" in refused(profile=str(tmp_path / "binary.yaml"))["cluster.profile"]
    assert "3 is not text" in refused(profile=3)["cluster.profile"]
    assert "is not text" in refused(nodes="auto", file=["a"])["cluster.file"]
    assert "empty list" in refused(profile=[])["cluster.profile"]


def test_files_of_another_kind(tmp_path: Path) -> None:
    cluster = write(tmp_path / "cluster.yaml", CLUSTER)
    measured = write(tmp_path / "profile.yaml", profile("CPU"))
    assert "no schema_version" in refused(profile=cluster)["cluster.profile"]
    found = refused(nodes="auto", file=measured)
    assert "unknown key" in found["cluster.schema_version"]
    text = write(tmp_path / "text.yaml", "words")
    assert "is no cluster file" in refused(nodes="auto", file=text)["cluster.file"]


def test_all_problems_of_all_files_with_their_names(tmp_path: Path) -> None:
    wrong = profile("CPU")
    wrong["kinds"]["CPU"]["layers"][0]["rows"][0]["forward_s"] = 0
    wrong["precision"] = "half"
    first = write(tmp_path / "wrong.yaml", wrong)
    found = refused(profile=[first, str(tmp_path / "none.yaml"), 7])
    assert found.keys() == {
        "cluster.profile[0].precision",
        "cluster.profile[0].kinds.CPU.layers[0].rows[0].forward_s",
        "cluster.profile[1]",
        "cluster.profile[2]",
    }
    assert f"({first})" in found["cluster.profile[0].precision"]


def test_profiles_of_two_models_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", profile("CPU"))
    second = write(tmp_path / "b.yaml", profile("T4", width=192))
    assert "one model for all" in refused(profile=[first, second])["cluster.profile[1]"]


def test_nodes_that_are_declared_twice(tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.yaml", CLUSTER)
    assert "cluster=PATH" in refused(file=file)["cluster.file"]


def test_a_wrong_key_beside_the_files() -> None:
    assert "did you mean profile?" in refused(profil="x")["cluster.profil"]
    assert "did you mean network?" in refused(netwrk="pcie3")["cluster.netwrk"]
