"""Checkpoints without processes: ranks are threads that share a barrier."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whale_trainer.checkpoint import (
    Piece,
    load_full,
    newest_checkpoint,
    read_checkpoint,
    remove_checkpoint,
    write_checkpoint,
)
from whale_trainer.checkpoint.state import decode, encode
from whale_trainer.errors import CheckpointError
from whale_trainer.planning.shares import Interval

WEIGHT = torch.arange(48, dtype=torch.float32).reshape(6, 8)
SHAPES = {"weight": (6, 8), "bias": (8,)}


def save(path: Path, step: int = 1, tensor: Tensor = WEIGHT) -> Path:
    """A whole checkpoint of one rank."""
    pieces = [Piece("weight", tensor), Piece("bias", torch.ones(8))]
    write_checkpoint(path, {"global_step": step}, pieces, SHAPES)
    return path


def save_by_ranks(path: Path, pieces: list[list[Piece]], shapes: dict[str, Any]) -> None:
    """Each rank writes its pieces, all at once, as they would in processes of their own."""
    barrier = threading.Barrier(len(pieces), timeout=20)
    failures: list[BaseException] = []
    given: list[Any] = [None] * len(pieces)

    def rank_main(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            given[rank] = value
            barrier.wait()
            found = list(given)
            barrier.wait()
            return found

        try:
            state = {"global_step": 7} if rank == 0 else {}
            write_checkpoint(path, state, pieces[rank], shapes, rank=rank, world_size=len(pieces), exchange=exchange)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                failures.append(error)
            if not isinstance(error, CheckpointError):
                barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(pieces))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        assert len({str(failure) for failure in failures}) == 1, "ranks disagree on why"
        assert len(failures) == len(pieces), "a rank took the checkpoint for whole"
        raise failures[0]


def cuts(size: int) -> st.SearchStrategy[tuple[Interval, ...]]:
    """Uneven cuts of a dim over one to four ranks; some ranks may hold nothing."""
    points = st.lists(st.integers(0, size), min_size=0, max_size=3).map(sorted)
    return points.map(lambda p: tuple(Interval(a, b) for a, b in zip([0, *p], [*p, size], strict=True)))


@given(
    rows=cuts(6), other=cuts(6), columns=cuts(8), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cuts_are_read_under_any_others(
    tmp_path: Path,
    rows: tuple[Interval, ...],
    other: tuple[Interval, ...],
    columns: tuple[Interval, ...],
    dtype: torch.dtype,
) -> None:
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    weight, moment = WEIGHT.to(dtype), WEIGHT.to(torch.float64) / 3
    pieces: list[list[Piece]] = [[] for _ in range(max(len(rows), len(columns)))]
    for rank, i in enumerate(rows):
        pieces[rank].append(Piece("weight", weight[i.start : i.stop], (0, i)))
    for rank, i in enumerate(columns):
        pieces[rank].append(Piece("weight", moment[:, i.start : i.stop], (1, i), key="optimizer.exp_avg"))
    pieces[-1].append(Piece("weight", torch.tensor(7.0), key="optimizer.step"))
    save_by_ranks(tmp_path / "c", pieces, {"weight": (6, 8)})

    with read_checkpoint(tmp_path / "c") as reader:
        assert set(reader.keys) == {"model", "optimizer.exp_avg", "optimizer.step"}
        assert torch.equal(reader.read("weight"), weight)
        assert reader.read("weight", key="optimizer.step").shape == ()
        for i in other:
            assert torch.equal(reader.read("weight", (0, i)), weight[i.start : i.stop])
            assert torch.equal(reader.read("weight", (0, i), key="optimizer.exp_avg"), moment[i.start : i.stop])


def test_a_part_is_converted_to_the_dtype_of_its_reader(tmp_path: Path) -> None:
    part = read_checkpoint(save(tmp_path / "c")).read("weight", (1, Interval(2, 5)), dtype=torch.float64)
    assert part.dtype == torch.float64
    assert torch.equal(part, WEIGHT[:, 2:5].double())


def test_the_file_of_a_rank_holds_its_part_only(tmp_path: Path) -> None:
    large = torch.zeros(1000, 8)
    pieces = [[Piece("large", large[:1], (0, Interval(0, 1)))], [Piece("large", large[1:], (0, Interval(1, 1000)))]]
    save_by_ranks(tmp_path / "c", pieces, {"large": (1000, 8)})
    assert (tmp_path / "c" / "rank0.safetensors").stat().st_size < 1000


def test_full_weights_load_strictly_in_the_plain_model_with_tied_weights(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    first = dict(model.named_parameters()) | dict(model.named_buffers())
    pieces = [Piece(name, tensor) for name, tensor in first.items()]
    shapes = {name: tuple(tensor.shape) for name, tensor in first.items()}
    write_checkpoint(tmp_path / "c", {}, pieces, shapes, aliases={"head.weight": "embed.weight"})
    full = load_full(tmp_path / "c")
    assert full["norm.num_batches_tracked"].dtype == torch.int64
    other = nn.ModuleDict({"embed": nn.Embedding(5, 3), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 5, bias=False)})
    other.load_state_dict(full, strict=True)
    assert torch.equal(other["head"].weight, model["embed"].weight)


def test_a_parameter_that_nobody_wrote_keeps_the_checkpoint_from_its_place(tmp_path: Path) -> None:
    half = [[Piece("weight", WEIGHT[:3], (0, Interval(0, 3)))], [Piece("weight", WEIGHT[3:5], (0, Interval(3, 5)))]]
    with pytest.raises(
        CheckpointError, match=r"c would not be whole: model bias \(nobody wrote it\), .*40 of 48 elements"
    ):
        save_by_ranks(tmp_path / "c", half, SHAPES)
    assert not (tmp_path / "c").exists()
    assert newest_checkpoint(tmp_path) is None


def test_a_part_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"model weight: a part of shape \[2, 8\] does not fit 0:3,0:8 of \[6, 8\]"
    ):
        write_checkpoint(tmp_path / "c", {}, [Piece("weight", WEIGHT[:2], (0, Interval(0, 3)))], SHAPES)


def test_a_disk_that_cannot_be_written_names_path_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/c could not be written by rank 0 .* free some space"):
        save(tmp_path / "file" / "c")


@pytest.mark.parametrize("before", ["nothing", "an older one"])
@pytest.mark.parametrize("moment", ["_write_pieces", "_make_index", "_write_index", "_put_in_place"])
def test_a_save_that_is_cut_short_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, before: str
) -> None:
    place = tmp_path / "checkpoints" / "step-000002"
    if before != "nothing":
        save(place, 2, WEIGHT + 1)
    older = save(tmp_path / "checkpoints" / "step-000001", 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"whale_trainer.checkpoint.writer.{moment}", killed)
        with pytest.raises(KeyboardInterrupt):
            save(place, 2)
    assert newest_checkpoint(tmp_path) == (older if before == "nothing" else place)
    if before != "nothing":
        assert torch.equal(load_full(place)["weight"], WEIGHT + 1)
    save(place, 2)
    assert newest_checkpoint(tmp_path) == place
    assert torch.equal(load_full(place)["weight"], WEIGHT)
    assert sorted(p.name for p in place.parent.iterdir()) == ["step-000001", "step-000002"]


def test_newest_is_by_steps_done_and_passes_over_damaged_ones(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    nine, ten, eleven = (save(folder / f"step-{step}", step) for step in (9, 10, 11))
    assert newest_checkpoint(tmp_path) == eleven
    (eleven / "rank0.safetensors").unlink()
    assert newest_checkpoint(tmp_path) == ten
    with (ten / "rank0.safetensors").open("ab") as file:
        file.truncate(100)
    assert newest_checkpoint(tmp_path) == nine
    (folder / "step-12").mkdir()
    assert newest_checkpoint(tmp_path) == nine
    assert newest_checkpoint(tmp_path / "elsewhere") is None


def test_removing_is_at_once_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "checkpoints" / "step-1")
    with monkeypatch.context() as patch:
        patch.setattr("whale_trainer.checkpoint.writer.shutil.rmtree", lambda *_, **__: None)
        remove_checkpoint(path)
    assert newest_checkpoint(tmp_path) is None
    remove_checkpoint(path)


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        index = json.loads((path / "index.json").read_text())
        change(index)
        (path / "index.json").write_text(json.dumps(index))

    return apply


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: shutil.rmtree(p), r"step-2 does not exist; beside it lie step-1$"),
        (
            lambda p: (p / "index.json").unlink(),
            r"step-2 has no index.json: it is not a checkpoint, or was not written",
        ),
        (lambda p: (p / "index.json").write_text('{"schema'), r"step-2/index.json cannot be read \("),
        (lambda p: (p / "index.json").write_text("[]"), r"index.json has schema version None, this release reads 1"),
        (damage(lambda i: i.update(schema_version=99)), r"index.json has schema version 99, this release reads 1"),
        (damage(lambda i: i.pop("tensors")), r"index.json is damaged \(KeyError\('tensors'\)\)"),
        (lambda p: (p / "rank0.safetensors").unlink(), r"step-2 is damaged: rank0.safetensors is missing"),
        (lambda p: (p / "rank0.safetensors").write_text("x"), r"rank0.safetensors has 1 bytes instead of \d+"),
        (
            damage(lambda i: i["tensors"]["model"]["weight"].update(pieces=[])),
            r"weight is not whole: 0 elements of 0:6,0:8",
        ),
        (damage(lambda i: i["tensors"]["model"].pop("bias")), r"holds no model bias: it was saved from another model"),
        (
            damage(lambda i: i["state"].update(x={"__code__": 1})),
            r"state holds '__code__', which this release cannot read",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path: Path, act: Callable[[Path], Any], message: str) -> None:
    save(tmp_path / "step-1")
    act(save(tmp_path / "step-2"))
    with pytest.raises(CheckpointError, match=message):  # noqa: PT012
        reader = read_checkpoint(tmp_path / "step-2")
        reader.read("weight")
        reader.read("bias")
        _ = reader.state


def test_contents_that_are_damaged_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    size = (path / "rank0.safetensors").stat().st_size
    (path / "rank0.safetensors").write_bytes(b"\xff" * size)
    with pytest.raises(CheckpointError, match=r"rank0.safetensors is damaged at model:weight\[0:6,0:8\]"):
        read_checkpoint(path).read("weight")


def test_a_pickled_file_is_never_opened(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "old.ckpt")
    with pytest.raises(CheckpointError, match=r"old.ckpt is a file; a checkpoint is a folder with index.json"):
        read_checkpoint(tmp_path / "old.ckpt")


def test_another_model_is_told_by_every_name_that_differs(tmp_path: Path) -> None:
    reader = read_checkpoint(save(tmp_path / "c"))
    reader.check_matches(SHAPES)
    with pytest.raises(CheckpointError) as caught:
        reader.check_matches({"weight": (6, 9), "scale": (8,)})
    assert str(caught.value).endswith(
        "was saved from another model: scale [8] is not in it; bias [8] is not in the model; "
        "weight has shape [6, 8], the model's is [6, 9]"
    )
    with pytest.raises(CheckpointError, match=r"weight has shape \[6, 8\], which has no part 4:7,0:8"):
        reader.read("weight", (0, Interval(4, 7)))


def equal(a: Any, b: Any) -> bool:
    """Equal in type, value, sign of zero and dtype, at any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
plain = st.recursive(
    scalars | st.sampled_from(["__tuple__", "__x__"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.just("__tuple__") | st.tuples(st.integers()), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(plain)
@settings(max_examples=200, deadline=None)
def test_plain_state_comes_back_exactly_through_json(value: Any) -> None:
    assert equal(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([[1, 2]], dtype=torch.int64),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3).T,
        np.float64(0.1),
        np.int32(3),
        np.bool_(True),
        np.arange(6).reshape(2, 3),
        Counter({3: 1, 8: 2}),
        OrderedDict([("b", 1), ("a", (2, 3))]),
    ],
    ids=repr,
)
def test_small_arrays_and_counters_come_back_with_their_types(value: Any) -> None:
    assert equal(decode(json.loads(json.dumps(encode({"x": value})))), {"x": value})


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ],
    ids=["multistep", "cosine", "onecycle", "lambda", "plateau", "sequential"],
)
def test_the_state_of_torch_s_schedulers_is_plain(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=0.1)
    scheduler = make(optimizer)
    state = {"lr_schedulers": [scheduler.state_dict()], "groups": optimizer.state_dict()["param_groups"]}
    assert equal(decode(json.loads(json.dumps(encode(state)))), state)


class Handle:
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"callbacks": {"Mine": {"handle": Handle()}}},
            r"callbacks.Mine.handle is a .*Handle: return plain values .*state_dict",
        ),
        (
            {"hyper_parameters": {"model": nn.Linear(1, 1)}},
            r"hyper_parameters.model is a torch.nn.*Linear: leave it out",
        ),
        ({"lr_schedulers": [{"f": print}]}, r"lr_schedulers\[0\].f is a builtins.builtin_function_or_method"),
        ({"mine": {1: {2, 3}}}, r"mine\[1\] is a builtins.set: add plain values only"),
        ({"mine": np.array([object()])}, r"mine is a numpy.ndarray"),
    ],
)
def test_what_is_not_plain_is_refused_by_key_and_type(state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(state)


def test_config_objects_are_stored_as_the_plain_data_they_stand_for() -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"lr": 0.1, "betas": [0.9, "${b}"], "b": 0.95})
    assert decode(encode({"config": config})) == {"config": {"lr": 0.1, "betas": [0.9, 0.95], "b": 0.95}}
