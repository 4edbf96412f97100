"""Runs the programs of all ranks on paper, with the executor's semantics, to show a lock before anything starts.

Every compute takes one tick. Receives and sends take none and wait for nothing: a receive is posted, a send is under
way. A compute waits until its messages were sent and their receives posted, until what this rank hands to itself was
computed, and, on a split tile, until all ranks of the group are at it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from whale_trainer.errors import PlanError
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.actions import Action, Compute, Instruction, Message, Op, Receive, Send
from whale_trainer.planning.schedule.lowering import lower
from whale_trainer.planning.schedule.schedule import Schedule

Programs = Mapping[int, Sequence[Instruction]] | Sequence[Sequence[Instruction]]
"""Instructions by rank."""
Tick = dict[int, Action]
"""What each busy rank computes in one unit of time."""


def replay(plan: Plan, programs: Programs) -> tuple[Tick, ...]:
    """Run the programs to their end; gives what every rank computed in each tick.

    Raises `PlanError` with a rank x tick grid where ranks wait for each other, and for messages that are not sent and
    received exactly once, in one order on both ends of their channel.
    """
    _check_messages(programs[rank] for rank in range(plan.num_ranks))
    state = _Replay(plan, programs)
    ticks: list[Tick] = []
    while tick := state.advance():
        ticks.append(tick)
    waits = {rank: state.wait(rank) for rank in range(plan.num_ranks)}
    if any(waits.values()):
        raise PlanError(
            f"the schedule cannot make progress after tick {len(ticks)}\n{grid(plan.num_ranks, ticks, waits)}"
        )
    return tuple(ticks)


def check(schedule: Schedule) -> tuple[Tick, ...]:
    """Lower the schedule for all ranks and replay it."""
    return replay(schedule.plan, [lower(schedule, rank) for rank in range(schedule.plan.num_ranks)])


def draw(schedule: Schedule) -> str:
    """The schedule as a grid of ranks x ticks, one line a rank."""
    return grid(schedule.plan.num_ranks, check(schedule))


def grid(num_ranks: int, ticks: Sequence[Tick], notes: Mapping[int, str] | None = None) -> str:
    """One line a rank, one column a tick, a dot where the rank is idle; behind an arrow, the rank's note."""
    width = max((len(str(a)) for tick in ticks for a in tick.values()), default=0)
    label = len(str(num_ranks - 1))
    lines = []
    for rank in range(num_ranks):
        cells = [f"{tick.get(rank, '.')!s:>{width}}" for tick in ticks]
        note = (notes or {}).get(rank)
        lines.append("  ".join([f"rank {rank:<{label}}", " ".join(cells), *([f"← {note}"] if note else [])]))
    return "\n".join("  " + line for line in lines) if notes else "\n".join(lines)


class _Replay:
    """Where each rank is, and what has happened."""

    def __init__(self, plan: Plan, programs: Programs) -> None:
        self._plan = plan
        self._programs = programs
        self._place = [0] * plan.num_ranks
        self._posted: set[Message] = set()
        self._sent: set[Message] = set()
        self._done: set[tuple[int, Action]] = set()

    def advance(self) -> Tick:
        """Let every rank go on by one compute, where it can; gives who computed what, nothing when no rank could."""
        ranks = range(self._plan.num_ranks)
        for rank in ranks:
            self._communicate(rank)
        at = {rank: self._next(rank) for rank in ranks}
        tick = {rank: c.action for rank, c in at.items() if c is not None and not self.wait(rank)}
        for rank, action in tick.items():
            self._done.add((rank, action))
            self._place[rank] += 1
        return tick

    def _communicate(self, rank: int) -> None:
        """Pass the receives and sends before the rank's next compute."""
        program = self._programs[rank]
        while self._place[rank] < len(program):
            instruction = program[self._place[rank]]
            if isinstance(instruction, Compute):
                return
            if isinstance(instruction, Receive):
                self._posted.add(instruction.message)
            else:
                message = instruction.message
                if (rank, message.producer) not in self._done:
                    raise PlanError(f"rank {rank} sends {message} before it has computed it")
                self._sent.add(message)
            self._place[rank] += 1

    def _next(self, rank: int) -> Compute | None:
        program = self._programs[rank]
        instruction = program[self._place[rank]] if self._place[rank] < len(program) else None
        return instruction if isinstance(instruction, Compute) else None

    def wait(self, rank: int) -> str:
        """Why the rank cannot run its next compute; empty when it can, or has none left."""
        compute = self._next(rank)
        if compute is None:
            return ""
        own = self._lack(rank, compute)
        if own:
            return f"waits at {compute.action}{own}"
        for other in self._plan.tiles[compute.action.tile].ranks:
            there = self._next(other)
            if there is None or there.action != compute.action:
                place = f"is at {there.action}" if there else "has finished"
                return f"waits at {compute.action} for rank {other}, which {place}"
            if self._lack(other, there):
                return f"waits at {compute.action} for rank {other}, which waits too"
        return ""

    def _lack(self, rank: int, compute: Compute) -> str:
        """What the compute misses on this rank itself."""
        action = compute.action
        first = Op.INPUT if action.op is Op.WEIGHT else Op.FORWARD
        if action.op is not first and (rank, Action(action.tile, first, action.micro_batch)) not in self._done:
            return ", whose forward has not run" if first is Op.FORWARD else f", whose {first} has not run"
        for message in compute.inputs:
            if message.is_local and (rank, message.producer) not in self._done:
                return f" for {message.producer}, which has not run"
            if not message.is_local and message not in self._sent:
                return f" for {message.producer}, which rank {message.source_rank} has not sent"
            if not message.is_local and message not in self._posted:
                return f" for {message.producer} from rank {message.source_rank}, whose receive is not posted"
        return ""


def _check_messages(programs: Iterable[Sequence[Instruction]]) -> None:
    """Each message is made, sent, received and used once, and both ends of a channel keep one order."""
    made: Counter[Message] = Counter()
    used: Counter[Message] = Counter()
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for program in programs:
        for instruction in program:
            if isinstance(instruction, Send):
                message = instruction.message
                sent[message.source_rank, message.target_rank].append(message)
            elif isinstance(instruction, Receive):
                message = instruction.message
                received[message.source_rank, message.target_rank].append(message)
            else:
                used.update(m for m in instruction.inputs if not m.is_local)
                made.update(m for m in instruction.outputs if not m.is_local)
    counts = {
        "made": made,
        "sent": Counter(m for channel in sent.values() for m in channel),
        "received": Counter(m for channel in received.values() for m in channel),
        "used": used,
    }
    for message in sorted(set().union(*counts.values())):
        if any(count[message] != 1 for count in counts.values()):
            found = ", ".join(f"{verb} {count[message]}" for verb, count in counts.items())
            raise PlanError(f"{message} must be made, sent, received and used once; times found: {found}")
    for (source, target), messages in sorted(sent.items()):
        for a, b in zip(messages, received[source, target], strict=True):
            if a != b:
                raise PlanError(
                    f"ranks {source} and {target} disagree on the order of their messages: where rank {source} sends "
                    f"{a}, rank {target} receives {b}"
                )
