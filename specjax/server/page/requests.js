// The requests that run: a card for each, of which one is chosen.

import { make, measure, number, percent, say } from "./elements.js";

const MOST = 64; // cards; a page of hundreds would be slow
const END_PX = 8; // how far from its end a text still counts as scrolled to it

/** The cards inside a list. */
export class Requests {
  constructor(list, note, onChoose) {
    Object.assign(this, { list, note, onChoose, cards: new Map(), chosen: null, asked: false });
  }

  /** The request that is chosen: the one that was clicked, else the first. */
  get request() {
    return this.chosen;
  }

  /** Shows what runs now. A chosen request stays when it has ended, until another is chosen. */
  show(running) {
    const sorted = running.toSorted((one, other) => one.row - other.row);
    this.#choose(sorted);
    const shown = sorted.slice(0, MOST);
    const ended = this.chosen && !sorted.some((each) => each.id === this.chosen.id);
    if (ended) shown.unshift({ ...this.chosen, ended: true });
    this.#arrange(shown);
    const more = sorted.length - MOST;
    say(this.note, more > 0 ? `And ${more} more.` : "No request is running.");
    this.note.hidden = sorted.length > 0 && more <= 0;
  }

  #choose(running) {
    const same = this.chosen && running.find((each) => each.id === this.chosen.id);
    if (same) this.chosen = same;
    else if (!this.asked && running.length) this.chosen = running[0];
  }

  #arrange(shown) {
    const ids = new Set(shown.map((each) => each.id));
    for (const [id, card] of this.cards) {
      if (!ids.has(id)) {
        card.element.remove();
        this.cards.delete(id);
      }
    }
    shown.forEach((request, place) => {
      if (!this.cards.has(request.id)) this.#add(request);
      const card = this.cards.get(request.id);
      const there = this.list.children[place];
      if (there !== card.element) this.list.insertBefore(card.element, there ?? null);
      card.show(request, request.id === this.chosen?.id);
    });
  }

  #add(request) {
    const { id } = request;
    this.cards.set(id, new Card(request, () => {
      this.asked = true;
      this.chosen = this.cards.get(id).request;
      this.onChoose();
    }));
  }
}

class Card {
  constructor(request, onChoose) {
    this.button = make("button", { type: "button", class: "choose" });
    this.facts = make("p", { class: "facts" });
    this.text = make("p", {
      class: "text", dir: "auto", tabindex: 0, role: "group", "aria-label": `Text of ${request.id}`,
    });
    this.element = make("li", { class: "card" }, this.button, this.facts, this.text);
    this.element.addEventListener("click", onChoose); // the button's clicks come here, too
  }

  show(request, chosen) {
    this.request = request;
    this.element.classList.toggle("chosen", chosen);
    this.button.setAttribute("aria-pressed", chosen);
    const state = request.ended ? " · ended" : "";
    say(this.button, `Row ${request.row} · ${request.id}${state}`);
    say(this.facts, factsOf(request).join(" · "));
    const written = `${request.steps} ${request.tokens}`;
    if (written !== this.written) this.#write(request);
    this.written = written;
  }

  #write({ prompt, text }) {
    const { text: box } = this;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < END_PX;
    const runs = text.map((run) =>
      make("span", { class: run.accepted ? "accepted" : "own" }, run.text));
    box.replaceChildren(make("span", { class: "prompt" }, prompt), ...runs);
    if (follows || !this.written) box.scrollTop = box.scrollHeight;
  }
}

function factsOf({ temperature, tokens, steps, accepted, max_tpot_ms: target }) {
  const made = [
    `${number(tokens / steps)} tokens per step`,
    `${number(tokens)} tokens, ${percent(accepted / tokens)} accepted`,
  ];
  return [
    `temperature ${number(temperature)}`,
    ...(steps > 0 ? made : ["no token yet"]),
    target === null ? "no latency target" : `at most ${measure(target, "ms")} per token`,
  ];
}
