"""Runs a rank's list of instructions: a dispatch table and the memory of what is in flight. Decides nothing.

The instructions come from `planning.schedule.lowering`; the replay that proves them free of deadlock has the same
meaning for each: a receive is posted and does not wait, a compute waits for its inputs, a send does not wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from whale_trainer.describe import first_inputs, model_loss
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.schedule import Action, Compute, Instruction, Message, Op, Receive, Send
from whale_trainer.planning.shares import Interval
from whale_trainer.runtime.bridge import Arrival, Boundary, Bridges, Layout, tensors_of
from whale_trainer.runtime.dropout import DropoutState
from whale_trainer.runtime.gradients import GradientSums
from whale_trainer.runtime.pace import Pace
from whale_trainer.runtime.precision import Precision
from whale_trainer.runtime.shards import TileLayers
from whale_trainer.runtime.weight_gradients import Product, WeightGradients, add_waiting


def slice_samples(samples: Any, rows: tuple[int, ...], wanted: Interval) -> Any:
    """The samples `wanted` of the global batch, from a rank's batch that holds the samples `rows`, ascending.

    Tensors and lists with one entry per sample are cut along their first dim; everything else is passed as it is.
    """
    first = bisect_left(rows, wanted.start)
    stop = first + len(wanted)
    if first == 0 and stop == len(rows):
        return samples

    def cut(leaf: Any) -> Any:
        return leaf[first:stop] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(rows) else leaf

    return tree_map(cut, samples)


@dataclass
class Pass:
    """One pass through a schedule: its batch, and what is in flight."""

    batch_size: int
    rows: tuple[int, ...]
    samples: Any
    step: int
    training: bool
    root_scale: float
    """Factor on the loss sum before the backward pass."""
    finals: Mapping[Action, list[nn.Parameter]]
    places: Mapping[Action, int]
    """Of each action in the schedule."""
    loss_sum: float = 0.0
    count: float = 0.0
    saved: dict[tuple[int, int], tuple[list[Tensor | None], list[Tensor]]] = field(default_factory=dict)
    waiting_weights: dict[tuple[int, int], list[Product]] = field(default_factory=dict)
    """What the gradients of weights are made of, by (tile, micro-batch) whose inputs' gradients are done."""
    local: dict[Message, list[Tensor | None]] = field(default_factory=dict)
    outgoing: dict[Message, tuple[list[Tensor | None], Layout | None]] = field(default_factory=dict)
    arrivals: dict[Message, Arrival] = field(default_factory=dict)
    waiting: dict[tuple[int, int], deque[Arrival]] = field(default_factory=dict)
    """Receives by channel that cannot be posted before their layout is known."""
    buffers: dict[tuple[int, int, Op], list[Tensor | None]] = field(default_factory=dict)
    results: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Outputs of the last layer by (tile, micro-batch), when they were asked for."""
    keep_results: bool = False
    totals: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Executor:
    """Executes instruction lists on this rank's tiles."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        model: nn.Module,
        tiles: Mapping[int, TileLayers],
        bridges: Bridges,
        sums: GradientSums,
        dropout: DropoutState,
        precision: Precision,
        device: torch.device,
        pace: Pace,
        weights: WeightGradients | None = None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._model = model
        self._tiles = tiles
        self._bridges = bridges
        self._sums = sums
        self._dropout = dropout
        self._precision = precision
        self._device = device
        self._pace = pace
        self._weights = weights or WeightGradients()
        self._output_layouts: dict[tuple[int, bool], Layout] = {}
        self._handlers: dict[type, Callable[[Any, Pass], None]] = {
            Receive: self._receive,
            Compute: self._compute,
            Send: self._send,
        }

    def run(self, program: Iterable[Instruction], run: Pass) -> Pass:
        """Execute the program; afterwards nothing of this rank is under way."""
        handlers = self._handlers
        with nullcontext() if run.training else torch.no_grad():
            for instruction in program:
                handlers[type(instruction)](instruction, run)
        self._bridges.drain()
        return run

    # --- receive -----------------------------------------------------------------------------------------------------

    def _receive(self, instruction: Receive, run: Pass) -> None:
        message = instruction.message
        arrival = run.arrivals[message] = Arrival(message)
        self._pace.posted(message)
        queue = run.waiting.setdefault((message.source_rank, message.target_rank), deque())
        queue.append(arrival)
        while queue and self._layout(queue[0].message, run) is not None:
            self._post(queue.popleft(), run)

    def _layout(self, message: Message, run: Pass) -> Layout | None:
        if message.op is Op.FORWARD:
            return self._bridges.layout(message, run.training)
        return self._output_layouts.get((message.target_tile, run.training))

    def _post(self, arrival: Arrival, run: Pass) -> None:
        message = arrival.message
        layout = self._layout(message, run)
        assert layout is not None
        part = self._part(message.target_tile, message, run)
        buffers = self._buffer(message.target_tile, message.micro_batch, message.op, layout, run)
        arrival.targets = [b[part] for b in buffers if b is not None]
        self._bridges.post(arrival)

    def _buffer(self, tile: int, micro_batch: int, op: Op, layout: Layout, run: Pass) -> list[Tensor | None]:
        """Input of a forward action, or gradient of its output (then only where a gradient travels)."""
        key = (tile, micro_batch, op)
        if key not in run.buffers:
            buffers = layout.allocate(len(self._plan.rows(tile, micro_batch, run.batch_size)), self._device)
            if op.gives_back:
                buffers = [buffers[i] for i in layout.with_gradient]
            run.buffers[key] = buffers
        return run.buffers[key]

    def _part(self, tile: int, message: Message, run: Pass) -> slice:
        """Where the message's samples are among the rows of `tile`."""
        rows = self._plan.rows(tile, message.micro_batch, run.batch_size)
        return slice(message.rows.start - rows.start, message.rows.stop - rows.start)

    def _wait(self, message: Message, run: Pass) -> None:
        queue = run.waiting[message.source_rank, message.target_rank]
        arrival = run.arrivals.pop(message)
        while arrival.targets is None:
            if self._layout(queue[0].message, run) is None:
                self._bridges.receive_layout(queue[0].message, run.training)
            self._post(queue.popleft(), run)
        while queue and self._layout(queue[0].message, run) is not None:
            self._post(queue.popleft(), run)
        for work in arrival.works:
            work.wait()
        self._bridges.arrived(message, run.places)
        self._pace.received(message)

    def _collect(self, action: Action, inputs: tuple[Message, ...], run: Pass) -> list[Tensor | None]:
        """What the bridges bring for an action, put together along the samples."""
        rows = self._plan.rows(action.tile, action.micro_batch, run.batch_size)
        if len(inputs) == 1 and inputs[0].source_rank == inputs[0].target_rank and inputs[0].rows == rows:
            return run.local.pop(inputs[0])
        for message in inputs:
            if message.source_rank != message.target_rank:
                self._wait(message, run)
        for message in inputs:
            if message.source_rank == message.target_rank:
                tensors = run.local.pop(message)
                layout = self._layout(message, run)
                assert layout is not None
                buffers = self._buffer(action.tile, action.micro_batch, action.op, layout, run)
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    if buffer is not None and tensor is not None:
                        buffer[self._part(action.tile, message, run)].copy_(tensor)
        return run.buffers.pop((action.tile, action.micro_batch, action.op))

    # --- compute -----------------------------------------------------------------------------------------------------

    def _compute(self, instruction: Compute, run: Pass) -> None:
        """Wait for what the bridges bring, then compute: only the latter is the action."""
        action, tile = instruction.action, self._plan.tiles[instruction.action.tile]
        is_forward = action.op is Op.FORWARD
        is_edge = tile.layers.start == 0 if is_forward else tile.layers.stop == self._plan.num_layers
        brought = None if is_edge or action.op is Op.WEIGHT else self._collect(action, instruction.inputs, run)
        with self._pace.action(action, len(self._plan.rows(action.tile, action.micro_batch, run.batch_size))):
            if is_forward:
                self._forward(instruction, brought, run)
            elif action.op is Op.WEIGHT:
                self._weight(action, run)
            else:
                self._backward(instruction, brought, run)

    def _forward(self, instruction: Compute, brought: list[Tensor | None] | None, run: Pass) -> None:
        action = instruction.action
        tile = self._plan.tiles[action.tile]
        rows = self._plan.rows(action.tile, action.micro_batch, run.batch_size)
        self._dropout.enter(run.step, rows.start)
        is_last = tile.layers.stop == self._plan.num_layers
        samples = None
        if tile.layers.start == 0 or is_last:
            samples = slice_samples(run.samples, run.rows, rows)
        if brought is None:
            inputs: list[Tensor | None] = []
            x: Boundary = first_inputs(self._model, samples)
        else:
            x, inputs = self._bring_in(brought, instruction.inputs, run)
        with self._precision.forward_context():
            out = self._tiles[action.tile](x)
            if is_last and not run.keep_results:
                loss_sum, count = model_loss(self._model, out, samples)
        if not is_last:
            self._hand_on(instruction, out, run)
            outputs = [t for t in tensors_of(out) if t is not None and t.requires_grad]
        elif run.keep_results:
            run.results[action.tile, action.micro_batch] = out
            outputs = []
        else:
            if tile.ranks[0] == self._rank:
                # copies: the storage of a loss may be as large as what it was summed from
                run.totals.append((loss_sum.detach().clone(), torch.as_tensor(count).detach().clone()))
            outputs = [loss_sum * run.root_scale]
        if run.training:
            run.saved[action.tile, action.micro_batch] = (inputs, outputs)

    def _bring_in(
        self, tensors: list[Tensor | None], messages: tuple[Message, ...], run: Pass
    ) -> tuple[Boundary, list[Tensor | None]]:
        layout = self._layout(messages[0], run)
        assert layout is not None
        if run.training:
            for position in layout.with_gradient:
                tensor = tensors[position]
                assert tensor is not None
                tensors[position] = tensor.detach().requires_grad_()
        return layout.pack(tensors), [tensors[i] for i in layout.with_gradient]

    def _hand_on(self, instruction: Compute, out: Boundary, run: Pass) -> None:
        """Keep the output of a forward action for its messages."""
        layout = Layout.of(out)
        self._output_layouts[instruction.action.tile, run.training] = layout
        for message in instruction.outputs:
            part = self._part(instruction.action.tile, message, run)
            tensors = [None if t is None else t.detach()[part] for t in tensors_of(out)]
            if message.source_rank == message.target_rank:
                self._bridges.set_layout(message, run.training, layout)
                run.local[message] = tensors
            else:
                run.outgoing[message] = (tensors, layout)

    def _backward(self, instruction: Compute, grads: list[Tensor | None] | None, run: Pass) -> None:
        action = instruction.action
        inputs, outputs = run.saved.pop((action.tile, action.micro_batch))
        finals = run.finals.get(action, ())
        self._sums.expect(finals)
        if action.op is Op.INPUT:
            self._weights.waiting = run.waiting_weights[action.tile, action.micro_batch] = []
        if any(t.requires_grad for t in outputs):
            torch.autograd.backward(outputs, grads)
        self._weights.waiting = None
        self._sums.settle(finals)
        for message in instruction.outputs:
            part = self._part(action.tile, message, run)
            tensors = [
                None if t is None else (t.new_zeros(t.shape) if t.grad is None else t.grad)[part] for t in inputs
            ]
            if message.source_rank == message.target_rank:
                run.local[message] = list(tensors)
            else:
                run.outgoing[message] = (list(tensors), None)

    def _weight(self, action: Action, run: Pass) -> None:
        products = run.waiting_weights.pop((action.tile, action.micro_batch))
        finals = {id(parameter): parameter for parameter in run.finals.get(action, ())}
        waiting = {id(parameter) for product in products for parameter in product.parameters}
        self._sums.settle(parameter for key, parameter in finals.items() if key not in waiting)
        for parameter in add_waiting(products):
            if id(parameter) in finals:
                self._sums.settle([finals[id(parameter)]])
        self._sums.settle(finals.values())

    # --- send --------------------------------------------------------------------------------------------------------

    def _send(self, instruction: Send, run: Pass) -> None:
        tensors, layout = run.outgoing.pop(instruction.message)
        self._bridges.send(instruction.message, tensors, layout, run.training)
