// One text with its calls in place, and one of the calls: result, three losses, the loss of each token.

import { data, offline } from "./data.js";
import { chosenCall, deltaText, distinct, shownVerdict, verdictMark, written } from "./calls.js";
import { count, el, foreign, nats, svg, table } from "./elements.js";
import { KEY, encodeKey, link, set, state } from "./state.js";
import { term } from "./terms.js";
import { chosenTau } from "./thresholds.js";

const LOSSES = [["loss_empty", "L(ε), without a call"], ["loss_call", "L(c), without its result"], ["loss_result", "L(c, r), with its result"]];
const LOSS_CLASSES = ["plain", "asked", "answered"];

const sameCall = (one, other) => KEY.every(name => String(one[name]) === String(other[name]));

function chip(overview, call, chosen) {
  const number = overview.tools.findIndex(tool => tool.tool === call.tool);
  const tool = overview.tools[number];
  const verdict = shownVerdict(call, tool, chosenTau(tool));
  return el("a", { className: `chip tool-${number % 6} ${verdict === "kept" ? "is-kept" : "is-lost"}`, href: link({ view: "text", at: encodeKey(call) }),
    "aria-current": chosen ? "true" : null, title: `${tool.name}: ${verdict}, delta ${deltaText(call)}` },
    verdict === "kept" ? "[✓ " : "[✗ ", foreign(written(call, tool.name).slice(1)), call.times > 1 ? ` ×${call.times}` : null);
}

// Of the samples at one place the one that the filter looks at; the others are listed below, or shown when asked for.
function shownAt(calls, chosen) {
  if (state("every") === "1") return calls;
  const found = calls.filter(call => call.best || call.kept || (chosen && sameCall(call, chosen)));
  return found.length ? found : calls.slice(0, 1);
}

function inText(overview, text, chosen) {
  const characters = Array.from(text.text); // offsets count characters, JavaScript's strings UTF-16
  const places = new Map();
  for (const call of distinct(text.calls, one => chosen && sameCall(one, chosen))) {
    const place = call.char_offset - text.offset;
    places.set(place, [...(places.get(place) ?? []), call]);
  }
  const parts = [];
  let done = 0;
  for (const place of [...places.keys()].sort((a, b) => a - b)) {
    parts.push(foreign(characters.slice(done, place).join("")));
    done = place;
    const lanes = new Map();
    for (const call of places.get(place)) lanes.set(call.tool, [...(lanes.get(call.tool) ?? []), call]);
    for (const calls of lanes.values()) parts.push(...shownAt(calls, chosen).map(call => chip(overview, call, chosen && sameCall(call, chosen))));
  }
  parts.push(foreign(characters.slice(done).join("")));
  return el("div", { className: "text" }, parts);
}

function bars(call) {
  const known = LOSSES.map(([name, title], at) => ({ title, value: call[name], className: LOSS_CLASSES[at] }));
  const top = Math.max(0.01, ...known.map(one => one.value ?? 0));
  const rows = known.map((one, at) => svg("g", { transform: `translate(0 ${at * 24})` },
    svg("text", { x: 0, y: 14, class: "axis" }, one.title),
    svg("rect", { x: 170, y: 3, height: 14, width: Math.max(0, ((one.value ?? 0) / top) * 150), class: one.className }),
    svg("text", { x: 326, y: 14, class: "axis" }, one.value === null ? "not computed" : nats(one.value))));
  const label = known.map(one => `${one.title}: ${nats(one.value)}`).join("; ");
  return svg("svg", { viewBox: "0 0 400 74", role: "img", "aria-label": label, class: "bars" }, ...rows);
}

function tokenChart(found) {
  const step = 34, width = found.tokens.length * step + 40, floor = 110;
  const top = Math.max(0.5, ...found.tokens.flatMap(token => [token.loss_empty, token.loss_call, token.loss_result].map(value => value ?? 0)));
  const groups = found.tokens.map((token, at) => {
    const left = 36 + at * step;
    const rects = LOSSES.map(([name], number) => {
      const height = ((token[name] ?? 0) / top) * 96;
      return svg("rect", { x: left + number * 9, y: floor - height, width: 8, height, class: LOSS_CLASSES[number], opacity: token.weight ? 1 : 0.45 });
    });
    const label = foreign(token.token).textContent.replaceAll("\n", "⏎");
    return svg("g", {}, ...rects, svg("text", { x: left + 12, y: floor + 12, class: "axis", transform: `rotate(35 ${left + 12} ${floor + 12})` }, label.length > 12 ? `${label.slice(0, 11)}…` : label));
  });
  const scale = [0, top / 2, top].map(value => svg("text", { x: 0, y: floor - (value / top) * 96 + 4, class: "axis" }, nats(value, 1)));
  return svg("svg", { viewBox: `0 0 ${width} 170`, width, height: 170, role: "img", "aria-label": "The loss of each token from the call on" },
    svg("path", { d: `M30 ${floor}H${width}`, class: "floor" }), ...scale, ...groups);
}

function tokens(found) {
  const legend = el("p", { className: "legend" }, LOSSES.map(([, title], at) => [el("span", { className: `key ${LOSS_CLASSES[at]}` }), `${title} `]), el("br"), "Nats; pale tokens lie behind the window and count in no loss.");
  const columns = [
    { title: "token", cell: row => foreign(row.token) },
    { title: "weight", number: true, cell: row => nats(row.weight) },
    ...LOSSES.map(([name, title]) => ({ title, number: true, cell: row => nats(row[name]) })),
  ];
  const numbers = el("details", {}, el("summary", {}, "As numbers"), table("The loss of each token", columns, found.tokens));
  return [legend, el("div", { className: "scroll", tabindex: 0, role: "region", "aria-label": "Losses by token" }, tokenChart(found)), numbers];
}

function details(overview, call) {
  const tool = overview.tools.find(one => one.tool === call.tool);
  const tau = chosenTau(tool);
  const entry = (name, ...value) => [el("dt", {}, name), el("dd", {}, ...value)];
  const result = el("dd", {}, foreign(call.result)), input = el("dd", {}, foreign(call.input));
  const places = el("div", { className: "tokens" });
  const whole = el("button", { type: "button", onclick: async () => {
    const found = await data.call(pick(call));
    result.replaceChildren(foreign(found.result));
    input.replaceChildren(foreign(found.input));
    whole.remove();
  } }, `All ${count(call.result_length)} characters of the result`);
  const cut = call.result_length > Array.from(call.result ?? "").length || call.input_length > Array.from(call.input ?? "").length;
  const live = el("button", { type: "button", onclick: async () => {
    live.disabled = true;
    live.textContent = "The model computes …";
    try {
      places.replaceChildren(...tokens(await data.tokens(pick(call))));
      live.remove();
    } catch (error) {
      places.replaceChildren(el("p", { role: "alert" }, String(error.message)));
      live.disabled = false;
      live.textContent = "Loss of each token";
    }
  } }, "Loss of each token");
  const gain = call.loss_minus - call.loss_plus, isGain = Math.abs(gain - call.delta) < 1e-9;
  const formula = call.delta === null ? "–" : `${nats(call.loss_minus)} − ${nats(call.loss_plus)} = ${isGain ? deltaText(call) : nats(gain)}`;
  return el("article", { className: "card", "aria-label": "The chosen call" },
    el("h2", {}, foreign(tool.name)),
    el("dl", {}, entry("verdict", verdictMark(shownVerdict(call, tool, tau)), ` at τ = ${nats(tau, 2)}`), el("dt", {}, "input"), input, el("dt", {}, "result"), result,
      entry(term("source", "proposed by"), foreign(call.source)), entry(term("p", "p"), nats(call.p_api)), entry(term("delta", "Δ = L⁻ − L⁺"), formula),
      ...(call.delta === null || isGain ? [] : entry("score", deltaText(call))),
      ...(call.echo === null ? [] : entry(term("echo", "its echo gains"), `${nats(call.echo)}, with the result of another input that holds the same words`))),
    cut && !offline ? whole : null, el("h3", {}, "Losses, nats"), call.loss_empty === null ? el("p", {}, "This call was not scored.") : bars(call),
    overview.live && !offline && call.loss_empty !== null ? live : null, places);
}

const pick = call => Object.fromEntries(KEY.map(name => [name, call[name]]));

export async function texts(overview) {
  const chosen = chosenCall(overview);
  if (!chosen) return el("p", {}, "Choose a call in ", el("a", { href: link({ view: "calls" }) }, "the list of calls"), " to see it in its text: none is kept yet.");
  const { position, sample, ...key } = chosen;
  const text = await data.text(key);
  const call = text.calls.find(one => sameCall(one, chosen));
  const every = el("input", { type: "checkbox", onchange: () => set({ every: every.checked ? "1" : "" }) });
  every.checked = state("every") === "1";
  const listed = table("Every call in this text", [
    { title: "call", cell: one => chip(overview, one, call && sameCall(one, call)) },
    { title: term("times", "times"), number: true, cell: one => count(one.times) },
    { title: term("source", "source"), cell: one => foreign(one.source) },
    { title: term("p", "p"), number: true, cell: one => nats(one.p_api) },
    { title: term("delta", "Δ"), number: true, cell: deltaText },
    { title: "verdict", cell: one => { const tool = overview.tools.find(lane => lane.tool === one.tool); return verdictMark(shownVerdict(one, tool, chosenTau(tool))); } },
  ], distinct(text.calls, one => call && sameCall(one, call)));
  return el("div", {}, el("h2", {}, foreign(text.title || key.digest)), el("p", { className: "soft" }, foreign(text.url), text.date ? `, ${text.date}` : ""),
    el("p", {}, el("label", {}, every, " every sample"), " ", el("a", { href: link({ view: "pipeline", at: encodeKey(chosen) }) }, "The pipeline of this text")),
    el("div", { className: "split" }, inText(overview, text, call), call ? details(overview, call) : null), listed);
}
