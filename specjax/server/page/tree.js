// The tree of a request's last step, drawn from left to right, a column for each level.

import { draw, nameOf, number, say } from "./elements.js";

const COLUMN = 104, BOX = 64, ROW = 26, HEIGHT = 20, EDGE = 12, LETTERS = 7;
const LEVEL_MS = 55; // between the levels' appearing
const SIGNS = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** The picture of a tree: `{setting, nodes: [{parent, text, chance, accepted}]}`. */
export function treePicture(tree) {
  const nodes = placed(tree.nodes);
  const width = Math.max(...nodes.map((node) => node.x)) + BOX + 2;
  const height = Math.max(...nodes.map((node) => node.y)) + HEIGHT / 2 + EDGE;
  const levels = [];
  for (const node of nodes) {
    levels[node.depth] ??= draw("g", { class: "level" });
    levels[node.depth].style.animationDelay = `${node.depth * LEVEL_MS}ms`;
    levels[node.depth].append(...(node.depth ? edge(node, nodes[node.parent]) : []), box(node));
  }
  return draw("svg", { width, height, role: "img", "aria-label": summary(tree) }, ...levels);
}

/** Nodes with the depth and place of each; leaves lie below one another, parents amid theirs. */
function placed(given) {
  const nodes = given.map((node) => ({ ...node, children: [] }));
  nodes.forEach((node) => {
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    node.x = 1 + node.depth * COLUMN;
    if (node.parent >= 0) nodes[node.parent].children.push(node);
  });
  let leaves = 0;
  const place = (node) => {
    node.children.forEach(place);
    const ends = node.children.length ? [node.children[0].y, node.children.at(-1).y] : [];
    node.y = ends.length ? (ends[0] + ends[1]) / 2 : EDGE + leaves++ * ROW;
  };
  nodes.filter((node) => node.parent < 0).forEach(place);
  return nodes;
}

function edge(node, parent) {
  const from = parent.x + BOX, kind = node.accepted ? "edge taken" : "edge";
  const bend = `C${from + 18} ${parent.y} ${from + 6} ${node.y} ${from + 22} ${node.y}`;
  const path = draw("path", { d: `M${from} ${parent.y}${bend}H${node.x}`, class: kind });
  if (!Number.isFinite(node.chance)) return [path];
  const text = draw("text", { x: node.x - 4, y: node.y - 3, class: "chance" }, number(node.chance));
  return [path, text];
}

function box(node) {
  const taken = node.accepted && node.depth > 0; // the root was there before the step
  const text = taken ? `✓ ${brief(node.text)}` : brief(node.text);
  const size = { x: node.x, y: node.y - HEIGHT / 2, width: BOX, height: HEIGHT, rx: 4 };
  return draw("g", { class: taken ? "node taken" : "node" },
    draw("title", {}, `“${visible(node.text)}”, ${stateOf(node)}`),
    draw("rect", size),
    draw("text", { x: node.x + BOX / 2, y: node.y + 4, "text-anchor": "middle" }, text),
  );
}

function stateOf({ depth, chance, accepted }) {
  if (depth === 0) return "the last token before the step";
  const state = accepted ? "accepted" : "not accepted";
  return Number.isFinite(chance) ? `chance ${number(chance)}, ${state}` : state;
}

/** A token's text with its spaces and control characters made visible. */
export function visible(text) {
  const shown = [...text].map((letter) => {
    if (letter in SIGNS) return SIGNS[letter];
    return /[\p{C}\p{Z}]/u.test(letter) ? `\\u${letter.codePointAt(0).toString(16)}` : letter;
  });
  return shown.join("");
}

function brief(text) {
  const shown = [...visible(text)];
  return shown.length > LETTERS ? `${shown.slice(0, LETTERS - 1).join("")}…` : shown.join("");
}

function summary({ setting, nodes }) {
  const drafted = nodes.slice(1), taken = drafted.filter((node) => node.accepted);
  const texts = taken.map((node) => `“${visible(node.text)}”`).join(" ");
  const end = taken.length ? `: ${texts}` : "";
  return `${nameOf(setting)}: ${drafted.length} drafted tokens, ${taken.length} accepted${end}`;
}

/** The tree beside a sentence about it; it is drawn again only if it is another. */
export class TreeView {
  constructor(root, note) {
    Object.assign(this, { root, note, drawn: "" });
  }

  /** Shows the tree of a request, or says why there is none. */
  show(request) {
    const drawn = JSON.stringify([request?.id, request?.tree]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const tree = request?.tree;
    const nodes = tree ? tree.nodes.length : 0;
    this.root.hidden = nodes === 0;
    this.root.replaceChildren(...(nodes ? [treePicture(tree)] : []));
    say(this.note, this.#sentence(request, nodes));
  }

  #sentence(request, nodes) {
    if (!request) return "Choose a request to see what its last step drafted.";
    if (nodes < 2) return `Row ${request.row}: the last step drafted nothing.`;
    return `Row ${request.row}, ${summary(request.tree)}. Numbers are the drafter’s probabilities; `
      + "✓ and a thick line mark what was accepted.";
  }
}
