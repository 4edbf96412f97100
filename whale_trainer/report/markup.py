"""HTML and SVG from plain values: every text is escaped unless it is markup already."""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "link", "br"})
DRAWN = frozenset({"rect", "line"})
"""SVG elements without contents, closed in themselves."""


class Markup(str):
    """Text that stands in the page as it is."""

    __slots__ = ()


def tag(name: str, /, *parts: str, **attributes: object) -> Markup:
    """An element. Parts that are no `Markup` are escaped; of `data_tile=0` and `class_="x"` the attributes are
    `data-tile="0"` and `class="x"`; None leaves an attribute out.
    """
    written = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    if name in DRAWN and not parts:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(*parts)}</{name}>")


def joined(*parts: str) -> Markup:
    """The parts one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def number(value: float, digits: int = 6) -> str:
    """With at most `digits` digits after the point, and no zeros at its end."""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `12 µs`: three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995 or unit == "µs":
            return f"{three_digits(seconds * factor)} {unit}"
    raise AssertionError(seconds)


def three_digits(value: float) -> str:
    """`1234`, `123`, `12.3`, `1.23`, `0.123`."""
    decimals = next((d for d, least in ((0, 99.95), (1, 9.995), (2, 0.9995)) if value >= least), 3)
    return number(value, decimals)


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """`3`, `0, 1`, `0-3, 8`: neighbours as a range from three on."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return ", ".join(words)


def _value(value: object) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return escape(text, quote=True)
