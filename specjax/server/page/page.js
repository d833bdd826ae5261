// The live page: it asks the server twice a second what it does, and shows it.

import { Chart, showLegend } from "./chart.js";
import { make, nameOf, number, percent, say } from "./elements.js";
import { Requests } from "./requests.js";
import { Refused, ask, hasKey, useKey } from "./server.js";
import { Tables } from "./tables.js";
import { TreeView } from "./tree.js";

const EVERY_MS = 500, LONGEST_MS = 5000;
const RECENT_S = 5; // over which the numbers at the top are means
const REASONS = {
  best: "its predicted goodput is the largest",
  hysteresis: "nothing else promises enough more",
  guard: "realised goodput was below that of plain decoding",
  probe: "it is tried, to learn what it gives",
  fixed: "it was fixed by hand",
  latency: "it keeps the requests’ latency targets",
};

const element = (id) => document.getElementById(id);
const chart = new Chart(element("chart"));
const tree = new TreeView(element("tree"), element("tree-note"));
const requests = new Requests(element("requests"), element("none"), () => show());
const tables = new Tables(element("tables"));

let report = null, running = [], model = "";
let paused = false, timer = 0, polling = false, delay = EVERY_MS;

/** Asks once and shows the answers, or says what is wrong; then waits for the next time. */
async function poll() {
  clearTimeout(timer);
  if (polling || paused || document.hidden) return;
  polling = true;
  try {
    await update();
    succeed();
  } catch (error) {
    fail(error);
  }
  polling = false;
  if (paused) say(element("status"), "Paused.");
  if (element("login").hidden) timer = setTimeout(poll, delay);
}

async function update() {
  const asked = [ask("debug/speculation"), ask("debug/requests")];
  const [speculation, found] = await Promise.all(asked);
  report = speculation;
  running = found.requests;
  show();
  if (!model) model = (await ask("v1/models")).data[0].id;
  say(element("model"), model);
}

function succeed() {
  delay = EVERY_MS;
  document.body.classList.remove("stale");
  say(element("status"), "Live.");
}

function fail(error) {
  document.body.classList.add("stale");
  model = ""; // what answers next may be another server
  if (error instanceof Refused && error.status === 401) return askForKey();
  delay = Math.min(delay * 2, LONGEST_MS);
  const what = error instanceof Refused ? error.message : "The server does not answer.";
  return say(element("status"), `${what} Trying again in ${number(delay / 1000)} s.`);
}

function askForKey() {
  say(element("status"), hasKey() ? "The key was refused." : "The server asks for an API key.");
  element("login").hidden = false;
  element("key").focus();
}

function show() {
  if (!report) return;
  requests.show(running);
  showFacts();
  chart.show(report, Number(element("window").value));
  tree.show(requests.request);
  tables.show(report);
}

function showFacts() {
  const { mode, decision } = report;
  const recent = means();
  const facts = [
    ["setting", decision ? nameOf(decision.setting) : "–", reasonOf(mode, decision)],
    ["mode", nameOf(mode), mode === "auto" ? "chosen for each step" : "fixed"],
    ["rows running", number(running.length), `${number(report.steps)} steps so far`],
    ["tokens/s", number(recent.rate), `in the last ${RECENT_S} s`],
    ["predicted goodput", number(recent.predicted), "tokens per second of steps"],
    ["realised goodput", number(recent.goodput), `${percent(recent.goodput / recent.predicted)} of predicted`],
    ["predicted goodput of plain decoding", number(recent.plain), "tokens per second of steps"],
    ["gain over plain decoding", `× ${number(recent.goodput / recent.plain)}`, "realised, over predicted of plain decoding"],
  ];
  element("facts").replaceChildren(...facts.map(([name, value, note]) => make("div", {},
    make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", { class: "note" }, note))));
}

function reasonOf(mode, decision) {
  if (!decision) return mode === "auto" ? "no step yet" : "the only one";
  return REASONS[decision.reason] ?? decision.reason;
}

/** Means of the last seconds: of tokens by the clock, of goodputs by the seconds of steps. */
function means() {
  const spans = report.history.filter((span) => span.time > report.now - RECENT_S);
  const sum = (of) => spans.reduce((total, span) => total + of(span), 0);
  const mean = (field) => {
    const known = spans.filter((span) => Number.isFinite(span[field]));
    const seconds = known.reduce((total, span) => total + span.seconds, 0);
    return known.reduce((total, span) => total + span[field] * span.seconds, 0) / seconds;
  };
  return {
    rate: sum((span) => span.tokens) / RECENT_S,
    goodput: mean("goodput"), predicted: mean("predicted_goodput"), plain: mean("plain_goodput"),
  };
}

function togglePause() {
  paused = !paused;
  element("pause").setAttribute("aria-pressed", paused);
  say(element("status"), paused ? "Paused." : "Connecting.");
  poll();
}

function login(event) {
  event.preventDefault();
  useKey(element("key").value);
  element("key").value = "";
  element("login").hidden = true;
  poll();
}

showLegend(element("legend"));
element("pause").addEventListener("click", togglePause);
element("window").addEventListener("change", show);
element("login").addEventListener("submit", login);
document.addEventListener("visibilitychange", poll);
poll();
