"""The words that schedules, programs, replay and executor share: actions, messages, and a rank's three instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from whale_trainer.errors import PlanError
from whale_trainer.planning.shares import Interval


class Op(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of inputs and weights."""
    INPUT = "I"
    """A backward pass without those gradients of weights that can wait."""
    WEIGHT = "W"
    """The gradients of weights that an `I` has left."""

    @property
    def gives_back(self) -> bool:
        """Whether the tiles before wait for what it computes."""
        return self in (Op.BACKWARD, Op.INPUT)


@dataclass(frozen=True, order=True)
class Action:
    """One pass of one micro-batch through one tile; prints as `2F0` and parses back."""

    tile: int
    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.tile}{self.op}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text, re.ASCII)
        if match is None:
            raise PlanError(f"{text!r} is not an action: write tile, F, B, I or W, micro-batch, such as 2F0")
        return cls(int(match[1]), Op(match[2]), int(match[3]))


@dataclass(frozen=True, order=True)
class Message:
    """What crosses a bridge: activations to the tile after it (FORWARD), gradients to the one before (BACKWARD,
    or INPUT where the schedule splits backwards)."""

    source_tile: int
    """The tile whose action makes the message."""
    target_tile: int
    micro_batch: int
    op: Op
    source_rank: int
    target_rank: int
    rows: Interval
    """Samples, counted from the start of the batch."""

    @property
    def is_local(self) -> bool:
        """True where a rank hands its own result on, and nothing travels."""
        return self.source_rank == self.target_rank

    @property
    def producer(self) -> Action:
        return Action(self.source_tile, self.op, self.micro_batch)

    @property
    def consumer(self) -> Action:
        return Action(self.target_tile, self.op, self.micro_batch)

    def __str__(self) -> str:
        return f"{self.producer} of rank {self.source_rank} for {self.consumer} of rank {self.target_rank}"


@dataclass(frozen=True)
class Receive:
    """Post the receive of a message; does not wait."""

    message: Message


@dataclass(frozen=True)
class Compute:
    """Wait for the inputs, meet the other ranks of a split tile, compute."""

    action: Action
    inputs: tuple[Message, ...]
    outputs: tuple[Message, ...]


@dataclass(frozen=True)
class Send:
    """Start the sending of a message; does not wait."""

    message: Message


Instruction = Receive | Compute | Send
