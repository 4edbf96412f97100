"""The paper's test beds: the figures that they state, the plans, and the line that compares both."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from configs import composed

from whale_trainer.cli import Planned, make_plan_of
from whale_trainer.config import load_config
from whale_trainer.config.sections import PaperConfig
from whale_trainer.errors import ConfigError
from whale_trainer.planning.plan import Prediction
from whale_trainer.planning.shares import Interval
from whale_trainer.report.paper import paper_line

MEASURED = {
    "whale_fig17_resnet50": 1.30,
    "whale_fig17_gnmt": 1.27,
    "whale_fig17_bert_large": 1.45,
    "whale_fig18_bert_large": 1.23,
    "whale_fig18_t5_large": 1.23,
}


@cache
def planned(name: str, *overrides: str) -> Planned:
    return make_plan_of(load_config(composed(f"experiment={name}", *overrides)))


@pytest.mark.parametrize("name", MEASURED)
def test_the_paper_is_quoted_and_near(name: str) -> None:
    found = planned(name)
    paper, predicted = found.config.paper, found.plan.predicted
    assert paper is not None
    assert f"whale_fig{paper.figure}_" in name
    assert paper.gain_over_even == MEASURED[name]
    assert predicted.even_step_s is not None
    assert predicted.step_s is not None
    ratio = predicted.even_step_s / predicted.step_s / paper.gain_over_even
    assert 0.85 < ratio < 1.15


@pytest.mark.parametrize("name", MEASURED)
def test_the_plan_is_on_the_papers_devices(name: str) -> None:
    plan = planned(name).plan
    each = 8 if "fig17" in name else 4
    kinds = [device.kind for device in plan.devices]
    assert (kinds.count("V100-SXM2-32GB"), kinds.count("P100-PCIE-16GB")) == (each, each)
    assert not plan.left_out
    if "fig17" in name:
        assert all(len(tile.layers) == plan.num_layers for tile in plan.tiles)
    else:
        assert plan.micro_batches == 8
        assert len(plan.tiles) == 8


@pytest.mark.parametrize("name", MEASURED)
def test_even_shares_fit_the_smaller_devices(name: str) -> None:
    plan = planned(name, "++strategy.balance=even").plan
    assert len({len(tile.samples) for tile in plan.tiles}) == 1
    assert all(d.planned_memory_bytes and d.planned_memory_bytes < d.memory_bytes for d in plan.devices)
    # as the paper's default has it, a whole copy of the model lies on one kind
    kind_of = {d.rank: d.kind for d in plan.devices}
    copies: dict[Interval, set[str]] = {}
    for tile in plan.tiles:
        copies.setdefault(tile.samples, set()).update(kind_of[rank] for rank in tile.ranks)
    assert all(len(kinds) == 1 for kinds in copies.values())


def test_the_line() -> None:
    paper = PaperConfig(figure=17, gain_over_even=1.3)
    found = paper_line(Prediction(step_s=2.0, even_step_s=2.84), paper)
    assert found == "gain over even 1.42, the paper measured 1.30 (figure 17)"
    assert paper_line(Prediction(), paper) == "gain over even not predicted, the paper measured 1.30 (figure 17)"


@pytest.mark.parametrize(
    ("paper", "messages"),
    [
        (3, ["paper  3 is not a mapping; allowed: {figure, gain_over_even}"]),
        ({"figure": 17}, ["paper.gain_over_even  is missing; allowed: the speed-up over equal shares in that figure"]),
        ({"figure": 0, "gain_over_even": 1.3}, ["paper.figure  0 is below 1; allowed: the number of the paper's"]),
        ({"figure": 1.5, "gain_over_even": 0}, ["paper.figure", "1.5 is not an integer", "0 is not above 0"]),
        ({"figure": 17, "gain_over_even": 1.3, "gian": 1}, ["paper.gian  unknown key; allowed: figure, gain_over"]),
    ],
)
def test_a_wrong_quotation_is_refused(paper: Any, messages: list[str]) -> None:
    plain = composed("experiment=whale_fig17_gnmt")
    with pytest.raises(ConfigError) as error:
        load_config({**plain, "paper": paper})
    for message in messages:
        assert message in str(error.value)


def test_no_quotation_is_needed() -> None:
    assert load_config(composed()).paper is None
