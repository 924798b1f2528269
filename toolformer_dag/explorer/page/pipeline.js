// The pipeline of one text, step by step: of a text of the corpus, or of one that a user types.

import { data, offline } from "./data.js";
import { chosenCall, distinct, shownVerdict, verdictMark, verdictName, written } from "./calls.js";
import { count, el, foreign, nats, svg, table } from "./elements.js";
import { link, set, state } from "./state.js";
import { term } from "./terms.js";
import { chosenTau } from "./thresholds.js";

function probabilities(text, positions, threshold) {
  const characters = Array.from(text), width = 900, floor = 60;
  const top = Math.max(0.05, ...positions.map(one => one.p ?? 0));
  const x = place => (place / Math.max(1, characters.length)) * width;
  const marks = positions.map(one => svg("line", { x1: x(one.char), x2: x(one.char), y1: floor, y2: floor - ((one.p ?? 0) / top) * 52, class: "position" }));
  const limit = threshold === undefined || threshold > top ? [] : [svg("path", { d: `M0 ${floor - (threshold / top) * 52}H${width}`, class: "swapped" })];
  const drawn = svg("svg", { viewBox: `0 0 ${width} 66`, role: "img", class: "wide", preserveAspectRatio: "none", "aria-label": `The probability of a call at ${positions.length} positions, up to ${nats(top)}` },
    svg("path", { d: `M0 ${floor}H${width}`, class: "floor" }), ...marks, ...limit);
  const likely = [...positions].sort((a, b) => b.p - a.p).slice(0, 10);
  const around = one => foreign(characters.slice(Math.max(0, one.char - 25), one.char).join("") + "▸" + characters.slice(one.char, one.char + 25).join(""));
  return [drawn, table("The likeliest positions", [
    { title: term("p", "p"), number: true, cell: one => nats(one.p) },
    { title: "place", cell: around },
  ], likely)];
}

function threshold(line) {
  if (line.tau_f === null) return `No call stays: ${line.by_chance ? "by_chance found no threshold" : "there is no threshold"}.`;
  return `Calls stay from τ_f = ${nats(line.tau_f)} on${line.by_chance ? ", as by_chance found it" : ""}.`;
}

function steps(line) {
  const step = (title, note, ...content) => el("li", {}, el("h3", {}, title), note ? el("p", { className: "soft" }, note) : null, ...content);
  const sampled = line.samples;
  return el("ol", { className: "steps" },
    step("The text", line.wanted ? `The tool wants it: ${line.wanted}.` : null, el("div", { className: "text" }, foreign(line.text))),
    step("Positions", line.tau_s === undefined ? "The model's p of a call, at the positions that were sampled." : ["The model's p of a call at each position; sampled above ", term("tau_s", "τ_s"), ` = ${line.tau_s}.`], ...probabilities(line.text, line.positions, line.tau_s)),
    step("Sampled calls, results and losses", "A sample is discarded, or its call is run and scored.", table("Samples", [
      { title: "position", number: true, cell: one => String(one.position) },
      { title: "sampled", cell: one => foreign(one.input ?? one.body ?? "") },
      { title: "result", cell: one => (one.result === null || one.result === undefined ? el("span", { className: "soft" }, one.reason ? verdictName(one.reason) : "–") : foreign(one.result)) },
      { title: term("times", "times"), number: true, cell: one => count(one.times) },
      { title: term("loss_empty", "L(ε)"), number: true, cell: one => nats(one.loss_empty) },
      { title: term("loss_call", "L(c)"), number: true, cell: one => nats(one.loss_call) },
      { title: term("loss_result", "L(c, r)"), number: true, cell: one => nats(one.loss_result) },
      { title: term("delta", "Δ"), number: true, cell: one => nats(one.delta) },
      { title: "verdict", cell: one => (one.verdict ? verdictMark(one.verdict) : "–") },
    ], sampled)),
    step("The augmented text", line.tau_f !== undefined ? threshold(line) : line.augmented.some(piece => piece.call) ? null : "No call stays.",
      el("div", { className: "text" }, line.augmented.map(piece => (piece.call ? el("mark", {}, foreign(piece.text)) : foreign(piece.text))))));
}

// A text, from what its line has left: in the lake, or in the trial of a `typed` text.
function stepsOf(overview, key, text, typed) {
  const tool = overview.tools.find(one => one.tool === key.tool), tau = chosenTau(tool);
  const verdictOf = call => (typed ? (call.kept ? "kept" : call.reason) : shownVerdict(call, tool, tau));
  const own = text.calls.filter(call => call.tool === key.tool && String(call.segment) === String(key.segment ?? 0));
  const answers = new Map(text.results.map(result => [result.input, result]));
  const single = text.samples.map(sample => {
    const call = own.find(one => one.position === sample.position && one.sample === sample.sample);
    const answer = answers.get(sample.input);
    const verdict = call ? verdictOf(call) : sample.reason ?? answer?.reason;
    return { ...sample, ...(call ?? {}), result: call?.result ?? answer?.result, reason: sample.reason ?? answer?.reason ?? call?.reason, verdict };
  });
  const chains = own.filter(call => call.chain).map(call => ({ ...call, input: written(call, tool.name), verdict: verdictOf(call) }));
  const places = new Map(text.samples.map(sample => [sample.char_offset, { char: sample.char_offset - text.offset, p: sample.p_api }]));
  const characters = Array.from(text.text), augmented = [];
  let done = 0;
  for (const call of own.filter(one => verdictOf(one) === "kept").sort((a, b) => a.char_offset - b.char_offset)) {
    const place = call.char_offset - text.offset;
    augmented.push({ text: characters.slice(done, place).join("") }, { text: ` ${written(call, tool.name).replaceAll(" → ", " -> ")}`, call: true });
    done = place;
  }
  augmented.push({ text: characters.slice(done).join("") });
  const line = { text: text.text, wanted: typed ? null : text.wanted, positions: [...places.values()], samples: distinct([...single, ...chains]), augmented };
  return steps(typed ? { ...line, positions: text.positions, tau_s: text.tau_s, tau_f: text.tau_f, by_chance: text.by_chance } : line);
}

function trying(overview) {
  const answer = el("div", { "aria-live": "polite" });
  const field = el("textarea", { rows: 4, maxlength: 4000, "aria-label": "A text" }, state("typed") || "In total there were 17 + 25 = 42 apples in the basket.");
  const context = el("input", { type: "date", value: state("context") });
  const chooser = el("select", {}, overview.tools.map(tool => el("option", { value: tool.tool }, tool.name)));
  chooser.value = state("tool") || overview.tools[0]?.tool;
  const running = async (work, show) => {
    set({ typed: field.value, context: context.value, tool: chooser.value }, { quietly: true });
    answer.replaceChildren(el("p", {}, "The model computes; the first time it is loaded."));
    try {
      answer.replaceChildren(show(await work()));
    } catch (error) {
      answer.replaceChildren(el("p", { role: "alert" }, String(error.message)));
    }
  };
  const line = () => running(() => data.line({ tool: chooser.value, text: field.value, context: context.value }), found => stepsOf(overview, { tool: chooser.value }, found, true));
  const complete = () => running(() => data.complete({ text: field.value, context: context.value }), found =>
    el("div", {}, el("h3", {}, "The text with what the model wrote"),
      el("div", { className: "text" }, foreign(field.value), el("mark", {}, foreign(found.text))),
      found.calls.length ? table("Calls", [
        { title: "call", cell: call => foreign(`${call.tool}(${call.input})`) },
        { title: "result", cell: call => (call.result === null ? el("span", { className: "soft" }, call.reason) : foreign(call.result)) },
      ], found.calls) : el("p", { className: "soft" }, "It made no call.")));
  return el("section", { "aria-label": "Try" }, el("h2", {}, "Try a text"),
    el("form", { className: "try", onsubmit: event => event.preventDefault() }, field,
      el("div", { className: "filter" }, el("label", {}, "tool", chooser), el("label", {}, "date of the text", context),
        el("button", { type: "button", onclick: line }, "Run the line"), el("button", { type: "button", onclick: complete }, "Complete with calls"))), answer);
}

export async function pipeline(overview) {
  const chosen = chosenCall(overview);
  const parts = [];
  if (chosen) {
    const { position, sample, ...key } = chosen;
    const text = await data.text(key);
    const tool = overview.tools.find(one => one.tool === key.tool);
    parts.push(el("h2", {}, `${tool.name}: `, foreign(text.title || key.digest)), el("p", { className: "soft" }, foreign(text.url)), stepsOf(overview, key, text));
  } else {
    parts.push(el("p", {}, "Choose a call in ", el("a", { href: link({ view: "calls" }) }, "the list of calls"), " to see the pipeline of its text: none is kept yet."));
  }
  if (overview.live && !offline && overview.tools.length) parts.push(trying(overview));
  return el("div", {}, parts);
}
