// What is shown stands in the address behind `#`, so that a link restores it. Plain texts by name; taus as `tau.TOOL`.

const PAUSE = 150;
const listeners = [];
let current = read(), writing;

function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export const state = name => current[name] ?? "";

export function link(changes) {
  const next = { ...current, ...changes };
  const kept = Object.entries(next).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return "#" + new URLSearchParams(kept.sort());
}

// `quietly`: the view that changed it shows it already. Browsers refuse more than a few changes of the address a second.
export function set(changes, { quietly = false } = {}) {
  current = Object.fromEntries(new URLSearchParams(link(changes).slice(1)));
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", link({})), PAUSE);
  if (!quietly) listeners.forEach(listen => listen());
}

export function listen(listener) {
  listeners.push(listener);
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return; // the link that skips the navigation
  clearTimeout(writing);
  current = read();
  listeners.forEach(listener => listener());
});

export const KEY = ["tool", "shard", "digest", "segment", "position", "sample"];
export const encodeKey = (call, names = KEY) => names.map(name => encodeURIComponent(call[name])).join("/");
// Null where the text is no key, as in a link that was cut.
export function decodeKey(text, names = KEY) {
  let parts;
  try {
    parts = text.split("/").map(decodeURIComponent);
  } catch {
    return null; // half of an escape such as %2
  }
  return parts.length >= names.length ? Object.fromEntries(names.map((name, at) => [name, parts[at]])) : null;
}
