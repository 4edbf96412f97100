"""`WhaleStrategy`: Lightning's hooks around a plan. It decides nothing; the plan does.

Lightning's closure runs training_step, then zero_grad, then backward. A plan interleaves forward and backward
actions, so the whole schedule runs inside `training_step`; the gradients it leaves are kept by the runner while
zero_grad clears the parameters' references, and `backward` hands them back. They are then already those of the global
mean loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins import ClusterEnvironment
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.strategies.parallel import ParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from whale_trainer.checkpoint import CheckpointReader, Exchange, alone, read_checkpoint, remove_checkpoint
from whale_trainer.checkpoint.background import BackgroundWriter
from whale_trainer.checkpoint.snapshot import load_optimizers, load_weights, take_snapshot
from whale_trainer.data import RankBatch, slice_loader
from whale_trainer.errors import CheckpointError, RankError
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.timeline import Timeline
from whale_trainer.report.summary import Emulation
from whale_trainer.runtime.emulated import EmulatedPace
from whale_trainer.runtime.engine import Engine, StepResult
from whale_trainer.runtime.measured import gather_steps
from whale_trainer.runtime.pace import OwnPace, Pace
from whale_trainer.runtime.replica import ReplicaRunner
from whale_trainer.strategy.checks import check_module, check_optimizers, check_trainer
from whale_trainer.strategy.plugins import PlanEnvironment, PlanPrecision


class WhaleStrategy(ParallelStrategy):
    """Trains under `plan`. A plan from `make_plan` knows its model; one from JSON must only replicate.

    `precision` is one of 32-true, 64-true, bf16-mixed, 16-mixed (None: what the Trainer says). With
    `asynchronous_checkpoints` training goes on while a checkpoint is written.
    """

    strategy_name = "whale"

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        precision: str | None = None,
        timeout_s: float = 300.0,
        device: torch.device | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        pace: Pace | None = None,
        asynchronous_checkpoints: bool = False,
    ) -> None:
        if cluster_environment is None and dist.is_initialized():
            rank = dist.get_rank()
            cluster_environment = PlanEnvironment(rank, dist.get_world_size(), rank)
        elif cluster_environment is None and plan.num_ranks == 1:
            cluster_environment = PlanEnvironment(0, 1, 0)
        self._precision = precision
        super().__init__(cluster_environment=cluster_environment)
        self.plan = plan
        self.seed = seed
        self.last_step = StepResult(0.0, 0.0, 0.0)
        """What the last training step found."""
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self.pace = pace or OwnPace()
        """Of this rank's actions; its trace tells what they were."""
        self._runner: Engine | ReplicaRunner | None = None
        self._reader: CheckpointReader | None = None
        self._is_asynchronous = asynchronous_checkpoints
        self._background: BackgroundWriter | None = None

    # --- processes ---------------------------------------------------------------------------------------------------

    @property
    def runner(self) -> Engine | ReplicaRunner:
        """This rank's side of the plan; there once the trainer has set up."""
        if self._runner is None:
            raise RuntimeError("the strategy was asked for its runner before the trainer set it up")
        return self._runner

    @property
    @override
    def root_device(self) -> torch.device:
        if self._device is not None:
            return self._device
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank] if devices[0].type == "cuda" else devices[0]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.plan.num_ranks, 1)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        environment = self.cluster_environment
        assert environment is not None
        if self.plan.num_ranks == 1 or dist.is_initialized():
            return
        if isinstance(environment, LightningEnvironment):  # the script was started again for each rank
            environment.set_world_size(self.plan.num_ranks)
            environment.set_global_rank(environment.local_rank())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo",
            init_method=f"tcp://{environment.main_address}:{environment.main_port}",
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=self._timeout,
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        raise RankError("a plan slices global batches itself: give plain DataLoaders without a distributed sampler")

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.plan.num_ranks > 1 and dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.plan.num_ranks == 1 or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Sum or mean over ranks. What a step logs has been averaged by samples before it gets here."""
        if not isinstance(tensor, Tensor) or self.plan.num_ranks == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        is_mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg")
        return total / self.plan.num_ranks if is_mean else total

    # --- precision ---------------------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def precision_plugin(self) -> PlanPrecision:
        return PlanPrecision(self, self._precision or "32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and self._precision is None:
            self._precision = str(plugin.precision)

    # --- set-up ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        # what a step logs has been averaged over all ranks by then
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(")
        check_trainer(trainer)
        check_module(self.lightning_module, self.plan)
        if self._runner is None:
            self._runner = self._make_runner(self.lightning_module)
        if self._is_asynchronous and self._background is None:
            self._background = BackgroundWriter(self._make_exchange(own_group=True))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self.plan)
            for optimizer in self.optimizers:
                optimizer.register_step_post_hook(lambda *_: self.pace.optimizer_done())

    def _make_runner(self, module: pl.LightningModule) -> Engine | ReplicaRunner:
        precision = self._precision or "32-true"
        model = plan_model(module, self.plan)
        if model is None:
            return ReplicaRunner(
                self.plan,
                module,
                rank=self.global_rank,
                device=self.root_device,
                precision=precision,
                seed=self.seed,
                pace=self.pace,
            )
        if self.plan.model is None:
            raise RankError("this plan does not know its model: make it with make_plan(model, cluster, strategy, ...)")
        engine = Engine(
            self.plan,
            self.plan.model,
            model,
            rank=self.global_rank,
            device=self.root_device,
            seed=self.seed,
            precision=precision,
            pace=self.pace,
        )
        self.model_to_device()
        return engine

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        loader = slice_loader(dataloader, self.plan, self.global_rank, training=trainer.training, seed=self.seed)
        if trainer.training:
            batches: Any = trainer.fit_loop.epoch_loop.batch_progress
            loader.follow(lambda: (trainer.current_epoch, batches.current.processed))
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move this rank's samples; the module's own transfer hooks see its samples, not our bookkeeping."""
        if batch.samples is None:
            return batch
        samples = super().batch_to_device(batch.samples, device, dataloader_idx)
        return RankBatch(samples, batch.rows, batch.size)

    # --- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: RankBatch, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        if self._background is not None:
            self._background.check()
        index = self.lightning_module.trainer.global_step
        if isinstance(self.runner, Engine):
            self.last_step = self.runner.train_step(batch, index)
        else:
            step = self.lightning_module.training_step
            self.last_step = self.runner.train_step(step, batch, *args, step_index=index)
            self._log_averages(self.runner)
        self.runner.sums.keep()
        return torch.tensor(self.last_step.loss, dtype=torch.float64)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.runner.sums.restore()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("test_step", *args, **kwargs)

    def _evaluate(self, name: str, batch: RankBatch, *args: Any, **kwargs: Any) -> Any:
        """(loss sum, count) over all ranks; None for an unmodified module, which logs for itself."""
        if isinstance(self.runner, Engine):
            return self.runner.evaluate(batch)
        self.runner.evaluate_step(getattr(self.lightning_module, name), batch, *args, **kwargs)
        self._log_averages(self.runner)
        return None

    @override
    def predict_step(self, batch: RankBatch, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if isinstance(self.runner, Engine):
            return self.runner.predict(batch)
        return self.runner.predict_step(self.lightning_module.predict_step, batch, *args, **kwargs)

    def _log_averages(self, runner: ReplicaRunner) -> None:
        """Log what the module's step logged, averaged by samples, in the same order on all ranks."""
        assert self.lightning_module is not None
        for name, (value, options) in runner.logged.items():
            self.lightning_module.log(name, value, batch_size=runner.logged_samples, **options)

    @property
    def busy_fraction(self) -> float | None:
        """The part of its steps in which this rank computed; None before the second step."""
        return self.pace.trace.busy_fraction

    def gather_steps(self, count: int) -> list[Timeline]:
        """The last steps as they were measured, on rank 0, in seconds of the declared devices where emulated."""
        stretch = self.pace.paces.stretch if isinstance(self.pace, EmulatedPace) else 1.0
        return gather_steps(self.pace.trace, self.plan, self.global_rank, count, stretch=stretch)

    def gather_emulation(self) -> Emulation | None:
        """How well all ranks kept their pace; None where they run as fast as they can."""
        pace = self.pace
        if not isinstance(pace, EmulatedPace):
            return None
        counts = torch.tensor([pace.num_actions, pace.num_late, pace.overhead_s], dtype=torch.float64)
        actions, late, overhead_s = self.reduce(counts, reduce_op="sum").tolist()
        return Emulation(pace.paces.stretch, pace.paces.least_stretch, int(actions), int(late), overhead_s)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # the snapshot takes each rank's pieces itself

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        snapshot = take_snapshot(Path(filepath), checkpoint, self.runner, self.optimizers, self.plan.num_ranks)
        if self._background is None:
            snapshot.write(self._make_exchange(own_group=False))
        else:
            self._background.start(snapshot)

    def wait_for_checkpoints(self) -> None:
        """Return when all that was saved is whole on the disk. Raises the `CheckpointError` of a save that failed."""
        if self._background is not None:
            self._background.wait()

    @override
    def on_train_end(self) -> None:
        self.wait_for_checkpoints()

    def _make_exchange(self, *, own_group: bool) -> Exchange:
        """How ranks tell each other of a save; a thread beside the training needs a group of its own."""
        if self.plan.num_ranks == 1 or not dist.is_initialized():
            return alone
        group = dist.new_group(backend="gloo", timeout=self._timeout) if own_group else None

        def exchange(value: Any) -> list[Any]:
            found: list[Any] = [None] * self.plan.num_ranks
            dist.all_gather_object(found, value, group=group)
            return found

        return exchange

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        if self._background is None:
            remove_checkpoint(filepath)
        else:
            self._background.remove(Path(filepath))

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._reader = read_checkpoint(checkpoint_path)
        return dict(self._reader.state)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        assert self._reader is not None
        load_weights(self._reader, self.runner)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        assert self._reader is not None
        load_optimizers(self._reader, self.runner, self.optimizers)

    @override
    def teardown(self) -> None:
        if self._reader is not None:
            self._reader.close()
        try:
            self.wait_for_checkpoints()
        except CheckpointError:
            if self.lightning_module is None or self.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED:
                raise  # else the error that interrupted the run is the one to be told
        super().teardown()


def plan_model(module: pl.LightningModule, plan: Plan) -> nn.Module | None:
    """The layered model that the plan runs, or None where the module's own training_step runs.

    A module offers it as `plan_model`, or is one itself: with `layers()` and `loss(output, batch)`.
    """
    offered: Callable[..., Any] | nn.Module | None = getattr(module, "plan_model", None)
    if isinstance(offered, nn.Module):
        return offered
    if plan.is_replicated_only:
        return None
    if hasattr(module, "layers") and hasattr(module, "loss"):
        return module
    raise RankError(
        "this plan cuts the model, but the LightningModule does not say where: give it layers() and loss(output, "
        "batch), or wrap a plain model with whale_trainer.TrainingModule, or use strategy=replicate"
    )
