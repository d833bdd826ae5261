// What the controller believes, as tables that are filled while they are open.

import { make, measure, milliseconds, number, percent } from "./elements.js";

const PARTS = [
  { title: "Predicted, by setting", part: predicted },
  { title: "Costs of a step, by program", part: costs },
  { title: "Survival by depth", part: survival },
  { title: "Calibration of a tree’s chances", part: calibration },
  { title: "Guard, shares of time, latency targets", part: others },
];

/** The tables inside an element. */
export class Tables {
  constructor(root) {
    this.report = null;
    this.all = PARTS.map(({ title, part }) => {
      const body = make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": title });
      const details = make("details", {}, make("summary", {}, title), body);
      details.addEventListener("toggle", () => this.#fill());
      root.append(details);
      return { details, body, part };
    });
  }

  /** Shows a report of the server. */
  show(report) {
    this.report = report;
    this.#fill();
  }

  #fill() {
    if (!this.report) return;
    for (const { details, body, part } of this.all) {
      if (details.open) body.replaceChildren(part(this.report));
    }
  }
}

function table(heads, rows) {
  if (!rows.length) return make("p", { class: "note" }, "Nothing yet.");
  const head = make("tr", {}, ...heads.map((each) => make("th", { scope: "col" }, each)));
  const body = rows.map(([first, ...rest]) => make("tr", {},
    make("th", { scope: "row" }, first), ...rest.map((each) => make("td", {}, each))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

function predicted({ predicted: found = {}, settings }) {
  const rows = settings.filter((name) => name in found).map((name) => {
    const { tokens, seconds, goodput } = found[name];
    return [name, number(tokens), milliseconds(seconds), measure(goodput, "tokens/s")];
  });
  return table(["setting", "tokens per step", "a step", "goodput"], rows);
}

function costs({ costs: found = [] }) {
  const rows = found.map((cost) => [
    cost.setting, number(cost.rows), number(cost.width), milliseconds(cost.seconds),
    measure(cost.seconds_per_cached_token * 1e6, "µs"), milliseconds(cost.measured_seconds),
    number(cost.steps),
  ]);
  const heads = [
    "setting", "rows", "columns", "a step", "per cached token", "as measured at the start", "steps run",
  ];
  return table(heads, rows);
}

function survival({ acceptance = [] }) {
  const deepest = Math.max(0, ...acceptance.map((each) => each.survival.length));
  const depths = Array.from({ length: deepest }, (_, depth) => depth);
  const rows = acceptance.map(({ method, temperature, steps, survival: found }) => [
    method, temperature, number(steps), ...depths.map((depth) => percent(found[depth])),
  ]);
  return table(["method", "temperature", "steps", ...depths.map((depth) => `depth ${depth + 1}`)], rows);
}

function calibration({ calibration: found = [] }) {
  const rows = found.map((each) => [each.temperature, number(each.intercept), number(each.slope)]);
  return table(["temperature", "intercept", "slope"], rows);
}

function others({ guard, shares, tpot_targets: targets }) {
  const rows = [
    ["time spent deciding", percent(shares?.deciding)],
    ["time lost to probing", percent(shares?.probing)],
    ["latency targets met", targets?.requests ? `${targets.met} of ${targets.requests}` : "–"],
  ];
  if (guard) {
    const left = guard.active ? `on, for ${number(guard.steps_left)} steps` : "not active";
    rows.push(["guard", left], ["times the guard became active", number(guard.times)]);
    rows.push(["steps of the next back-off", number(guard.backoff_steps)]);
  }
  return table(["", "now"], rows);
}
