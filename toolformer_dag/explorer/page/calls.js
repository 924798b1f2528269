// Calls by their distance from the threshold, filtered, each in its text.

import { data, verdictAt } from "./data.js";
import { count, csv, download, el, foreign, nats } from "./elements.js";
import { KEY, decodeKey, encodeKey, link, set, state } from "./state.js";
import { term } from "./terms.js";
import { chosenTau } from "./thresholds.js";

const TYPING_PAUSE = 120;
const CSV = ["tool", "shard", "digest", "segment", "position", "sample", "domain", "date", "verdict", "delta", "tau", "distance",
  "loss_empty", "loss_call", "loss_before", "loss_result", "need", "p_api", "input", "result", "chain", "times", "before", "after"];

export const verdictName = verdict => verdict.replace("tau_f", "τ").replaceAll("_", " ");

export function verdictMark(verdict) {
  return el("span", { className: verdict === "kept" ? "kept" : "lost" }, verdict === "kept" ? "✓ kept" : `✗ ${verdictName(verdict)}`);
}

// Delta, or its upper bound where L(c) was not computed.
export const deltaText = call => (call.delta === null ? "–" : `${call.delta_is_bound ? "≤ " : ""}${nats(call.delta)}`);

// The verdict that is shown: at the applied threshold the stored one, which knows the limit of texts per tool.
export function shownVerdict(call, tool, tau) {
  if (tau === tool.tau_f) return call.kept ? "kept" : call.reason;
  return verdictAt(call, tau);
}

// e(c, r) as it stands in the text; of a chain, all of its calls.
export const written = (call, name) =>
  (call.chain ? JSON.parse(call.chain) : [{ tool: name, input: call.input, result: call.result }])
    .map(one => `[${one.tool}(${one.input}) → ${one.result ?? ""}]`).join(" ");

// Samples of a position that are the same call are one row; the chosen, the kept or the best one stands for it.
export function distinct(calls, chosen = () => false) {
  const found = new Map();
  for (const call of calls) {
    const key = JSON.stringify(["shard", "digest", "segment", "tool", "position", "source", "chain", "input", "body", "result"].map(name => call[name] ?? null));
    found.set(key, [...(found.get(key) ?? []), call]);
  }
  const shown = same => same.find(chosen) ?? same.find(call => call.verdict === "kept" || call.kept) ?? same.find(call => call.best) ?? same[0];
  return [...found.values()].map(same => ({ ...shown(same), times: same.length }));
}

// The call that the address names; where it names none, the kept one that gains most, of the chosen tool where it has one.
export function chosenCall(overview) {
  const best = overview.tools.filter(tool => tool.best).map(tool => ({ ...tool.best, tool: tool.tool })).sort((a, b) => b.delta - a.delta);
  const first = best.find(call => call.tool === state("tool")) ?? best[0];
  return decodeKey(state("at") || (first ? encodeKey(first) : ""));
}

export function calls(overview) {
  const tool = overview.tools.find(one => one.tool === state("tool")) ?? overview.tools[0];
  if (!tool) return el("p", {}, "There are no tools in this warehouse.");
  const body = el("tbody");
  const told = el("output", { "aria-live": "polite" });
  const excerptsOf = new Map();
  let rows = [], asked = 0, timer;

  const choice = (name, title, options) => {
    const made = el("select", { onchange: () => change(name, made.value) }, options.map(([value, text]) => el("option", { value }, text)));
    made.value = name === "tool" ? tool.tool : state(name);
    return el("label", {}, title, made);
  };
  const search = (name, title) => {
    const made = el("input", { type: "search", maxlength: 500, value: state(name), autocomplete: "off", spellcheck: "false", oninput: () => change(name, made.value, true) });
    return el("label", {}, title, made);
  };
  const tau = el("input", { type: "number", step: 0.01, min: -100, max: 100, value: chosenTau(tool),
    oninput: () => Number.isFinite(tau.valueAsNumber) && change(`tau.${tool.tool}`, tau.valueAsNumber === tool.tau_f ? "" : tau.valueAsNumber, true) });
  const reasons = [...new Set(["below_tau_f", "not_best_at_position", ...overview.reasons])].sort();
  const form = el("form", { className: "filter", onsubmit: event => event.preventDefault() },
    choice("tool", "tool", overview.tools.map(one => [one.tool, one.name])),
    el("label", {}, "threshold", tau),
    choice("verdict", "verdict", [["", "all"], ["kept", "kept"], ["lost", "not kept"]]),
    choice("reason", "reason", [["", "all"], ...reasons.map(reason => [reason, verdictName(reason)])]),
    search("domain", "domain"), search("text", "input or result holds"),
    el("button", { type: "button", onclick: save }, "CSV of these rows"));

  function change(name, value, wait = false) {
    set({ [name]: value }, { quietly: name !== "tool" });
    clearTimeout(timer);
    if (name !== "tool") timer = setTimeout(load, wait ? TYPING_PAUSE : 0);
  }

  function row(call) {
    const verdict = shownVerdict(call, tool, chosenTau(tool));
    const distance = call.delta === null ? null : call.delta - chosenTau(tool);
    const place = el("td", { className: "place" });
    excerptsOf.set(call.row, { call, place });
    inPlace(place, call, null);
    return el("tr", {},
      el("td", { className: "number" }, distance === null ? "–" : (distance >= 0 ? "+" : "−") + Math.abs(distance).toFixed(3)),
      el("td", { className: "number" }, deltaText(call)), el("td", { className: "number" }, count(call.times)), el("td", {}, verdictMark(verdict)), place, el("td", {}, foreign(call.domain)), el("td", {}, call.date ?? ""));
  }

  function inPlace(place, call, excerpt) {
    const name = overview.tools.find(one => one.tool === call.tool)?.name ?? call.tool;
    place.replaceChildren(foreign(excerpt?.before, "soft"),
      el("a", { className: "call", href: link({ view: "text", at: encodeKey(call) }) }, foreign(written(call, name))),
      foreign(excerpt?.after, "soft"));
  }

  async function load() {
    const mine = ++asked;
    try {
      const found = await data.calls({ tool: tool.tool, tau: chosenTau(tool), ...Object.fromEntries(["domain", "verdict", "reason", "text"].map(name => [name, state(name)])) });
      if (mine !== asked) return;
      rows = distinct(found.rows);
      excerptsOf.clear();
      body.replaceChildren(...rows.map(row));
      told.textContent = rows.length ? `${count(rows.length)} calls nearest the threshold` : "No call fits.";
      if (!rows.length) return;
      const excerpts = await data.excerpts(rows.map(call => call.row));
      if (mine !== asked) return;
      for (const excerpt of excerpts.rows) {
        const known = excerptsOf.get(excerpt.row);
        if (!known) continue;
        Object.assign(known.call, { before: excerpt.before, after: excerpt.after });
        inPlace(known.place, known.call, excerpt);
      }
    } catch (error) {
      if (mine === asked) told.textContent = String(error.message);
    }
  }

  function save() {
    const threshold = chosenTau(tool);
    const lines = rows.map(call => CSV.map(name =>
      ({ verdict: shownVerdict(call, tool, threshold), tau: threshold, distance: call.delta === null ? null : call.delta - threshold })[name] ?? call[name] ?? null));
    download(`calls-${tool.tool}.csv`, "text/csv", csv([CSV, ...lines]));
  }

  body.addEventListener("keydown", event => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const target = next && document.activeElement.closest("tr")?.[next]?.querySelector("a");
    if (!target) return;
    target.focus();
    event.preventDefault();
  });
  const titles = [[term("tau_f", "Δ − τ"), true], [term("delta", "Δ"), true], [term("times", "times"), true], ["verdict"], ["call in its text"], ["domain"], ["date"]];
  const head = el("tr", {}, titles.map(([title, number]) => el("th", { scope: "col", className: number ? "number" : null }, title)));
  const listed = el("table", { id: "calls" }, el("caption", {}, `Calls of ${tool.name} by distance from the threshold`), el("thead", {}, head), body);
  load();
  return el("div", {}, form, el("p", { className: "soft" }, told), el("div", { className: "scroll tall", tabindex: 0, role: "region", "aria-label": "Calls" }, listed));
}
