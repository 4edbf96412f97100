"""Plans as text: a golden file for each cluster of conf/, with every strategy on it; UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from specs import cpu_cluster, gpt_spec, preset, scopes

from whale_trainer.cluster import load_cluster
from whale_trainer.errors import ConfigError
from whale_trainer.planning.picture import drawing
from whale_trainer.planning.planner import build_plan
from whale_trainer.planning.show import plan_text
from whale_trainer.planning.strategy import load_strategy
from whale_trainer.report.table import kind_styles, plan_table

CONF = Path(__file__).parents[2] / "conf"
GOLDEN = Path(__file__).parent / "golden"
CLUSTERS = sorted(p.stem for p in (CONF / "cluster").glob("*.yaml") if p.stem != "auto")
STRATEGIES = ("single", "replicate", "split", "pipeline", "hybrid", "auto")


def page(cluster_name: str) -> str:
    """What every shipped strategy makes of the cluster, or why it refuses."""
    cluster = load_cluster(yaml.safe_load((CONF / "cluster" / f"{cluster_name}.yaml").read_text()))
    is_large = len(cluster.devices) > 32
    global_batch = 1024 if is_large else 32
    parts = []
    for name in ("replicate", "hybrid") if is_large else STRATEGIES:
        strategy = load_strategy(yaml.safe_load((CONF / "strategy" / f"{name}.yaml").read_text()))
        try:
            text = plan_text(build_plan(gpt_spec(), cluster, strategy, global_batch=global_batch), gpt_spec())
        except ConfigError as error:
            text = f"{error}\n"
        parts.append(f"=== strategy={name} cluster={cluster_name} ===\n\n{text}")
    return "\n".join(parts)


@pytest.mark.parametrize("name", CLUSTERS)
def test_golden(name: str) -> None:
    path, text = GOLDEN / f"{name}.txt", page(name)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_one_golden_file_for_each_cluster() -> None:
    assert sorted(p.stem for p in GOLDEN.glob("*.txt")) == CLUSTERS
    assert len(CLUSTERS) == 7


def test_the_picture_of_an_irregular_tiling() -> None:
    strategy = scopes(
        {"layers": ["embed", "blocks.[01]"], "replicate": 2, "devices": "node0"},
        {"layers": ["blocks.[23]", "head"], "split": 2, "devices": "node1"},
    )
    plan = build_plan(gpt_spec(num_blocks=4), cpu_cluster([3, 1], [5, 3]), strategy, global_batch=8)
    lines = drawing(plan).splitlines()
    assert [line.strip() for line in lines[2:4]] == [
        "0 ┌────────────────────────────────┬────────────────────────────────┐",
        "│0: rank 0                       │2: ranks 2,3 5:3                │",
    ]
    assert "6 ├────────────────────────────────┤                                │" in drawing(plan)


def test_labels_have_room_in_narrow_tiles() -> None:
    strategy = preset("pipeline", scopes=[{"layers": "*", "stages": 12, "split": 2}])
    plan = build_plan(gpt_spec(num_blocks=10), cpu_cluster(*[[1, 1]] * 12), strategy, global_batch=8)
    assert "11: ranks 22,23" in drawing(plan)


def test_the_rich_table_fits_80_characters_and_colours_by_kind() -> None:
    cluster = load_cluster(yaml.safe_load((CONF / "cluster" / "v100_p100.yaml").read_text()))
    plan = build_plan(gpt_spec(), cluster, preset("hybrid"), global_batch=32)
    output = StringIO()
    Console(file=output, width=80, force_terminal=True, color_system="standard").print(plan_table(plan, gpt_spec()))
    text = output.getvalue()
    assert "\x1b[36m" in text
    assert "\x1b[33m" in text
    plain = StringIO()
    Console(file=plain, width=80).print(plan_table(plan, gpt_spec()))
    rows = [line for line in plain.getvalue().splitlines() if "P100-PCIE-16GB" in line]
    assert len(rows) == 4
    assert all("/16 GiB" in row and "…" not in row for row in rows)
    single = build_plan(gpt_spec(), cluster, preset("single"), global_batch=32)
    Console(file=plain, width=80).print(plan_table(single, gpt_spec()))
    assert "left out: 3 x V100-SXM2-32GB on volta, 4 x P100-PCIE-16GB on pascal" in plain.getvalue()
    assert list(kind_styles(plan)) == ["V100-SXM2-32GB", "P100-PCIE-16GB"]


def test_large_plans_are_shortened() -> None:
    plan = build_plan(gpt_spec(), cpu_cluster([1] * 70), preset("replicate"), global_batch=70)
    text = plan_text(plan, gpt_spec())
    assert "… and 6 more ranks" in text
    assert "… and 58 more rows of tiles, down to sample 70" in text
    output = StringIO()
    Console(file=output, width=80).print(plan_table(plan, gpt_spec()))
    assert "… and 6 more ranks" in output.getvalue()
