// What a threshold keeps: the distribution of delta, the calls kept and those kept by chance, Table 2.

import { count, el, nats, svg, table } from "./elements.js";
import { link, set, state } from "./state.js";
import { term } from "./terms.js";

const WIDTH = 320, HEIGHT = 96, FLOOR = 78;
const STATISTICS = ["scored", "calls", "examples", "kept_swapped", "by_chance", "by_chance_low", "by_chance_high", "fdr", "fdr_high"];
const TABLE_2 = [0.5, 1, 2];

export const chosenTau = tool => {
  const written = state(`tau.${tool.tool}`);
  const tau = written === "" ? NaN : Number(written);
  return Number.isFinite(tau) ? tau : tool.tau_f ?? 1;
};

// The server counted at every hundredth, and at the applied threshold, which may lie between two.
export function at(tool, tau) {
  if (tool.applied && tau === tool.tau_f) return tool.applied;
  if (tool.exact_above !== null && tau <= tool.exact_above) return null;
  const curve = tool.curve;
  if (!curve) return null;
  const place = Math.round(tau * 100) - curve.first;
  const index = Math.max(0, Math.min(curve.calls.length - 1, place));
  return Object.fromEntries(STATISTICS.map(name => [name, curve[name][index]]));
}

function range(tool) {
  const bins = tool.bars?.bins ?? [0, 100];
  const low = Math.max(-200, Math.min(0, bins[0]));
  const high = Math.min(800, Math.max(200, bins[bins.length - 1] + 10, Math.round((tool.tau_f ?? 0) * 100) + 20));
  return [low / 100, high / 100];
}

const across = ([low, high]) => value => 8 + ((value - low) / (high - low)) * (WIDTH - 16);

function axis(scale, [low, high]) {
  const step = high - low > 4 ? 1 : 0.5;
  const marks = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
    marks.push(svg("text", { x: scale(value), y: HEIGHT - 4, class: "axis", "text-anchor": "middle" }, String(+value.toFixed(1))));
  }
  return svg("g", {}, svg("path", { d: `M0 ${FLOOR}H${WIDTH}`, class: "floor" }), ...marks);
}

// Bars of 0.05 nats, on a logarithmic scale; the control is scaled to as many calls.
function distribution(tool, limits) {
  const scale = across(limits), [low, high] = limits, width = 5;
  const cells = Math.ceil(((high - low) * 100) / width);
  const scored = new Array(cells).fill(0), swapped = new Array(cells).fill(0);
  (tool.bars?.bins ?? []).forEach((bin, index) => {
    const cell = Math.floor((bin - Math.round(low * 100)) / width);
    if (cell < 0 || cell >= cells) return;
    scored[cell] += tool.bars.scored[index];
    swapped[cell] += tool.bars.swapped[index];
  });
  const sum = values => values.reduce((total, value) => total + value, 0);
  const weight = sum(scored) / Math.max(1, sum(swapped));
  const top = Math.log1p(Math.max(1, ...scored, ...swapped.map(value => value * weight)));
  const height = value => FLOOR - ((FLOOR - 6) * Math.log1p(value)) / top;
  const place = cell => scale(low + (cell * width) / 100);
  const bars = scored.map((value, cell) => (value ? `M${place(cell)} ${FLOOR}V${height(value)}H${place(cell + 1) - 0.6}V${FLOOR}` : "")).join("");
  const line = swapped.map((value, cell) => `${cell ? "L" : "M"}${place(cell)} ${height(value * weight)}H${place(cell + 1)}`).join("");
  return [svg("path", { d: bars, class: "scored" }), svg("path", { d: line, class: "swapped" })];
}

// How many places stay at each threshold, and how many of them by chance.
function survivors(tool, limits) {
  const scale = across(limits), curve = tool.curve;
  if (!curve) return [];
  const top = Math.log1p(Math.max(1, ...curve.calls));
  const height = value => FLOOR - ((FLOOR - 6) * Math.log1p(value ?? 0)) / top;
  const points = [];
  const step = Math.max(1, Math.floor(((limits[1] - limits[0]) * 100) / 300));
  for (let bin = Math.round(limits[0] * 100); bin <= limits[1] * 100; bin += step) points.push(bin);
  const read = name => points.map(bin => curve[name][Math.max(0, Math.min(curve.calls.length - 1, bin - curve.first))]);
  const path = values => values.map((value, index) => `${index ? "L" : "M"}${scale(points[index] / 100)} ${height(value)}`).join("");
  const low = read("by_chance_low"), high = read("by_chance_high");
  const back = points.map((bin, index) => `L${scale(bin / 100)} ${height(low[index])}`).reverse().join("");
  const parts = [svg("path", { d: path(read("calls")), class: "kept-line" })];
  if (tool.swapped) {
    parts.unshift(svg("path", { d: `${path(high)}${back}Z`, class: "interval" }));
    parts.push(svg("path", { d: path(read("by_chance")), class: "swapped" }));
  }
  return parts;
}

function chart(label, limits, parts) {
  const marker = svg("line", { y1: 2, y2: FLOOR, class: "tau" });
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, ...parts, axis(across(limits), limits), marker);
  return { drawn, marker };
}

// As too_few_swaps of swapped_statistics: no swap was kept, and too few were made to tell 5 % from more.
const tooFew = found => found.kept_swapped === 0 && found.fdr > 0.05;

function summary(tool, tau) {
  const found = at(tool, tau);
  if (found === null) return [el("span", { className: "soft" }, tool.curve ? `Not computed below ${nats(tool.exact_above, 2)} (filtering.loss_floor).` : "No call was scored yet.")];
  const parts = [el("b", {}, count(found.calls)), " of ", count(tool.places), " kept, in ", count(found.examples), " texts"];
  if (!tool.swapped) return [...parts, el("br"), el("span", { className: "soft" }, "no control was measured")];
  if (tooFew(found)) return [...parts, el("br"), el("span", { className: "soft" }, "too few swaps to tell how many by chance")];
  return [...parts, el("br"), el("span", { className: "chance" }, `${count(found.by_chance)} `, term("by_chance", "by chance"), ` (${count(found.by_chance_low)} to ${count(found.by_chance_high)})`),
    ", ", term("fdr", "FDR"), ` ${nats(found.fdr, 3)}, at most ${nats(found.fdr_high, 3)}`];
}

function byChance(tool, found) {
  if (!tool.swapped || !found) return "–";
  return tooFew(found) ? "too few swaps to tell" : count(found.by_chance);
}

function card(tool, number, changed) {
  const limits = range(tool), scale = across(limits);
  const deltas = chart(`${tool.name}: distribution of delta of ${count(at(tool, -1000)?.scored ?? 0)} scored calls, beside the control`, limits, distribution(tool, limits));
  const stay = chart(`${tool.name}: places that stay over the threshold, beside those that stay by chance`, limits, survivors(tool, limits));
  const told = el("p", { className: "told" });
  const slider = el("input", { type: "range", min: limits[0], max: limits[1], step: 0.01, "aria-label": `Threshold of ${tool.name}` });
  const field = el("input", { type: "number", min: -100, max: 100, step: 0.01, "aria-label": `Threshold of ${tool.name}, as a number` });
  const show = tau => {
    const x = scale(Math.max(limits[0], Math.min(limits[1], tau)));
    for (const { marker } of [deltas, stay]) {
      marker.setAttribute("x1", x);
      marker.setAttribute("x2", x);
    }
    slider.value = tau;
    slider.setAttribute("aria-valuetext", `${tau.toFixed(2)} nats: ${count(at(tool, tau)?.calls)} kept`);
    if (document.activeElement !== field) field.value = tau.toFixed(2);
    told.replaceChildren(...summary(tool, tau));
  };
  const move = input => {
    if (input.value === "" || !Number.isFinite(input.valueAsNumber)) return;
    const tau = Math.round(input.valueAsNumber * 100) / 100;
    set({ [`tau.${tool.tool}`]: tau === tool.tau_f ? "" : tau }, { quietly: true });
    show(tau);
    changed();
  };
  slider.addEventListener("input", () => move(slider));
  field.addEventListener("input", () => move(field));
  show(chosenTau(tool));
  const applied = tool.tau_f === null ? "No threshold is applied." : `Applied: ${nats(tool.tau_f, 2)}${tool.by_chance === null ? "" : " (by chance)"}, ${count(tool.kept)} calls in filtered_calls.`;
  const browse = el("a", { href: link({ view: "calls", tool: tool.tool, at: "" }), className: "browse" }, "Calls near the threshold");
  browse.addEventListener("focus", () => (browse.href = link({ view: "calls", tool: tool.tool, at: "" })));
  browse.addEventListener("pointerdown", () => (browse.href = link({ view: "calls", tool: tool.tool, at: "" })));
  return el("section", { className: `card tool-${number % 6}`, "aria-label": tool.name }, el("h2", {}, tool.name), told,
    el("h3", {}, "Distribution of ", term("delta", "delta")), deltas.drawn, el("h3", {}, "Survivors over τ"), stay.drawn,
    el("div", { className: "slide" }, el("span", { "aria-hidden": true }, term("tau_f", "τ")), slider, field), el("p", { className: "soft" }, applied), browse);
}

function tableTwo(tools) {
  const cell = (tool, tau) => {
    const found = at(tool, tau);
    return found ? `${count(found.examples)} / ${count(found.calls)}` : "–";
  };
  return table("Table 2: texts / calls kept", [
    { title: "tool", cell: tool => tool.name },
    ...TABLE_2.map(tau => ({ title: `τ = ${tau}`, number: true, cell: tool => cell(tool, tau) })),
    { title: "chosen τ", number: true, cell: tool => nats(chosenTau(tool), 2) },
    { title: "at chosen τ", number: true, cell: tool => cell(tool, chosenTau(tool)) },
    { title: term("by_chance", "by chance"), number: true, cell: tool => byChance(tool, at(tool, chosenTau(tool))) },
  ], tools, { rowHeads: true });
}

function settings(tools) {
  const changed = tools.filter(tool => state(`tau.${tool.tool}`) !== "" && chosenTau(tool) !== tool.tau_f);
  if (!changed.length) return "# No threshold differs from the one that is applied.";
  const key = tool => (/^[A-Za-z0-9_-]+$/.test(tool.tool) ? tool.tool : JSON.stringify(tool.tool));
  const lines = changed.map(tool => `[tools.${key(tool)}]\ntau_f = ${chosenTau(tool)}\n`);
  return `# toolformer.toml: below each of these headers, this line in place of its tau_f\n${lines.join("\n")}\n# then, in a terminal\ntoolformer-dag stale --run`;
}

export function thresholds(overview) {
  const live = el("div", { id: "table-2" }, tableTwo(overview.tools));
  const told = el("pre", { tabindex: 0, hidden: true, "aria-label": "Settings" });
  const changed = () => {
    live.replaceChildren(tableTwo(overview.tools));
    if (!told.hidden) told.textContent = settings(overview.tools);
  };
  const button = el("button", { type: "button" }, "Settings for these thresholds");
  button.addEventListener("click", () => {
    told.hidden = false;
    told.textContent = settings(overview.tools);
    navigator.clipboard?.writeText(told.textContent).catch(() => {});
  });
  const legend = el("p", { className: "legend" }, el("span", { className: "key scored" }), "scored calls ", el("span", { className: "key kept-line" }), "places kept ",
    el("span", { className: "key swapped" }), term("swap", "the control"), ": the same calls with results of other documents. Heights are logarithmic. Counts are those of kept_at, before the limit of texts per tool (training.examples_per_tool).");
  return el("div", {}, legend, el("div", { className: "cards" }, overview.tools.map((tool, number) => card(tool, number, changed))), live,
    el("p", {}, button), told);
}
