// Recorded conversations that `judge` read: calls by gain, one conversation, and the swapped results of a call.

import { verdictName } from "./calls.js";
import { data } from "./data.js";
import { count, el, foreign, nats, svg, table } from "./elements.js";
import { decodeKey, encodeKey, link, set, state } from "./state.js";
import { term } from "./terms.js";

const TRACE_KEY = ["conversation", "turn", "call"];
const GAIN_EDGES = [-1, -0.25, -0.05, 0.05, 0.25, 1]; // nats per token; seven colours, orange to blue
const AXIS_WIDTH = 320, AXIS_HEIGHT = 120, AXIS_FLOOR = 92, AXIS_PAD = 14;

const gainStep = gain => (gain === null ? "gain-none" : `gain-${GAIN_EDGES.filter(edge => gain >= edge).length}`);
const signed = number => (number === null ? "–" : (number < 0 ? "−" : "+") + nats(Math.abs(number)));
const gainMark = gain => el("span", { className: `gain ${gainStep(gain)}` }, signed(gain));
const SHORT_NAME = 28; // characters; a name up to this long is not broken
const traceKey = call => encodeKey(call, TRACE_KEY);

function verdictOfTrace(call) {
  const signs = { helps: ["kept", "✓ "], "does not help": ["lost", "✗ "] };
  const [className, sign] = signs[call.verdict] ?? [null, ""];
  return el("span", { className }, sign, call.verdict);
}

// Where a conversation was read, and the id that its record has.
function placeName(call) {
  const name = el("span", { className: call.conversation.length <= SHORT_NAME ? "unbroken" : null }, foreign(call.conversation));
  return call.record_id === null ? name : [name, " ", el("span", { className: "soft" }, foreign(call.record_id))];
}

// A text that the server cut says how long it is.
function cutText(text, length) {
  if (text === null) return el("span", { className: "soft" }, "none is recorded");
  const more = length - Array.from(text).length;
  return [foreign(text), more > 0 ? el("span", { className: "soft" }, ` … ${count(more)} more characters`) : null];
}

function gainLegend() {
  const names = GAIN_EDGES.map((edge, at) => (at ? `from ${GAIN_EDGES[at - 1]} to ${edge}` : `below ${edge}`)).concat(`${GAIN_EDGES.at(-1)} and more`);
  return el("p", { className: "legend" }, term("gain", "Gain"), " of a call, nats per token: ",
    names.map((name, at) => [el("span", { className: `gain gain-${at}` }, name.replaceAll("-", "−")), " "]), el("span", { className: "gain gain-none" }, "– not measured"));
}

// The gains of the swapped results as dots, the call's own as a triangle, the threshold as a dashed line.
function swappedAxis(found, call) {
  const gains = found.swapped.map(one => one.gain), marks = [...gains, call.gain, found.threshold, 0].filter(one => one !== null);
  const low = Math.min(...marks), high = Math.max(...marks), wide = high - low || 1;
  const x = gain => AXIS_PAD + ((gain - low) / wide) * (AXIS_WIDTH - 2 * AXIS_PAD);
  const label = (gain, y, text) => svg("text", { x: x(gain), y, class: "axis", "text-anchor": x(gain) > AXIS_WIDTH * 0.7 ? "end" : x(gain) < AXIS_WIDTH * 0.3 ? "start" : "middle" }, text);
  const dots = gains.map((gain, at) => svg("circle", { cx: x(gain), cy: AXIS_FLOOR - 8 - (at % 4) * 7, r: 4.5, class: "swapped" }, svg("title", {}, `swapped ${signed(gain)}`)));
  const own = svg("path", { d: `M${x(call.gain)} ${AXIS_FLOOR - 2}l-6 -12h12Z`, class: "own" }, svg("title", {}, `this call ${signed(call.gain)}`));
  const threshold = found.threshold === null ? [] : [
    svg("line", { x1: x(found.threshold), x2: x(found.threshold), y1: 34, y2: AXIS_FLOOR, class: "tau dashed" }), label(found.threshold, 30, `threshold ${signed(found.threshold)}`)];
  const said = `Gain of this call ${signed(call.gain)}; of its swapped results ${gains.map(signed).join(", ")}; threshold ${signed(found.threshold)}`;
  return svg("svg", { viewBox: `0 0 ${AXIS_WIDTH} ${AXIS_HEIGHT}`, role: "img", "aria-label": said }, svg("path", { d: `M0 ${AXIS_FLOOR}H${AXIS_WIDTH}M${x(0)} ${AXIS_FLOOR}v6`, class: "floor" }),
    svg("text", { x: x(0), y: AXIS_FLOOR + 18, class: "axis", "text-anchor": "middle" }, "0"), ...threshold, ...dots, own, label(call.gain, 14, `this call ${signed(call.gain)}`));
}

function swappedResults(found, call) {
  const entry = (name, ...value) => [el("dt", {}, name), el("dd", {}, ...value)];
  const head = [el("h2", {}, foreign(call.tool)), el("dl", {}, entry("verdict", verdictOfTrace(call)), entry("reason", verdictName(call.reason)), entry(term("gain", "gain"), gainMark(call.gain)),
    entry(term("gain_threshold", "threshold"), found.threshold === null ? "too few swapped results to tell" : `${signed(found.threshold)}; ${100 * found.share} % of swapped results gain more by chance`),
    entry("delta", signed(call.delta)), entry(term("overlap", "overlap"), nats(call.overlap, 2)), entry("weighted tokens", count(call.tokens)))];
  const card = el("article", { className: "card", "aria-label": "The chosen call" }, head);
  if (call.gain === null) card.append(el("p", { className: "soft" }, "No gain was measured for this call."));
  else card.append(el("h3", {}, term("swapped_gain", "Swapped results"), ": dots; this call: ▼"), swappedAxis(found, call), table("Results of other conversations", [
    { title: "gain", number: true, cell: one => signed(one.gain) },
    { title: "result", cell: one => el("div", { className: "written" }, cutText(one.result, one.result_length)) },
    { title: term("overlap", "overlap"), number: true, cell: one => nats(one.overlap, 2) },
  ], found.swapped));
  return card;
}

function recordedCall(call, chosen, choose) {
  const arrow = chosen ? "▶ " : "";
  return el("div", { className: `recorded ${gainStep(call.gain)}`, "aria-current": chosen ? "true" : null },
    el("p", {}, arrow, choose(call, foreign(call.tool)), " ", el("b", {}, signed(call.gain)), ` · ${call.verdict} · ${verdictName(call.reason)}`),
    el("dl", {}, el("dt", {}, "arguments"), el("dd", {}, cutText(call.arguments, call.arguments_length)), el("dt", {}, "result"), el("dd", {}, cutText(call.result, call.result_length))));
}

function inConversation(found, key, choose) {
  const isChosen = call => TRACE_KEY.every(name => String(call[name]) === String(key[name]));
  const messages = found.said.map(one => el("div", { className: "said" }, el("h3", {}, `${one.number} · `, foreign(one.role)), one.text ? cutText(one.text, one.length) : null,
    found.calls.filter(call => call.turn === one.number).map(call => recordedCall(call, isChosen(call), choose))));
  const some = found.said.length < found.messages ? `; of ${count(found.messages)} messages those from ${found.first} to ${found.first + found.said.length - 1}` : "";
  const call = found.calls.find(isChosen);
  const place = el("div", { className: "scroll tall talk", tabindex: 0, role: "region", "aria-label": "The conversation" }, messages);
  return [el("section", {}, el("h2", {}, placeName(call), some), place), swappedResults(found, call)];
}

export function conversations() {
  const body = el("tbody"), told = el("output", { "aria-live": "polite" }), right = el("div", { className: "right" });
  const form = el("form", { className: "filter", onsubmit: event => event.preventDefault() });
  let listing = 0, opening = 0;
  const failed = where => error => where.replaceChildren(el("p", { role: "alert" }, String(error.message)));

  // A link that can be copied; a plain click keeps the list where it is.
  function choose(call, ...shown) {
    return el("a", { href: link({ view: "traces", "trace.at": traceKey(call) }), onclick: event => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      set({ "trace.at": traceKey(call) }, { quietly: true });
      openCall(call).catch(failed(right));
    } }, shown);
  }

  async function openCall(key) {
    const mine = ++opening;
    for (const row of body.children) row.ariaCurrent = row.dataset.key === traceKey(key) ? "true" : null;
    const found = await data.conversation(Object.fromEntries(TRACE_KEY.map(name => [name, key[name]])));
    if (mine !== opening) return;
    right.replaceChildren(...inConversation(found, key, choose));
    const place = right.querySelector(".tall"), box = right.querySelector(".recorded[aria-current]");
    place.scrollTop = box.getBoundingClientRect().top - place.getBoundingClientRect().top - 40;
  }

  function filters(found) {
    const choice = (name, title, values) => {
      const made = el("select", { onchange: () => { set({ [name]: made.value }, { quietly: true }); list().catch(failed(right)); } }, el("option", { value: "" }, "all"),
        values.map(value => el("option", { value }, foreign(value).textContent.slice(0, 60))));
      made.value = state(name);
      return el("label", {}, title, made);
    };
    form.replaceChildren(choice("trace.tool", "tool", found.tools), choice("trace.verdict", "verdict", found.verdicts));
  }

  async function list() {
    const mine = ++listing;
    const found = await data.recorded({ tool: state("trace.tool"), verdict: state("trace.verdict") });
    if (mine !== listing) return found;
    if (!form.children.length) filters(found);
    const chosen = state("trace.at");
    body.replaceChildren(...found.rows.map(call => el("tr", { "data-key": traceKey(call), "aria-current": traceKey(call) === chosen ? "true" : null },
      el("td", { className: "number" }, gainMark(call.gain)), el("td", {}, verdictOfTrace(call)), el("td", {}, choose(call, foreign(call.tool))),
      el("td", {}, placeName(call)), el("td", { className: "number" }, String(call.turn)))));
    const some = found.rows.length < found.fitting ? `, the ${count(found.rows.length)} with the lowest gain` : "";
    told.textContent = found.fitting ? `${count(found.fitting)} calls${some}` : "No call fits.";
    return found;
  }

  const head = el("tr", {}, [[term("gain", "gain"), true], ["verdict"], ["tool"], ["conversation"], ["turn", true]].map(([title, number]) =>
    el("th", { scope: "col", className: number ? "number" : null }, title)));
  const listed = el("div", { className: "scroll tall", tabindex: 0, role: "region", "aria-label": "Recorded calls" },
    el("table", {}, el("caption", {}, "Recorded calls, lowest gain first"), el("thead", {}, head), body));
  return list().then(found => {
    const first = decodeKey(state("trace.at"), TRACE_KEY) ?? found.rows[0];
    if (first) openCall(first).catch(failed(right));
    return el("div", {}, gainLegend(), form, el("p", { className: "soft" }, told), el("div", { className: "traces" }, listed, right));
  });
}
