// Elements, and how numbers are written. Texts become text nodes: none is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element of HTML with attributes and children; strings become text. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Sets an element's text, if it is another: a screen reader reads what is set. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A number with about three digits; a dash for what is not known. */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** A number with a unit behind it. */
export function measure(value, unit) {
  return Number.isFinite(value) ? `${number(value)} ${unit}` : "–";
}

/** Seconds as milliseconds. */
export function milliseconds(seconds) {
  return measure(seconds === null ? NaN : seconds * 1000, "ms");
}

/** A share as a percentage. */
export function percent(share) {
  return Number.isFinite(share) ? `${number(share * 100)} %` : "–";
}

/** What a setting is called; that of a server with a single one may have no name. */
export function nameOf(setting) {
  return setting || "the only one";
}

/** The kind of a setting, by which it is coloured: "chain:3" is a chain. */
export function kindOf(setting) {
  const kind = setting.split(":")[0];
  return ["none", "chain", "specexec", "lookup", "ngram"].includes(kind) ? kind : "other";
}
