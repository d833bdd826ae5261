// Goodput over time, and below it the setting that was chosen, a lane for each.

import { draw, kindOf, make, measure, nameOf, number } from "./elements.js";

const LEFT = 76, RIGHT = 10, TOP = 12, PLOT = 190, LANE = 15, GAP = 8, BOTTOM = 34;
const STEPS_S = [5, 10, 20, 30, 60, 120, 300];
const TICK_PX = 64;
const SPAN_S = 0.5; // for which the server sums up its steps
const PAUSE_S = 1.5; // between two spans, from which on a line is broken

const SERIES = [ // the last lies on top
  { field: "plain_goodput", name: "predicted of plain decoding", title: "predicted goodput of plain decoding", line: "plain-line" },
  { field: "goodput", name: "realised", title: "realised goodput", line: "realised" },
  { field: "predicted_goodput", name: "predicted", title: "predicted goodput", line: "predicted" },
];

/** Fills the legend of the lines. */
export function showLegend(list) {
  list.append(...SERIES.toReversed().map(({ title, line }) => {
    const sample = draw("path", { d: "M1 6h26", class: `line ${line}` });
    const picture = draw("svg", { width: 28, height: 12, "aria-hidden": "true" }, sample);
    return make("li", {}, picture, title);
  }));
}

/** The chart inside an element; arrow keys and the pointer move its cursor. */
export class Chart {
  constructor(root) {
    this.root = root;
    this.report = { history: [], settings: [], now: 0 };
    this.seconds = 120;
    this.cursor = null; // the time of the span that it is at
    this.picture = draw("svg", { "aria-hidden": "true" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.picker = make("div", {
      class: "picker", role: "slider", tabindex: 0,
      "aria-label": "Time in the chart; arrow keys move it",
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "no steps yet",
    }, this.picture);
    root.append(this.picker, this.tip);
    this.#listen();
  }

  #listen() {
    const point = (event) => this.#moveTo(event.clientX - this.picture.getBoundingClientRect().left);
    this.picker.addEventListener("pointermove", point);
    this.picker.addEventListener("pointerdown", point);
    this.picker.addEventListener("pointerleave", () => this.#place(null));
    this.picker.addEventListener("blur", () => this.#place(null));
    this.picker.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.#draw()).observe(this.root);
  }

  /** Shows a report of the server, and this many seconds of it. */
  show(report, seconds) {
    this.report = report;
    this.seconds = seconds;
    this.#draw();
  }

  #draw() {
    this.width = Math.max(this.root.clientWidth, 240);
    this.start = this.report.now - this.seconds;
    const start = this.start - SPAN_S;
    this.spans = this.report.history.filter((span) => span.time > start);
    this.lanes = this.report.settings;
    this.floor = TOP + PLOT;
    this.height = this.floor + GAP + this.lanes.length * LANE + BOTTOM;
    this.most = ceiling(this.spans.flatMap((span) => SERIES.map(({ field }) => span[field] ?? 0)));
    this.picture.setAttribute("width", this.width);
    this.picture.setAttribute("height", this.height);
    this.picture.replaceChildren(
      ...this.#rules(), ...this.#times(), ...this.#bands(), ...this.#lines(), this.#cursorLine(),
    );
    this.#describe();
  }

  #x(time) {
    const share = (time - this.start) / this.seconds;
    return LEFT + Math.min(Math.max(share, 0), 1) * (this.width - LEFT - RIGHT);
  }

  #y(goodput) {
    return this.floor - (goodput / this.most) * PLOT;
  }

  #rules() {
    const shares = [0, 0.25, 0.5, 0.75, 1];
    const unit = draw("text", { x: 2, y: TOP + 4, class: "axis" }, "tokens/s");
    return [unit, ...shares.flatMap((share) => {
      const y = this.#y(share * this.most);
      const line = draw("path", { d: `M${LEFT} ${y}H${this.width - RIGHT}`, class: "rule" });
      if (share === 1) return [line, label(LEFT - 6, y + 16, number(this.most))];
      return [line, label(LEFT - 6, y + 4, number(share * this.most))];
    })];
  }

  #times() {
    const room = this.width - LEFT - RIGHT;
    const step = STEPS_S.find((each) => (each / this.seconds) * room >= TICK_PX) ?? this.seconds;
    const ticks = [];
    for (let ago = 0; ago <= this.seconds; ago += step) {
      const x = this.#x(this.report.now - ago), end = this.height - BOTTOM;
      ticks.push(draw("path", { d: `M${x} ${TOP}V${end + 4}`, class: "rule" }));
      ticks.push(label(x + (ago === 0 ? 4 : 12), end + 16, ago === 0 ? "now" : `−${ago} s`));
    }
    const name = draw("text", { x: LEFT, y: this.height - 4, class: "axis" }, "time before now");
    return [...ticks, name];
  }

  #bands() {
    const names = this.lanes.map((setting, lane) => {
      const y = this.floor + GAP + lane * LANE;
      return label(LEFT - 6, y + LANE - 4, nameOf(setting));
    });
    return [...names, ...this.spans.map((span, at) => {
      const x = this.#x(span.time), end = this.#x(this.#endOf(at));
      return draw("rect", {
        x, y: this.floor + GAP + this.lanes.indexOf(span.setting) * LANE + 1,
        width: Math.max(end - x, 1), height: LANE - 2, class: `of-${kindOf(span.setting)}`,
      });
    })];
  }

  /** When a span's steps ended: not later than the next one's began. */
  #endOf(at) {
    const span = this.spans[at], next = this.spans[at + 1];
    const end = span.time + Math.max(SPAN_S, span.seconds);
    return next && (next.time < end || next.time - end < SPAN_S / 2) ? next.time : end;
  }

  #lines() {
    return SERIES.map(({ field, line }) => {
      let path = "", last = -Infinity;
      for (const span of this.spans) {
        if (!Number.isFinite(span[field])) continue;
        const point = `${this.#x(span.time + SPAN_S / 2).toFixed(1)} ${this.#y(span[field]).toFixed(1)}`;
        path += span.time - last > PAUSE_S ? `M${point}h0.01` : `L${point}`;
        last = span.time;
      }
      return draw("path", { d: path, class: `line ${line}` });
    });
  }

  #moveTo(x) {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    const time = this.start + share * this.seconds - SPAN_S / 2;
    const far = (span) => Math.abs(span.time - time);
    const near = this.spans.reduce((best, span) => (best && far(best) <= far(span) ? best : span), null);
    this.#place(near && near.time);
  }

  #press(event) {
    if (event.key === "Escape") return this.#place(null);
    const last = this.spans.length - 1, at = this.#indexOf(this.cursor);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (!(event.key in moves) || last < 0) return undefined;
    event.preventDefault();
    const to = Math.min(Math.max(moves[event.key], 0), last);
    return this.#place(this.spans[to].time);
  }

  /** The place of a time's span; behind the last where there is none. */
  #indexOf(time) {
    const at = this.spans.findIndex((span) => span.time === time);
    return at < 0 ? this.spans.length : at;
  }

  #place(time) {
    this.cursor = time;
    this.#draw();
  }

  #cursorLine() {
    const span = this.spans[this.#indexOf(this.cursor)];
    this.tip.hidden = !span;
    if (!span) return draw("g");
    const x = this.#x(span.time + SPAN_S / 2);
    this.tip.replaceChildren(...factsOf(span, this.report.now));
    const right = x > this.width / 2;
    this.tip.style.left = right ? "" : `${x + 12}px`;
    this.tip.style.right = right ? `${this.root.clientWidth - x + 12}px` : "";
    return draw("path", { d: `M${x} ${TOP}V${this.height - BOTTOM}`, class: "cursor" });
  }

  /** Says where the cursor is; without one that is the last span. */
  #describe() {
    const last = this.spans.length - 1, at = Math.min(this.#indexOf(this.cursor), last);
    const span = this.spans[at];
    this.picker.setAttribute("aria-valuemax", Math.max(last, 0));
    this.picker.setAttribute("aria-valuenow", Math.max(at, 0));
    this.picker.setAttribute("aria-valuetext", span ? sentence(span, this.report.now) : "no steps");
  }
}

function label(x, y, text) {
  return draw("text", { x, y, class: "axis", "text-anchor": "end" }, text);
}

/** The least of 1, 2 or 5 times a power of ten that is not below any value. */
function ceiling(values) {
  const most = Math.max(1, ...values), power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= most);
}

function ago(span, now) {
  return `${number(Math.max(now - span.time, 0))} s ago`;
}

function sentence(span, now) {
  const lines = SERIES.toReversed().map(({ field, name }) => `${name} ${measure(span[field], "tokens/s")}`);
  return `${ago(span, now)}: ${nameOf(span.setting)}, ${lines.join(", ")}`;
}

function factsOf(span, now) {
  const facts = [
    ["setting", nameOf(span.setting)],
    ...SERIES.toReversed().map(({ field, name }) => [name, measure(span[field], "tokens/s")]),
    ["rows", number(span.rows)],
    ["columns of a step", number(span.width)],
    ["drafted per step", measure(span.nodes, "tokens")],
    ["emitted", measure(span.tokens, "tokens")],
  ];
  const title = make("p", {}, ago(span, now));
  const list = make("dl", {}, ...facts.flatMap(([name, value]) => [
    make("dt", {}, name), make("dd", {}, value),
  ]));
  return [title, list];
}
