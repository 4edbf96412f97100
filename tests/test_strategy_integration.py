"""`WhaleStrategy` in a Lightning Trainer: fit, validate, test, predict, callbacks, checkpoints, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_runs import Fit, Left, Tokens, fit_rank, loader, make_module, quiet_trainer
from ranks import run_ranks
from runs import gpt, single
from tilings import plan_of, tile
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from whale_trainer.checkpoint import load_full
from whale_trainer.errors import ConfigError
from whale_trainer.planning.plan import Plan

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
]

DATA_3_1 = plan_of([tile((0, 6), (0, 3), 0), tile((0, 6), (3, 4), 1)], micro_batches=3, global_batch=12)
PIPELINE = plan_of([tile((0, 4), (0, 4), 0), tile((4, 6), (0, 4), 1)], micro_batches=3, global_batch=12)
MIXED = plan_of(
    [tile((0, 4), (0, 3), (0, 2), (1, 1)), tile((4, 6), (0, 3), 2), tile((0, 6), (3, 4), 3)],
    micro_batches=3,
    global_batch=12,
)


def assert_same(found: Left, expected: Left, tolerance: float = 1e-10) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=tolerance), name
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.rates == expected.rates
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=tolerance)


@pytest.mark.parametrize("plan", [DATA_3_1, PIPELINE, MIXED], ids=["data 3:1", "pipeline", "mixed"])
def test_fit_equals_one_process(plan: Plan) -> None:
    options = {"gradient_clip_val": 0.5, "num_sanity_val_steps": 2, "val_check_interval": 1}
    fit = Fit(plan, model={"dropout": 0.1}, trainer=options)
    expected = run_ranks(fit_rank, 1, Fit(**{**vars(fit), "plan": single(plan)}))[0]
    assert expected.steps == 4
    for left in run_ranks(fit_rank, plan.num_ranks, fit):
        assert_same(left, expected)


@pytest.mark.parametrize("size", [1, 5, 6, 7, 19, 20])
def test_u02_every_sample_is_read_once_an_epoch(size: int) -> None:
    plan = plan_of([tile((0, 6), (0, 4), 0), tile((0, 6), (4, 6), 1)], micro_batches=1, global_batch=6)
    left = run_ranks(fit_rank, 2, Fit(plan, train_size=size, validation_size=5))
    steps = -(-size // 6)
    assert {one.steps for one in left} == {2 * steps}
    epochs = [[i for one in left for step in one.ids[e * steps : (e + 1) * steps] for i in step] for e in (0, 1)]
    assert all(sorted(ids) == list(range(size)) for ids in epochs)
    if size > 7:
        assert epochs[0] != epochs[1]
        assert [len(ids) for ids in left[0].ids[:3]] == [4, 4, 4]


def test_m02_the_planned_rates_are_the_ones_taken() -> None:
    plans = [DATA_3_1, PIPELINE, single(DATA_3_1)]
    rates = [run_ranks(fit_rank, p.num_ranks, Fit(p, max_epochs=3))[0].rates for p in plans]
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    planned = []
    for _ in range(6):
        planned.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == rates[1] == rates[2] == planned


def test_resume_continues_exactly(tmp_path: Path) -> None:
    fit = Fit(MIXED, model={"dropout": 0.1}, max_epochs=3)
    whole = run_ranks(fit_rank, 4, fit, str(tmp_path / "a"))[0]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [f"step-{s:06d}" for s in range(1, 7)]
    for step in (2, 3):  # at the end of an epoch, and in the middle of one
        left = run_ranks(fit_rank, 4, fit, str(tmp_path / "a"), str(tmp_path / "a" / f"step-{step:06d}"))[0]
        assert left.losses == whole.losses[step:]
        assert left.rates == whole.rates[step:]
        assert left.ids == whole.ids[step:]
        for name, weight in whole.weights.items():
            assert torch.equal(left.weights[name], weight), name


def evaluate_rank(rank: int, _world_size: int, plan: Plan) -> tuple[Any, ...]:
    """Fit, then validate, test and predict, each with its own batch size."""
    plan, module = make_module(Fit(plan))
    trainer = quiet_trainer(plan, max_epochs=1, num_sanity_val_steps=1, val_check_interval=1)
    trainer.fit(module, loader(24, 12), loader(7, 3, seed=4))
    validated = trainer.validate(module, loader(7, 3, seed=4), verbose=False)[0]
    tested = trainer.test(module, loader(11, 5, seed=5), verbose=False)[0]
    predicted = trainer.predict(module, loader(5, 4, seed=6))
    assert plan.model is not None
    weights = {p.name: trainer.strategy.runner.full_parameter(p.name) for p in plan.model.parameters}
    return validated["val/loss"], tested["test/loss"], torch.cat(predicted), weights


@pytest.mark.parametrize("plan", [PIPELINE, MIXED], ids=["pipeline", "mixed"])
def test_p05_every_mode_with_its_own_batch_size(plan: Plan) -> None:
    expected = run_ranks(evaluate_rank, 1, single(plan))[0]
    for found in run_ranks(evaluate_rank, plan.num_ranks, plan):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-10)
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-10)
        for name, weight in expected[3].items():
            torch.testing.assert_close(found[3][name], weight, rtol=0, atol=1e-10)


def monitored_rank(rank: int, _world_size: int, plan: Plan, folder: str) -> tuple[int, str, float]:
    """Train with a rate that makes things worse; the best checkpoint and the early stop go by validation loss."""
    plan, module = make_module(Fit(plan, lr=1.0))
    best = pl.callbacks.ModelCheckpoint(
        dirpath=folder, monitor="val/loss", filename="best-{step}", auto_insert_metric_name=False
    )
    stop = pl.callbacks.EarlyStopping("val/loss", patience=1)
    trainer = quiet_trainer(plan, max_epochs=8, enable_checkpointing=True, callbacks=[best, stop])
    trainer.fit(module, loader(24, 12, shuffle=True), loader(7, 3, seed=4))
    return trainer.current_epoch, best.best_model_path, float(best.best_model_score)


@pytest.mark.parametrize("plan", [PIPELINE, DATA_3_1], ids=["pipeline", "data 3:1"])
def test_p06_all_ranks_take_the_same_decisions(plan: Plan, tmp_path: Path) -> None:
    expected = run_ranks(monitored_rank, 1, single(plan), str(tmp_path / "one"))[0]
    assert expected[0] < 8, "the run was to be stopped early"
    found = run_ranks(monitored_rank, plan.num_ranks, plan, str(tmp_path / "many"))
    assert len({f[1] for f in found}) == 1
    assert [p.name for p in (tmp_path / "many").iterdir()] == [Path(found[0][1]).name]
    for epoch, path, score in found:
        assert epoch == expected[0]
        assert Path(path).name == Path(expected[1]).name
        assert score == pytest.approx(expected[2], rel=1e-8)


class Usual(pl.LightningModule):
    """A module as one writes it for one device; knows nothing of plans."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        if kind == "dropout":
            self.net.insert(2, nn.Dropout(0.4))
        if kind == "batchnorm":
            self.norm = nn.BatchNorm1d(5)

    def loss_of(self, batch: Any) -> Tensor:
        x = batch["tokens"].to(self.net[0].weight.dtype)
        return (self.net(x).squeeze(-1) - x.sum(-1)).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.loss_of(batch)
        self.log("a", losses.mean().detach(), on_step=True, on_epoch=True, prog_bar=True)
        if self.kind == "tokens":
            mask = (batch["tokens"] > 4).double().sum(-1)
            return {"loss_sum": (losses * mask).sum(), "count": mask.sum()}
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"v": self.loss_of(batch).mean(), "size": float(len(batch["tokens"]))})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def usual_rank(rank: int, _world_size: int, plan: Plan, kind: str, options: dict[str, Any]) -> Any:
    module = Usual(kind)
    trainer = quiet_trainer(plan, max_epochs=2, **{"gradient_clip_val": 1.0, **options})
    trainer.fit(module, loader(20, 12, shuffle=True), loader(7, 3, seed=4))
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, [p.detach() for p in module.parameters()]


WHOLE_3_1 = plan_of([tile((0, 1), (0, 3), 0), tile((0, 1), (3, 4), 1)], micro_batches=3, global_batch=12)


@pytest.mark.parametrize("kind", ["mean", "tokens", "dropout"])
def test_an_unmodified_module_under_a_plan_that_replicates(kind: str) -> None:
    expected = run_ranks(usual_rank, 1, single(WHOLE_3_1), kind, {})[0]
    for metrics, weights in run_ranks(usual_rank, 2, WHOLE_3_1, kind, {}):
        assert metrics.pop("size") > 0  # a mean over micro-batches, which differ in size by plan
        assert metrics == pytest.approx({k: v for k, v in expected[0].items() if k != "size"}, rel=1e-6)
        for found, weight in zip(weights, expected[1], strict=True):
            torch.testing.assert_close(found, weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("manual", {"gradient_clip_val": None}, ["automatic_optimization", "False", "use automatic optimization"]),
        ("batchnorm", {}, ["model.norm", "BatchNorm", "GroupNorm or LayerNorm"]),
        ("mean", {"accumulate_grad_batches": 2}, ["trainer.accumulate_grad_batches", "2", "strategy.micro_batches"]),
    ],
    ids=["manual optimization", "batchnorm", "accumulation"],
)
def test_what_cannot_be_right_is_refused(kind: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        run_ranks(usual_rank, 2, WHOLE_3_1, kind, options)
    for word in words:
        assert word in str(refusal.value)


def test_c08_averaged_weights_are_refused() -> None:
    trainer = quiet_trainer(single(WHOLE_3_1), max_epochs=1, callbacks=[pl.callbacks.EMAWeightAveraging()])
    with pytest.raises(ConfigError, match="EMAWeightAveraging keeps a second copy of the model"):
        trainer.fit(Usual(), loader(20, 12))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Tokens(20))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataLoader(Endless(), batch_size=12), ["Endless", "IterableDataset", "__getitem__"]),
        (loader(20, 8), ["8", "12", "global"]),
    ],
    ids=["iterable", "batch size"],
)
def test_loaders_that_cannot_be_sliced_are_refused(data: Any, words: list[str]) -> None:
    trainer = quiet_trainer(single(WHOLE_3_1), max_epochs=1)
    with pytest.raises(ConfigError) as refusal:
        trainer.fit(Usual(), data)
    for word in words:
        assert word in str(refusal.value)


def optimizer_rank(rank: int, _world_size: int, plan: Plan, name: str) -> None:
    plan, module = make_module(Fit(plan))
    module._make_scheduler = None
    module._make_optimizer = lambda named: getattr(torch.optim, name)([p for _, p in named], lr=1e-3)
    quiet_trainer(plan, max_epochs=1).fit(module, loader(12, 12))


def test_optimizers_that_mix_elements_are_refused_where_tensors_are_cut() -> None:
    with pytest.raises(ConfigError, match="Adafactor mixes the elements of a tensor"):
        run_ranks(optimizer_rank, 4, MIXED, "Adafactor")
    run_ranks(optimizer_rank, 2, PIPELINE, "Adafactor")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_stays_close_to_one_process(precision: str) -> None:
    fit = Fit(MIXED, precision=precision, model={"bias": False}, trainer={"gradient_clip_val": 1.0})
    expected = run_ranks(fit_rank, 1, Fit(**{**vars(fit), "plan": single(MIXED)}))[0]
    for left in run_ranks(fit_rank, 4, fit):
        assert left.losses == pytest.approx(expected.losses, rel=2e-2)
        assert left.steps == expected.steps


def overflow_rank(rank: int, _world_size: int, plan: Plan) -> tuple[float, bool]:
    """One step whose scaled loss overflows: the scale is halved and no weight moves, on all ranks."""
    plan, module = make_module(Fit(plan))
    trainer = quiet_trainer(plan, "16-mixed", max_epochs=1)

    class Overflow(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            trainer.strategy.runner.precision.loss_scale = 2.0**60
            self.before = [p.detach().clone() for p in module.parameters()]

    callback = Overflow()
    trainer.callbacks.append(callback)
    trainer.fit(module, loader(12, 12))
    moved = any(not torch.equal(a, b) for a, b in zip(callback.before, module.parameters(), strict=True))
    return trainer.strategy.runner.precision.loss_scale, moved


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_an_overflow_is_one_verdict_for_all_ranks() -> None:
    assert run_ranks(overflow_rank, 4, MIXED) == [(2.0**59, False)] * 4


def test_t05_clipping_by_value_is_that_of_one_process() -> None:
    fit = Fit(MIXED, trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"})
    expected = run_ranks(fit_rank, 1, Fit(**{**vars(fit), "plan": single(MIXED)}))[0]
    unclipped = run_ranks(fit_rank, 1, Fit(single(MIXED)))[0]
    assert any(not torch.equal(expected.weights[n], w) for n, w in unclipped.weights.items())
    for left in run_ranks(fit_rank, 4, fit):
        assert_same(left, expected)


def test_t08_a_vocabulary_that_does_not_divide_is_saved_whole(tmp_path: Path) -> None:
    plan = plan_of([tile((0, 6), (0, 4), (0, 10), (1, 1))], micro_batches=3, global_batch=12)
    left = run_ranks(fit_rank, 2, Fit(plan, model={"tied": False}, max_epochs=1), str(tmp_path / "kept"))[0]
    saved = load_full(tmp_path / "kept" / "step-000002")
    assert len(saved["embed.tokens.weight"]) == len(saved["head.projection.weight"]) == 11
    gpt(tied=False).double().load_state_dict(saved, strict=True)
    assert all(torch.equal(saved[name], weight) for name, weight in left.weights.items())


def lambda_rank(rank: int, _world_size: int, plan: Plan) -> float:
    plan, module = make_module(Fit(plan))
    next(iter(module.model.layers()))[1].scale = lambda x: 2 * x
    trainer = quiet_trainer(plan, max_epochs=1)
    trainer.fit(module, loader(12, 12))
    return float(trainer.strategy.last_step.loss)


@pytest.mark.parametrize("plan", [DATA_3_1, PIPELINE], ids=["data 3:1", "pipeline"])
def test_l07_modules_may_hold_what_cannot_be_pickled(plan: Plan) -> None:
    assert len(set(run_ranks(lambda_rank, 2, plan))) == 1
