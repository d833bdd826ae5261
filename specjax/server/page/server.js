// What the page asks the server for.

const PATIENCE_MS = 4000;

let key = "";

/** Bears a key from now on. It is kept here alone. */
export function useKey(given) {
  // A header holds bytes; the server compares those of UTF-8.
  key = String.fromCharCode(...new TextEncoder().encode(given));
}

/** Whether a key is borne. */
export function hasKey() {
  return key !== "";
}

/** A response other than the one that was asked for. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The JSON of a path, relative to the page's. */
export async function ask(path) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (!response.ok) throw new Refused(response.status, await messageOf(response));
  return response.json();
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
