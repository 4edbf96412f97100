"""report.html: one page that holds all that a reader asks of a plan. It loads nothing: style and script stand in it.

Elements carry what they draw as data attributes, so that tests and scripts can read the page: `data-tile`,
`data-shard`, `data-rank`, `data-activity`, `data-memory`, `data-item`, `data-figure`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.answer import Answer
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.show import HEADINGS, device_rows
from whale_trainer.planning.show import title as plan_title
from whale_trainer.planning.simulation.timeline import Timeline
from whale_trainer.report.colours import kind_colours
from whale_trainer.report.lanes import pass_seconds
from whale_trainer.report.markup import Markup, duration, joined, tag, three_digits
from whale_trainer.report.memory_bars import memory_bars
from whale_trainer.report.step_rows import drawn_ranks, legend, omitted, step_rows
from whale_trainer.report.tiling import swatch, tiling

FILE = "report.html"
MOST_ROWS = 512
"""Rows of the table of devices."""
LONG = 40
"""Characters from which a cell may take several lines."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What the browser may do for the page: nothing that needs a network."""
UNKNOWN = "unknown"


def page(answer: Answer, model: ModelSpec, *, title: str = "", measured: Timeline | None = None) -> str:
    """The page as HTML. `title` stands above the plan's own line, by default the model and its devices; a `measured`
    step is drawn under the predicted one, on one scale.
    """
    plan = answer.plan
    heading = title or f"{model.name} on {_devices(plan)}"
    body = [
        tag("header", tag("h1", heading), tag("p", plan_title(plan), class_="hint")),
        tag("section", *_figures(answer, measured), class_="figures", aria_label="key figures"),
        _section("Tiling", tiling(plan, pass_seconds(answer.timeline))),
        _section("Step", *_steps(answer, measured)),
    ]
    if answer.memory:
        body.append(_section("Memory", memory_bars(answer)))
    body.append(_section("Devices", _device_table(plan, model)))
    if answer.alternatives:
        body.append(_section("Alternatives", _alternatives(answer)))
    if plan.left_out:
        body.append(_section("Left out", tag("ul", *(tag("li", line) for line in _left_out(plan)))))
    if plan.notes:
        body.append(_section("Notes", tag("ul", *(tag("li", note) for note in plan.notes))))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", heading),
        tag("style", _own("page.css")),
    )
    script = tag("script", _own("page.js"))
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *body), script), lang='en')}\n"


def write_page(
    run_dir: str | os.PathLike[str],
    answer: Answer,
    model: ModelSpec,
    *,
    title: str = "",
    measured: Timeline | None = None,
) -> Path:
    """Write report.html of a run folder."""
    path = Path(run_dir, FILE)
    path.write_text(page(answer, model, title=title, measured=measured), encoding="utf-8")
    return path


def _own(name: str) -> Markup:
    return Markup(files("whale_trainer.report").joinpath(name).read_text(encoding="utf-8"))


def _section(heading: str, *parts: str) -> Markup:
    return tag("section", tag("h2", heading), *parts, id=heading.lower().replace(" ", "-"))


def _devices(plan: Plan) -> str:
    kinds = [device.kind for device in plan.devices]
    if len(set(kinds)) > 4:
        return f"{len(kinds)} devices of {len(set(kinds))} kinds"
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _figures(answer: Answer, measured: Timeline | None) -> Iterator[Markup]:
    plan, timeline = answer.plan, answer.timeline
    told = plan.predicted
    step_s = told.step_s or timeline.step_s or None
    bubble = told.bubble_fraction
    if bubble is None and timeline.busy_fractions:
        bubble = timeline.bubble_fraction
    yield _figure("step", "predicted step", duration(step_s) if step_s else UNKNOWN)
    if measured is not None and measured.step_s:
        error = f"predicted {step_s / measured.step_s - 1:+.1%}" if step_s else ""
        yield _figure("measured", "measured step", duration(measured.step_s), error)
    batch = f"batch of {plan.global_batch}"
    yield _figure("samples", "samples/s", three_digits(plan.global_batch / step_s) if step_s else UNKNOWN, batch)
    yield _figure("bubble", "bubble", UNKNOWN if bubble is None else f"{bubble:.1%}", "of ranks' time")
    yield _figure("bound", "bound by", timeline.bound_by or UNKNOWN)
    for name, words, other in (
        ("even", "gain over even", told.even_step_s),
        ("whale", "gain over whale", told.whale_step_s),
        ("ideal", "part of ideal", told.ideal_step_s),
    ):
        if not step_s or not other:
            yield _figure(name, words, UNKNOWN)
            continue
        value = f"{other / step_s:.0%}" if name == "ideal" else f"{other / step_s:.2f}x"
        yield _figure(name, words, value, duration(other))
    if answer.search_s:
        yield _figure("search", "search", duration(answer.search_s))


def _figure(name: str, words: str, value: str, more: str = "") -> Markup:
    return tag(
        "div",
        tag("span", words, class_="words"),
        tag("b", value, class_="unknown" if value == UNKNOWN else "long" if len(value) > 14 else None),
        tag("span", more, class_="hint") if more else Markup(""),
        data_figure=name,
    )


def _steps(answer: Answer, measured: Timeline | None) -> Iterator[Markup]:
    timeline = answer.timeline
    if not timeline.spans:
        yield tag("p", "There is no prediction of this step.", class_="hint")
        return
    ranks = drawn_ranks(timeline)
    both = [t for t in (timeline, measured) if t is not None]
    scale_s = max([t.step_s for t in both] + [span.stop_s for t in both for span in t.spans])
    buttons = [
        tag("button", words, type="button", data_zoom=zoom, title=told)
        for words, zoom, told in (("-", 0.5, "zoom out"), ("+", 2, "zoom in"), ("whole step", 0, "show all of it"))
    ]
    hint = tag("span", "Ctrl + wheel zooms, dragging moves", class_="hint")
    yield tag("div", legend(timeline), tag("div", hint, *buttons, class_="controls"), class_="bar")
    for name, each in (("predicted", timeline), ("measured", measured)):
        if each is not None:
            if measured is not None:
                yield tag("h3", f"{name}, {duration(each.step_s)}")
            yield step_rows(each, answer.plan, ranks, scale_s=scale_s, name=name)
    words = (
        "In each row what the rank computes, below it what it sends and sums; right, the part of the step it computes."
    )
    yield tag("p", " ".join(filter(None, (words, omitted(timeline, answer.plan, ranks)))), class_="hint")


def _device_table(plan: Plan, model: ModelSpec) -> Markup:
    rows = device_rows(plan, model)
    shown = [i for i in range(len(HEADINGS)) if any(row.cells[i] for row in rows)]
    colours = kind_colours(plan)
    lines = []
    for row in rows[:MOST_ROWS]:
        cells = [
            tag(
                "td",
                *((swatch(colours[row.device.kind]),) if HEADINGS[i] == "device" else ()),
                row.cells[i],
                class_="long" if len(row.cells[i]) > LONG else None,
            )
            for i in shown
        ]
        lines.append(tag("tr", *cells, data_device=row.device.rank))
    head = tag("thead", tag("tr", *(tag("th", HEADINGS[i], scope="col") for i in shown)))
    more = f"… and {len(rows) - MOST_ROWS} more ranks" if len(rows) > MOST_ROWS else ""
    return joined(
        tag("div", tag("table", head, tag("tbody", *lines)), class_="scroll", tabindex=0),
        tag("p", more, class_="hint") if more else Markup(""),
    )


def _alternatives(answer: Answer) -> Markup:
    best = answer.plan.predicted.step_s or answer.timeline.step_s
    rows = [
        tag(
            "tr",
            tag("td", other.description),
            tag("td", duration(other.step_s)),
            tag("td", f"{other.step_s / best - 1:+.1%}" if best else UNKNOWN),
            data_alternative=i,
        )
        for i, other in enumerate(answer.alternatives)
    ]
    head = tag("thead", tag("tr", *(tag("th", words, scope="col") for words in ("plan", "step", "slower by"))))
    return tag("div", tag("table", head, tag("tbody", *rows)), class_="scroll")


def _left_out(plan: Plan) -> Iterator[str]:
    for name in dict.fromkeys(plan.left_out):
        yield f"{plan.left_out.count(name)} x {name}"
