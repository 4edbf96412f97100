"use strict";
(() => {
  const root = document.documentElement;
  addEventListener("error", (event) => {
    root.dataset.errors = `${root.dataset.errors ?? ""}${event.message}\n`;
  });

  // ---- words ----

  const UNITS = [["s", 1], ["ms", 1e3], ["µs", 1e6]];
  const unitOf = (seconds) => UNITS.find(([, factor]) => seconds * factor >= 0.9995) ?? UNITS[2];

  function duration(seconds) {
    const [unit, factor] = unitOf(seconds);
    const value = seconds * factor;
    const decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : value >= 0.9995 ? 2 : 3;
    return `${Number(value.toFixed(decimals))} ${unit}`;
  }

  function bytes(value) {
    let unit = "B";
    for (const larger of ["KiB", "MiB", "GiB"]) {
      if (value >= 1024) [value, unit] = [value / 1024, larger];
    }
    return `${Number(value.toFixed(1))} ${unit}`;
  }

  function spanWords(bar) {
    const { label, startS, stopS, bytes: moved } = bar.dataset;
    const activity = bar.parentNode.dataset.activity;
    const action = /^(\d+)[FB](\d+)$/.exec(label);
    const what = action ? `${label}: ${activity} of tile ${action[1]}, micro-batch ${action[2]}` : label;
    const lines = [what];
    if (!action && label !== activity) lines.push(activity);
    lines.push(`rank ${bar.closest("[data-rank]").dataset.rank}`);
    lines.push(`starts at ${duration(+startS)}, takes ${duration(stopS - startS)}`);
    if (moved) lines.push(`${bytes(+moved)}, ${bytes(moved / Math.max(stopS - startS, 1e-12))}/s`);
    return lines.join("\n");
  }

  // ---- what is under the pointer ----

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function hover(event) {
    const held = event.target.closest?.("[data-tip], [data-start-s]");
    tip.hidden = !held;
    if (!held) return;
    tip.textContent = held.dataset.tip ?? spanWords(held);
    const { width, height } = tip.getBoundingClientRect();
    const right = event.clientX + 14 + width > innerWidth;
    const low = event.clientY + 16 + height > innerHeight;
    const x = right ? Math.max(4, event.clientX - 10 - width) : event.clientX + 14;
    tip.style.transform = `translate(${x}px, ${low ? Math.max(4, event.clientY - 10 - height) : event.clientY + 16}px)`;
  }
  addEventListener("pointermove", hover);
  addEventListener("pointerdown", hover);
  document.addEventListener("pointerleave", () => { tip.hidden = true; });
  addEventListener("scroll", () => { tip.hidden = true; }, true);

  // ---- labels of the tiling: the longest form that fits ----

  const FORMS = ["", "short", "tiny"];
  const fits = (label) => label.scrollWidth <= label.clientWidth && label.scrollHeight <= label.clientHeight;

  function shorten(labels) {
    // all are measured before any is changed, so that each form lays the page out once
    let open = labels;
    for (const label of labels) label.classList.remove("short", "tiny", "none");
    for (const form of FORMS) {
      if (form) for (const label of open) label.classList.add(form);
      open = open.filter((label) => !fits(label));
    }
    for (const label of open) label.classList.add("none");
  }

  function fitLabels() {
    const groups = [...document.querySelectorAll(".labels [data-label]")];
    for (const group of groups) group.classList.remove("whole-only");
    shorten([...document.querySelectorAll(".label:not(.whole)")]);
    const crowded = groups.filter((group) => group.children.length === 1 || group.querySelector(".label:not(.whole).none"));
    for (const group of crowded) group.classList.add("whole-only");
    shorten(crowded.map((group) => group.querySelector(".whole")));
    for (const axis of document.querySelectorAll(".axis")) thin([...axis.children], axis.classList.contains("x"));
  }

  function thin(marks, sideways) {
    if (!marks.length) return;
    for (const mark of marks) mark.style.visibility = "";
    const boxes = marks.map((mark) => mark.getBoundingClientRect());
    const [start, stop] = sideways ? ["left", "right"] : ["top", "bottom"];
    const room = sideways ? 4 : 0;
    const end = boxes.at(-1)[start];
    let reached = -Infinity;
    marks.slice(0, -1).forEach((mark, i) => {
      if (boxes[i][start] < reached + room || boxes[i][stop] + room > end) mark.style.visibility = "hidden";
      else reached = boxes[i][stop];
    });
  }

  // ---- the step: ticks, labels of the bars, zoom ----

  const WHOLE = 1000;
  const CHARACTER = 6.3;
  const steps = [...document.querySelectorAll(".step")].map((element) => ({
    element,
    plot: element.querySelector(".plot"),
    svg: element.querySelector("svg"),
    canvas: element.querySelector("canvas"),
    ticks: element.querySelector(".ticks"),
    scale: +element.dataset.scaleS,
    height: parseInt(element.style.getPropertyValue("--height")),
    compute: parseInt(element.style.getPropertyValue("--compute")),
    ...barsOf(element),
  }));
  let view = [0, WHOLE];

  function barsOf(element) {
    const bars = [];
    for (const bar of element.querySelectorAll('[data-activity="forward"] rect, [data-activity^="backward"] rect')) {
      const group = bar.parentNode;
      const top = group.parentNode.transform.baseVal[0].matrix.f;
      const [x, width] = [bar.x.baseVal.value, bar.width.baseVal.value];
      bars.push({ x, width, top, label: bar.dataset.label, ink: group.dataset.ink });
    }
    const widths = bars.map((bar) => bar.width).sort((a, b) => a - b);
    const longest = Math.max(0, ...bars.map((bar) => bar.label.length));
    return { bars, longest, middle: widths[widths.length >> 1] ?? 0 };
  }

  function draw() {
    for (const step of steps) {
      step.svg.setAttribute("viewBox", `${view[0]} 0 ${view[1] - view[0]} ${step.height}`);
      const width = step.plot.clientWidth;
      step.element.classList.toggle("apart", (step.middle * width) / (view[1] - view[0]) > 5);
      drawTicks(step, width);
      drawLabels(step, width);
    }
  }

  function drawTicks(step, width) {
    const [from, to] = view.map((x) => (x / WHOLE) * step.scale);
    if (!(to > from)) return;
    const rough = (to - from) / Math.max(2, Math.floor(width / 95));
    const power = 10 ** Math.floor(Math.log10(rough));
    const apart = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= rough * 0.999);
    const [unit, factor] = unitOf(to);
    const decimals = Math.max(0, -Math.floor(Math.log10(apart * factor) + 1e-9));
    const marks = [];
    for (let i = Math.ceil(from / apart - 1e-6); i * apart <= to * (1 + 1e-9); i++) {
      const mark = document.createElement("span");
      const share = (i * apart - from) / (to - from);
      mark.textContent = i ? `${(i * apart * factor).toFixed(decimals)} ${unit}` : "0";
      mark.style.left = `${100 * share}%`;
      if (share * width > width - 8 * CHARACTER) mark.textContent = "";
      marks.push(mark);
    }
    step.ticks.replaceChildren(...marks);
  }

  function drawLabels(step, width) {
    const { canvas, height, compute, longest } = step;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    const size = Math.min(11.5, compute);
    pen.scale(ratio, ratio);
    pen.font = `${size}px system-ui, "DejaVu Sans", sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const scale = width / (view[1] - view[0]);
    const character = CHARACTER * (size / 11.5);
    // in low rows all bars are labelled, or none: some would only be noise
    if (compute < 16 && step.middle * scale < (longest - 1) * character + 6) return;
    for (const bar of step.bars) {
      const left = Math.max(0, (bar.x - view[0]) * scale);
      const right = Math.min(width, (bar.x + bar.width - view[0]) * scale);
      const forms = [bar.label, bar.label.replace(/^\d+/, "")]; // the tile may go without saying
      const label = forms.find((form) => form.length * character + 6 <= right - left);
      if (!label) continue;
      pen.fillStyle = bar.ink;
      pen.fillText(label, (left + right) / 2, bar.top + compute / 2 + 0.5);
    }
  }

  function show(from, to) {
    const length = Math.min(WHOLE, Math.max(WHOLE / 5000, to - from));
    const start = Math.min(WHOLE - length, Math.max(0, from));
    view = [start, start + length];
    draw();
  }

  function zoom(factor, share = 0.5) {
    const length = view[1] - view[0];
    const at = view[0] + share * length;
    const now = Math.min(WHOLE, length / factor);
    show(at - share * now, at + (1 - share) * now);
  }

  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => (+button.dataset.zoom ? zoom(+button.dataset.zoom) : show(0, WHOLE)));
  }
  for (const { plot } of steps) {
    const touching = new Map();
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = plot.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 300), (event.clientX - box.left) / box.width);
    }, { passive: false });
    plot.addEventListener("pointerdown", (event) => touching.set(event.pointerId, event.clientX));
    plot.addEventListener("pointermove", (event) => {
      if (!touching.has(event.pointerId)) return;
      const before = [...touching.values()];
      touching.set(event.pointerId, event.clientX);
      const after = [...touching.values()];
      const box = plot.getBoundingClientRect();
      if (after.length === 1 && view[1] - view[0] < WHOLE) {
        plot.setPointerCapture(event.pointerId);
        const moved = ((before[0] - after[0]) / box.width) * (view[1] - view[0]);
        show(view[0] + moved, view[1] + moved);
      } else if (after.length === 2) {
        const middle = (after[0] + after[1]) / 2;
        const spread = Math.abs(after[0] - after[1]) / Math.max(1, Math.abs(before[0] - before[1]));
        zoom(spread, (middle - box.left) / box.width);
      }
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      plot.addEventListener(end, (event) => touching.delete(event.pointerId));
    }
  }

  function layOut() {
    fitLabels();
    draw();
  }
  new ResizeObserver(layOut).observe(document.querySelector("main"));
  layOut();
  root.dataset.ready = "true";
})();
