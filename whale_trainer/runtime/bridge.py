"""Messages between tiles: what crosses a bridge, in which buffers, over which channel.

A boundary is a tensor or a dict of tensors (None allowed), batch first. Its layout is told once, before the first
message of a bridge; afterwards only tensor data travels. Messages of one channel keep their order, so they need no
tags.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale_trainer.errors import RankError
from whale_trainer.planning.schedule.schedule import Action, Message
from whale_trainer.runtime.mesh import Mesh
from whale_trainer.runtime.pace import Pace

Boundary = Any
"""A tensor, or a dict of str to tensor or None."""


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and sample shapes of a boundary's tensors; `names` is None for a bare tensor."""

    names: tuple[str, ...] | None
    entries: tuple[tuple[str, tuple[int, ...], bool] | None, ...]
    """(dtype, shape of one sample, requires_grad) of each tensor; None for None."""

    @classmethod
    def of(cls, boundary: Boundary) -> Layout:
        names = tuple(boundary) if isinstance(boundary, dict) else None
        tensors = boundary.values() if isinstance(boundary, dict) else (boundary,)
        return cls(
            names,
            tuple(
                None if t is None else (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:]), t.requires_grad)
                for t in tensors
            ),
        )

    def allocate(self, rows: int, device: torch.device) -> list[Tensor | None]:
        return [
            None if e is None else torch.empty(rows, *e[1], dtype=getattr(torch, e[0]), device=device)
            for e in self.entries
        ]

    def pack(self, tensors: list[Tensor | None]) -> Boundary:
        return tensors[0] if self.names is None else dict(zip(self.names, tensors, strict=True))

    @property
    def with_gradient(self) -> tuple[int, ...]:
        """Positions of the tensors whose gradient travels back."""
        return tuple(i for i, e in enumerate(self.entries) if e is not None and e[2])

    def encode(self) -> bytes:
        return json.dumps([self.names, self.entries]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        names, entries = json.loads(data)
        return cls(
            None if names is None else tuple(names),
            tuple(None if e is None else (e[0], tuple(e[1]), e[2]) for e in entries),
        )


def tensors_of(boundary: Boundary) -> list[Tensor | None]:
    return list(boundary.values()) if isinstance(boundary, dict) else [boundary]


@dataclass
class Arrival:
    """A posted receive: its buffers fill while the rank computes."""

    message: Message
    targets: list[Tensor] | None = None
    """Row slices to fill; None until the layout is known."""
    works: list[dist.Work] = field(default_factory=list)


class Bridges:
    """All messages of one rank. Sends never block; receives are posted early and waited for when they are needed."""

    def __init__(self, mesh: Mesh, pace: Pace) -> None:
        self._mesh = mesh
        self._pace = pace
        self._sending: dict[int, deque[tuple[Action, dist.Work, Tensor]]] = {}
        """By rank that receives: the action that uses the tensor, and what is under way."""
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def layout(self, message: Message, training: bool) -> Layout | None:
        """The layout of the activations of the message's bridge, once a sender has told it."""
        return self._layouts.get(self._key(message, training))

    def set_layout(self, message: Message, training: bool, layout: Layout) -> None:
        """Take `layout` for a bridge between two tiles of this rank."""
        self._layouts[self._key(message, training)] = layout

    @staticmethod
    def _key(message: Message, training: bool) -> tuple[Any, ...]:
        return (message.source_tile, message.target_tile, message.source_rank, message.target_rank, training)

    def send(self, message: Message, tensors: list[Tensor | None], layout: Layout | None, training: bool) -> None:
        """Start sending the tensors (None ones excluded); `layout` is given for activations."""
        self._drop_completed()
        if layout is not None:
            key = self._key(message, training)
            before = self._layouts.setdefault(key, layout)
            if before is layout:
                self._send_layout(message, layout)
            elif before != layout:
                raise RankError(
                    f"the boundary after tile {message.source_tile} changed from {before.entries} to {layout.entries}: "
                    "plans with stages need batches of one shape; pad the samples to one length in the collate function"
                )
        travelling = [tensor.contiguous() for tensor in tensors if tensor is not None]
        self._pace.sent(message, sum(tensor.nbytes for tensor in travelling))
        for tensor in travelling:
            self._start(tensor, message)

    def _start(self, tensor: Tensor, message: Message) -> None:
        group = self._mesh.channel(message.source_rank, message.target_rank)
        work = dist.isend(tensor, message.target_rank, group=group)
        assert work is not None
        self._sending.setdefault(message.target_rank, deque()).append((message.consumer, work, tensor))

    def _send_layout(self, message: Message, layout: Layout) -> None:
        data = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8).to(self._mesh.device)
        self._start(torch.tensor([data.numel()], device=self._mesh.device), message)
        self._start(data, message)

    def receive_layout(self, message: Message, training: bool) -> Layout:
        """Wait for the layout that precedes the first activations of a bridge."""
        group = self._mesh.channel(message.source_rank, message.target_rank)
        length = torch.zeros(1, dtype=torch.int64, device=self._mesh.device)
        dist.recv(length, message.source_rank, group=group)
        data = torch.zeros(int(length), dtype=torch.uint8, device=self._mesh.device)
        dist.recv(data, message.source_rank, group=group)
        layout = Layout.decode(bytes(data.tolist()))
        self._layouts[self._key(message, training)] = layout
        return layout

    def post(self, arrival: Arrival) -> None:
        """Post the receives into `arrival.targets`."""
        message = arrival.message
        group = self._mesh.channel(message.source_rank, message.target_rank)
        assert arrival.targets is not None
        for target in arrival.targets:
            work = dist.irecv(target, message.source_rank, group=group)
            assert work is not None
            arrival.works.append(work)

    def _drop_completed(self) -> None:
        """Drop buffers whose sends are known to be over; gloo (torch 2.13) knows it only where they are waited for."""
        for sending in self._sending.values():
            while sending and sending[0][1].is_completed():
                sending.popleft()

    def arrived(self, message: Message, places: Mapping[Action, int]) -> None:
        """A message has come, so the ranks of its tile have received what they used before it was made.

        `places` are those of actions in the schedule. Those ranks run alike, so nothing here waits for long; nor for
        ever, since what comes earlier in the schedule needs nothing of what this rank does later. Without this, gloo
        would hold every tensor that was sent until the step is over.
        """
        place = places[message.producer]
        for rank in self._mesh.plan.tiles[message.source_tile].ranks:
            sending = self._sending.get(rank)
            while sending and places[sending[0][0]] < place:
                sending.popleft()[1].wait()

    def drain(self) -> None:
        """Wait for all sends."""
        for sending in self._sending.values():
            while sending:
                sending.popleft()[1].wait()
