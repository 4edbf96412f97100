"""The tiling drawn in characters: layers to the right, samples of a micro-batch downwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from whale_trainer.planning.plan import Plan, Tile

WIDTH = 66
"""Characters that the layers take, if the labels need no more."""
HEIGHT = 10
MOST_BANDS = 12
"""Rows of tiles that are drawn; the rest of a large plan is counted."""

# What meets at a corner: a line up, down, left, right
_CORNERS = {
    (False, True, False, True): "┌",
    (False, True, True, False): "┐",
    (True, False, False, True): "└",
    (True, False, True, False): "┘",
    (True, True, False, True): "├",
    (True, True, True, False): "┤",
    (False, True, True, True): "┬",
    (True, False, True, True): "┴",
    (True, True, True, True): "┼",
    (True, True, False, False): "│",
    (False, False, True, True): "─",
    (False, False, False, False): " ",
}


def drawing(plan: Plan) -> str:
    """The rectangle of layers x samples with its tiles, each labelled with its ranks and shard weights."""
    xs = sorted({x for t in plan.tiles for x in t.layers})
    ys = sorted({y for t in plan.tiles for y in t.samples})
    hidden = len(ys) - 1 - MOST_BANDS
    ys = ys[: MOST_BANDS + 1]
    tiles = [t for t in plan.tiles if t.samples.start < ys[-1]]
    columns = _positions(xs, WIDTH, _least_widths(tiles, xs))
    rows = _positions(ys, HEIGHT, [2] * (len(ys) - 1))
    canvas = [[" "] * (columns[-1] + 1) for _ in range(rows[-1] + 1)]
    _draw_lines(canvas, tiles, xs, ys, columns, rows)
    for index, tile in enumerate(plan.tiles):
        if tile in tiles:
            top, left = rows[ys.index(tile.samples.start)], columns[xs.index(tile.layers.start)]
            for offset, char in enumerate(f"{index}: {_label(tile)}"):
                canvas[top + 1][left + 1 + offset] = char
    margin = len(str(ys[-1])) + 1
    marks = {row: str(y) for y, row in zip(ys, rows, strict=True)}
    lines = [_axis(xs, columns, margin)]
    lines += [f"{marks.get(i, ''):>{margin}} {''.join(line)}" for i, line in enumerate(canvas)]
    if hidden > 0:
        lines.append(f"{'':>{margin}} … and {hidden} more rows of tiles, down to sample {plan.micro_batch_size}")
    return "\n".join([f"{'':>{margin}} layers to the right, samples of a micro-batch downwards", *lines])


def _label(tile: Tile) -> str:
    ranks = ",".join(map(str, tile.ranks[:8])) + ("…" if len(tile.ranks) > 8 else "")
    weights = "" if len(set(tile.weights)) == 1 else " " + ":".join(map(str, tile.weights[:8]))
    return f"rank{'s' if len(tile.shards) > 1 else ''} {ranks}{weights}"


def _least_widths(tiles: Sequence[Tile], xs: Sequence[int]) -> list[int]:
    """Characters for each column so that every label has room; a label over several columns shares its need."""
    widths = [len(str(x)) + 2 for x in xs[:-1]]
    for tile in tiles:
        spanned = range(xs.index(tile.layers.start), xs.index(tile.layers.stop))
        missing = len(_label(tile)) + 6 - sum(widths[i] for i in spanned)
        for i in spanned:
            widths[i] += max(0, -(-missing // len(spanned)))
    return widths


def _positions(cuts: Sequence[int], room: int, least: Sequence[int]) -> list[int]:
    """Where each cut is drawn: in proportion to the lengths between them, none below its least."""
    total = cuts[-1] - cuts[0]
    at = [0]
    for (a, b), smallest in zip(pairwise(cuts), least, strict=True):
        at.append(at[-1] + max(smallest, round(room * (b - a) / total)))
    return at


def _draw_lines(
    canvas: list[list[str]],
    tiles: Sequence[Tile],
    xs: Sequence[int],
    ys: Sequence[int],
    columns: Sequence[int],
    rows: Sequence[int],
) -> None:
    horizontal: set[tuple[int, int]] = set()
    vertical: set[tuple[int, int]] = set()
    for tile in tiles:
        left, right = (xs.index(x) for x in tile.layers)
        top, bottom = (ys.index(y) for y in tile.samples)
        horizontal |= {(y, x) for y in (top, bottom) for x in range(left, right)}
        vertical |= {(y, x) for y in range(top, bottom) for x in (left, right)}
    for y, x in horizontal:
        for column in range(columns[x] + 1, columns[x + 1]):
            canvas[rows[y]][column] = "─"
    for y, x in vertical:
        for row in range(rows[y] + 1, rows[y + 1]):
            canvas[row][columns[x]] = "│"
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            meeting = ((y - 1, x) in vertical, (y, x) in vertical, (y, x - 1) in horizontal, (y, x) in horizontal)
            canvas[row][column] = _CORNERS[meeting]


def _axis(xs: Sequence[int], columns: Sequence[int], margin: int) -> str:
    line = [" "] * (columns[-1] + len(str(xs[-1])) + 1)
    for x, column in zip(xs, columns, strict=True):
        line[column : column + len(str(x))] = str(x)
    return " " * (margin + 1) + "".join(line).rstrip()
