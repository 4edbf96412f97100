"""One device of ours equals the bare PyTorch reference, step by step, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference_gpt
import reference_mlp
import torch
from ranks import run_ranks
from runs import GPT_ARGUMENTS, Case, Outcome, gpt, run_case, token_batch
from tilings import plan_of, tile
from torch import Tensor, nn
from whale_trainer.models.mlp import MLP

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-10
STEPS = (8, 8, 5, 8, 1)


def one_device(model: Any, **options: Any) -> Case:
    plan = plan_of([tile((0, 2 if model is mlp else 6), (0, 8), 0)], micro_batches=1, global_batch=8)
    return Case(plan, model=model, batch_sizes=STEPS, optimizer="AdamW", **options)


def mlp(**arguments: Any) -> nn.Module:
    return MLP(4, 12, 3, depth=2, **arguments)


def regression_batch(size: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2000 + step)
    draw = torch.randn(size, 7, generator=generator, dtype=torch.float64)
    return draw[:, :4], draw[:, 4:]


def assert_equal(found: Outcome, expected: reference_gpt.Training) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert found.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    assert found.weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=TOLERANCE)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=TOLERANCE)
        moved = (weight - found.start[name]).abs().max() > 100 * TOLERANCE
        # one number added to all scores of a query changes nothing, so a key's bias has no gradient
        assert moved or name.endswith(("k_proj.bias", "k_norm.bias")), f"{name} did not move"


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"tied": False, "bias": False, "norm": "rms", "positions": "rotary"}, {"qk_norm": True, "num_kv_heads": 1}],
    ids=["tied with biases", "rms and rotary", "qk-norm and one kv head"],
)
def test_gpt_on_one_device_equals_the_reference(arguments: dict[str, Any], clip: float) -> None:
    (found,) = run_ranks(run_case, 1, one_device(gpt, arguments=arguments, clip=clip))
    all_arguments = {**GPT_ARGUMENTS, **arguments}
    sizes = reference_gpt.Sizes(
        all_arguments["num_heads"],
        all_arguments["num_kv_heads"],
        all_arguments.get("norm", "layer"),
        all_arguments.get("positions") == "rotary",
    )
    batches = [token_batch(size, step) for step, size in enumerate(STEPS)]
    assert_equal(found, reference_gpt.train(found.start, batches, sizes, lr=1e-2, clip=clip))


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_mlp_on_one_device_equals_the_reference(clip: float) -> None:
    (found,) = run_ranks(run_case, 1, one_device(mlp, batch=regression_batch, clip=clip))
    batches = [regression_batch(size, step) for step, size in enumerate(STEPS)]
    assert_equal(found, reference_mlp.train(found.start, batches, lr=1e-2, clip=clip))


@pytest.mark.parametrize("name", ["reference_gpt.py", "reference_mlp.py"])
def test_the_reference_imports_nothing_of_ours(name: str) -> None:
    assert "whale_trainer" not in (Path(__file__).parent / name).read_text()


def test_the_reference_learns(capsys: pytest.CaptureFixture[str]) -> None:
    reference_gpt.main(10)
    before, after = (float(word) for word in capsys.readouterr().out.split() if "." in word)
    assert before == pytest.approx(5.5, abs=0.2)
    assert after < 4.5
