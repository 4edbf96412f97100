"""report.html: what it draws is the plan, it is safe and small, and a browser opens it without a complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from answers import answer_of, hybrid, mixed_tiling, step_of, two_replicas, wide

from whale_trainer.planning.answer import Answer
from whale_trainer.planning.costs.cost_model import MemoryItems
from whale_trainer.planning.plan import Plan, PlannedDevice, Prediction
from whale_trainer.planning.simulation.timeline import Timeline
from whale_trainer.report.colours import ACTIVITIES, ITEMS, KINDS, ink, kind_colours
from whale_trainer.report.markup import VOID, Markup, duration, joined, ranks_in_words, tag
from whale_trainer.report.memory_bars import UNITS as MEMORY_UNITS
from whale_trainer.report.page import page, write_page
from whale_trainer.report.step_rows import MOST_SPANS, UNITS, drawn_ranks, ticks
from whale_trainer.report.table import COLOURS

PLANS = {"two replicas": two_replicas, "hybrid": hybrid, "irregular": mixed_tiling}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Element:
    """A tag with its attributes, the tags around it, and the text in it."""

    name: str
    attributes: dict[str, str]
    parents: list[Element]
    chunks: list[str]
    """Of the whole page; those of this element from `first` to `last`."""
    first: int
    last: int

    @property
    def text(self) -> str:
        return "".join(self.chunks[self.first : self.last])

    def inherited(self, key: str) -> str | None:
        """The attribute of the nearest element that has it."""
        return next((e.attributes[key] for e in [self, *self.parents[::-1]] if key in e.attributes), None)


@dataclass
class Page(HTMLParser):
    """All elements of a page; fails unless every tag is closed in its order."""

    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        place = len(self.chunks)
        known = {k: v or "" for k, v in attrs}
        self.elements.append(Element(tag, known, list(self.open), self.chunks, place, place))

    def handle_endtag(self, tag: str) -> None:
        element = self.open.pop()
        assert element.name == tag
        element.last = len(self.chunks)

    def handle_data(self, data: str) -> None:
        self.chunks.append(data)

    def having(self, attribute: str) -> list[Element]:
        return [e for e in self.elements if attribute in e.attributes]


def read(text: str) -> Page:
    parsed = Page()
    parsed.feed(text)
    parsed.close()
    assert not parsed.open
    return parsed


def page_of(plan: Plan) -> tuple[Answer, Page]:
    answer, model = answer_of(plan)
    return answer, read(page(answer, model))


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_the_areas_of_the_tiles_are_layers_times_samples(make: Callable[[], Plan]) -> None:
    answer, found = page_of(make())
    plan = answer.plan
    (drawing,) = [e for e in found.having("data-layers") if e.name == "svg"]
    assert drawing.attributes["viewbox"] == f"0 0 {plan.num_layers} {plan.micro_batch_size}"
    drawn = found.having("data-tile")
    assert len(drawn) == len(plan.tiles)
    for element, tile in zip(drawn, plan.tiles, strict=True):
        a = element.attributes
        assert element.parents[-1] is drawing
        assert (float(a["x"]), float(a["width"])) == (tile.layers.start, len(tile.layers))
        assert (float(a["y"]), float(a["height"])) == (tile.samples.start, len(tile.samples))
        assert a["data-layers"] == f"{tile.layers.start}-{tile.layers.stop}"
        assert a["data-samples"] == f"{tile.samples.start}-{tile.samples.stop}"
    area = sum(float(e.attributes["width"]) * float(e.attributes["height"]) for e in drawn)
    assert area == plan.num_layers * plan.micro_batch_size


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_the_shards_of_a_tile_divide_it_by_weight(make: Callable[[], Plan]) -> None:
    answer, found = page_of(make())
    for index, tile in enumerate(answer.plan.tiles):
        shards = [e for e in found.having("data-shard") if e.attributes["data-shard"] == str(index)]
        assert len(shards) == (len(tile.shards) if len(tile.shards) > 1 else 0)
        for element, shard in zip(shards, tile.shards, strict=False):
            part = float(element.attributes["height"]) / len(tile.samples)
            assert part == pytest.approx(shard.weight / sum(tile.weights), abs=1e-6)
            assert element.attributes["data-rank"] == str(shard.rank)


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_a_colour_for_each_kind(make: Callable[[], Plan]) -> None:
    answer, found = page_of(make())
    plan = answer.plan
    colours = kind_colours(plan)
    assert len(set(colours.values())) == len(colours)
    for element in found.having("data-shard"):
        kind = plan.devices[int(element.attributes["data-rank"])].kind
        assert (element.attributes["data-kind"], element.attributes["fill"]) == (kind, colours[kind])
    for element, tile in zip(found.having("data-tile"), plan.tiles, strict=True):
        kinds = list(dict.fromkeys(plan.devices[r].kind for r in tile.ranks))
        assert (element.attributes["data-kind"], element.attributes["fill"]) == (", ".join(kinds), colours[kinds[0]])
    entries = {e.attributes["data-legend"]: e.text for e in found.having("data-legend")}
    assert entries == {k: f"{[d.kind for d in plan.devices].count(k)} x {k}" for k in colours}


def test_kinds_have_the_hues_of_the_table_and_more_than_six_differ() -> None:
    assert len(KINDS) == len(COLOURS)
    devices = tuple(PlannedDevice(i, f"kind{i}", "node", 1 << 30) for i in range(13))
    colours = list(kind_colours(replace(two_replicas(), devices=devices)).values())
    assert colours[:6] == list(KINDS)
    assert len(set(colours)) == 13


def test_text_stands_out_on_every_colour() -> None:
    assert [ink(c) for c in ("#ffffff", "#000000")] == ["#000", "#fff"]
    assert [ink(c) for c in KINDS] == ["#000"] * 4 + ["#fff", "#000"]
    assert len(set(ITEMS)) == len(ITEMS) >= len(fields(MemoryItems))
    assert len(set(ACTIVITIES.values())) == len(ACTIVITIES)


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_the_step_has_every_span_of_every_rank(make: Callable[[], Plan]) -> None:
    answer, found = page_of(make())
    timeline = answer.timeline
    bars = found.having("data-start-s")
    drawn = Counter((e.inherited("data-rank"), e.inherited("data-activity"), e.attributes["data-label"]) for e in bars)
    assert drawn == Counter((str(s.rank), s.activity.value, s.label) for s in timeline.spans)
    scale = UNITS / timeline.step_s
    for element in bars:
        a = element.attributes
        start, stop = float(a["data-start-s"]), float(a["data-stop-s"])
        assert float(a["x"]) == pytest.approx(start * scale, abs=1e-3)
        assert float(a["width"]) == pytest.approx((stop - start) * scale, abs=1e-3)
    moved = sum(int(e.attributes["data-bytes"]) for e in bars if "data-bytes" in e.attributes)
    assert moved == sum(s.num_bytes for s in timeline.spans)
    busy = [e.text for e in found.having("data-busy")]
    assert busy == [f"{b:.0%}" for b in timeline.busy_fractions]


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_memory_bars_against_what_the_device_has(make: Callable[[], Plan]) -> None:
    answer, found = page_of(make())
    rows = found.having("data-memory")
    assert [int(e.attributes["data-memory"]) for e in rows] == list(range(answer.plan.num_ranks))
    scale = max(d.memory_bytes for d in answer.plan.devices)
    for rank, row in enumerate(rows):
        a, items = row.attributes, answer.memory[rank]
        assert int(a["data-planned"]) == items.total
        assert int(a["data-usable"]) == answer.usable_bytes[rank]
        assert int(a["data-capacity"]) == answer.plan.devices[rank].memory_bytes
        bars = [e for e in found.having("data-item") if row in e.parents]
        told = {e.attributes["data-item"]: int(e.attributes["data-bytes"]) for e in bars}
        assert told == {f.name: getattr(items, f.name) for f in fields(items) if getattr(items, f.name) > 0}
        end = 0.0
        for bar in bars:
            assert float(bar.attributes["x"]) == pytest.approx(end, abs=1e-4)
            end += float(bar.attributes["width"])
        assert end == pytest.approx(MEMORY_UNITS * items.total / scale, abs=1e-4)
        lines = {
            e.attributes["class"]: float(e.attributes["x1"])
            for e in found.elements
            if row in e.parents and e.name == "line"
        }
        assert lines["usable"] == pytest.approx(MEMORY_UNITS * answer.usable_bytes[rank] / scale, abs=1e-4)
        assert lines["capacity"] == pytest.approx(MEMORY_UNITS * int(a["data-capacity"]) / scale, abs=1e-4)
        assert f"{items.total / answer.usable_bytes[rank]:.0%}" in row.text


def test_a_rank_that_is_too_full_is_marked() -> None:
    answer, model = answer_of(two_replicas())
    full = replace(answer.memory[1], activations=20 << 30)
    found = read(page(replace(answer, memory=(answer.memory[0], full)), model))
    assert [e.text.split("%")[0] for e in found.elements if e.attributes.get("class") == "of over"] == ["135"]


def test_key_figures() -> None:
    answer, found = page_of(two_replicas())
    step_s = answer.timeline.step_s
    texts = {e.attributes["data-figure"]: e.text for e in found.having("data-figure")}
    assert texts["step"] == f"predicted step{duration(step_s)}"
    assert texts["samples"].startswith(f"samples/s{64 / step_s:.0f}")
    assert texts["bubble"].startswith(f"bubble{answer.timeline.bubble_fraction:.1%}")
    assert texts["bound"] == "bound bythe backward pass of rank 0"
    assert [texts[k].split("x")[0][-4:] for k in ("even", "whale")] == ["1.31", "1.07"]
    assert "86%" in texts["ideal"]
    assert [e.text.endswith("+2.1%") for e in found.having("data-alternative")] == [True]


def test_figures_that_are_not_known_say_so() -> None:
    answer, model = answer_of(two_replicas())
    plan = replace(answer.plan, predicted=Prediction())
    bare = Answer(plan, Timeline(0.0, (), ()), (), ())
    found = read(page(bare, model))
    texts = {e.attributes["data-figure"]: e.text for e in found.having("data-figure")}
    assert all("unknown" in texts[name] for name in ("step", "samples", "bubble", "bound", "even", "whale", "ideal"))
    assert "search" not in texts
    assert not found.having("data-memory")
    assert any("no prediction of this step" in e.text for e in found.elements)


def test_the_page_of_the_rest() -> None:
    answer, model = answer_of(two_replicas())
    plan = replace(answer.plan, left_out=("T4 on b", "T4 on b", "T4 on c"), notes=("rank 1 waits",))
    found = read(page(replace(answer, plan=plan), model, title="first trial"))
    assert [e.text for e in found.elements if e.name == "h1"] == ["first trial"]
    headings = [e.text for e in found.elements if e.name == "h2"]
    assert headings == ["Tiling", "Step", "Memory", "Devices", "Alternatives", "Left out", "Notes"]
    assert [e.text for e in found.elements if e.name == "li"][-3:] == ["2 x T4 on b", "1 x T4 on c", "rank 1 waits"]
    rows = [e.text for e in found.having("data-device")]
    assert len(rows) == 2
    assert "P100-PCIE-16GB" in rows[1]


def test_a_measured_step_is_drawn_beside_the_predicted_one_on_one_scale() -> None:
    answer, model = answer_of(two_replicas())
    spans = tuple(replace(s, start_s=2 * s.start_s, stop_s=2 * s.stop_s) for s in answer.timeline.spans)
    measured = replace(answer.timeline, step_s=2 * answer.timeline.step_s, spans=spans)
    found = read(page(answer, model, measured=measured))
    assert [e.attributes["data-step"] for e in found.having("data-step")] == ["predicted", "measured"]
    assert len({e.attributes["data-scale-s"] for e in found.having("data-scale-s")}) == 1
    assert len(found.having("data-start-s")) == 2 * len(spans)
    (text,) = [e.text for e in found.having("data-figure") if e.attributes["data-figure"] == "measured"]
    assert text.endswith("predicted -50.0%")


def test_names_cannot_become_markup() -> None:
    answer, model = answer_of(two_replicas())
    evil = '</script><b onload="alert(1)">'
    plan = replace(
        answer.plan,
        devices=tuple(replace(d, kind=f"{evil}{d.rank}", node=f"'{evil}") for d in answer.plan.devices),
        layer_names=tuple(f"{evil}{i}" for i in range(8)),
        left_out=(evil,),
        notes=(evil,),
    )
    layers = tuple(replace(layer, name=name) for layer, name in zip(model.layers, plan.layer_names, strict=True))
    spans = tuple(replace(s, label=evil) for s in answer.timeline.spans)
    timeline = replace(answer.timeline, spans=spans, bound_by=evil)
    others = tuple(replace(a, description=evil) for a in answer.alternatives)
    text = page(
        replace(answer, plan=plan, timeline=timeline, alternatives=others),
        replace(model, name=evil, layers=layers),
        measured=timeline,
    )
    found = read(text)
    assert text.count("</script>") == 1
    assert "<b onload" not in text
    assert not [e for e in found.elements if any(k.startswith("on") for k in e.attributes)]
    assert sum(evil in e.text for e in found.elements if e.name in ("li", "td", "h1", "title")) > 8


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_nothing_comes_from_elsewhere_and_the_page_is_small(make: Callable[[], Plan]) -> None:
    answer, model = answer_of(make())
    text = page(answer, model)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<img|<iframe", text)
    assert len(text.encode()) < 100_000
    found = read(text)
    assert {e.attributes["href"] for e in found.having("href")} == {"data:,"}
    assert not found.having("src")
    ids = [e.attributes["id"] for e in found.having("id")]
    assert len(ids) == len(set(ids))


def test_a_large_plan_gives_a_page_that_says_what_it_leaves_out() -> None:
    answer, model = answer_of(wide(64, 8, 32))
    text = page(answer, model)
    assert len(text.encode()) < 3_000_000
    found = read(text)
    assert len(found.having("data-tile")) == 512
    assert 0 < len(found.having("data-start-s")) <= MOST_SPANS
    assert len(found.having("data-device")) == 512
    assert "16 of 512 ranks are drawn; the other 496 do the same as one of these." in text
    assert [int(e.attributes["data-memory"]) for e in found.having("data-memory")] == [0, 256]
    assert "2 of 512 ranks are drawn, each other holds the same as one of these." in text


def test_alike_ranks_stand_for_each_other() -> None:
    timeline = step_of(wide(18, 4, 2))
    ranks = drawn_ranks(timeline)
    by_rank = {r: tuple((s.activity, s.start_s) for s in timeline.spans if s.rank == r) for r in range(72)}
    assert len(ranks) == len({by_rank[r] for r in ranks}) == len(set(by_rank.values())) == 8
    long = replace(timeline, spans=tuple(s for s in timeline.spans for _ in range(300)))
    fewer = drawn_ranks(long)
    assert 1 <= len(fewer) < 8
    assert sum(s.rank in fewer for s in long.spans) <= MOST_SPANS
    answer, model = answer_of(wide(18, 4, 2))
    text = page(replace(answer, timeline=long), model)
    assert f"{len(fewer)} of 72 ranks are drawn; the other {72 - len(fewer)} are left out." in text


def test_of_a_very_long_step_the_beginning_is_drawn() -> None:
    answer, model = answer_of(two_replicas())
    long = replace(answer.timeline, spans=tuple(s for s in answer.timeline.spans for _ in range(1500)))
    text = page(replace(answer, timeline=long), model)
    assert len(read(text).having("data-start-s")) == MOST_SPANS
    assert "Of rank 0 the first 12000 of 15000 spans are drawn." in text


def test_the_fullest_of_many_different_ranks_have_a_bar() -> None:
    answer, model = answer_of(wide(32, 4, 2))
    memory = tuple(replace(m, bucket_buffers=rank << 20) for rank, m in enumerate(answer.memory))
    found = read(page(replace(answer, memory=memory), model))
    parts = {r: memory[r].total / answer.usable_bytes[r] for r in range(128)}
    shown = [int(e.attributes["data-memory"]) for e in found.having("data-memory")]
    assert shown == sorted(sorted(parts, key=lambda r: -parts[r])[:64])


def test_words_and_numbers() -> None:
    assert [duration(s) for s in (12.345, 1.0, 0.99999, 0.0123, 4.56e-5, 2e-8, 0)] == [
        "12.3 s", "1 s", "1 s", "12.3 ms", "45.6 µs", "0.02 µs", "0 µs",
    ]  # fmt: skip
    assert [ranks_in_words(r) for r in ((3,), (0, 1), (0, 1, 2, 5), (1, 3))] == ["3", "0, 1", "0-2, 5", "1, 3"]
    assert ticks(0.114)[:3] == pytest.approx([0, 0.02, 0.04])
    assert ticks(8)[-1] == 8
    assert ticks(0) == [0]
    assert tag("p", "a<b", Markup("<br>"), data_x='"', hidden=None) == '<p data-x="&quot;">a&lt;b<br></p>'
    assert joined("&", Markup("&amp;")) == "&amp;&amp;"
    assert tag("rect", x=1.5, name="n") == '<rect x="1.5" name="n"/>'


def test_write_page(tmp_path: Path) -> None:
    answer, model = answer_of(two_replicas())
    path = write_page(tmp_path, answer, model)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == page(answer, model)


CHECKS = """<script>
document.querySelector("[data-zoom='2']").click();
{
  const root = document.documentElement;
  root.dataset.toldViewbox = document.querySelector(".step svg").getAttribute("viewBox");
  const point = (selector) => {
    const box = document.querySelector(selector).getBoundingClientRect();
    const at = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
    document.querySelector(selector).dispatchEvent(new PointerEvent("pointermove", at));
    return document.querySelector("#tip").textContent;
  };
  root.dataset.toldTile = point("[data-tile='0']");
  root.dataset.toldSpan = point("[data-label='1F0']");
  root.dataset.toldTravel = point("[data-activity='transfer'] rect");
  const size = document.querySelector("[data-tile='0']").getBoundingClientRect();
  root.dataset.toldArea = size.width * size.height;
  const all = document.querySelector("[data-tile]").parentNode.getBoundingClientRect();
  root.dataset.toldWhole = all.width * all.height;
}
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome")
def test_a_browser_opens_the_page_without_errors(tmp_path: Path) -> None:
    assert BROWSER is not None
    answer, model = answer_of(hybrid())
    path = write_page(tmp_path, answer, model)
    path.write_text(path.read_text().replace("</body>", CHECKS))
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --virtual-time-budget=3000"
    command = [
        BROWSER, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0",
        "--window-size=1200,1600", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in done.stderr
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root is not None
    told = read(root[0] + "</html>").elements[0].attributes
    assert told["data-ready"] == "true"
    assert "data-errors" not in told
    assert told["data-told-viewbox"].startswith("250 0 500 ")
    assert told["data-told-tile"].splitlines()[:2] == ["tile 0", "9 layers: 0-9, embed … blocks.7"]
    assert told["data-told-span"].splitlines()[:2] == ["1F0: forward of tile 1, micro-batch 0", "rank 2"]
    assert told["data-told-travel"].splitlines()[0] == "0F0 to rank 2"
    assert "3 MiB, " in told["data-told-travel"]
    part = float(told["data-told-area"]) / float(told["data-told-whole"])
    assert part == pytest.approx(9 * 9 / (14 * 16), rel=0.02)
    assert done.stdout.count('class="tile') == len(answer.plan.tiles)
