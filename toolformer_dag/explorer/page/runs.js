// Evaluation, training and costs: tables that the warehouse has once these were run.

import { data } from "./data.js";
import { count, el, foreign, nats, svg, table } from "./elements.js";
import { set, state } from "./state.js";

const CURVE_WIDTH = 640, CURVE_HEIGHT = 180, MOST_GOLD = 6;
const absent = (what, by) => el("p", { className: "soft" }, `${what} not in the warehouse yet. It comes with `, el("code", {}, by), ".");
const percent = share => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
const plain = value => (value === null || value === undefined ? "–" : typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : foreign(value));
const right = gold => gold.slice(0, MOST_GOLD).join(" / ") + (gold.length > MOST_GOLD ? ` and ${gold.length - MOST_GOLD} more` : "");

function columnsOf(rows, names = Object.keys(rows[0])) {
  return names.map(name => ({ title: name.replaceAll("_", " "), number: rows.every(row => typeof row[name] === "number" || row[name] === null), cell: row => plain(row[name]) }));
}

// One condition against another: where do tools help, and where do they harm?
function compared(conditions, preferred) {
  const [one, other] = ["one", "other"].map((name, at) => (conditions.includes(state(name)) ? state(name) : preferred[at]));
  const place = el("div"), listed = el("div", { className: "listed", "aria-live": "polite" });
  const choose = (name, title, value) => {
    const made = el("select", { onchange: () => set({ [name]: made.value }) }, conditions.map(condition => el("option", { value: condition }, condition)));
    made.value = value;
    return el("label", {}, title, made);
  };
  const failed = where => error => where.replaceChildren(el("p", { role: "alert" }, String(error.message)));
  const ask = async (benchmark, which, all) => {
    set({ benchmark, which }, { quietly: true });
    const rows = await data.questions({ one, other, benchmark, which });
    const some = rows.length < all ? `; the first ${count(rows.length)} of ${count(all)}` : "";
    const written = (text, correct) => el("div", { className: `written ${correct ? "kept" : "lost"}` }, correct ? "✓ " : "✗ ", foreign(text));
    listed.replaceChildren(table(`${benchmark}: ${which === "won" ? "answered" : "missed"} by ${one} alone${some}`, [
      { title: "question", cell: row => el("div", { className: "written" }, String(row.question), ": ", foreign(row.prompt)) },
      { title: "right", cell: row => el("div", { className: "written" }, foreign(right(row.gold ?? []))) },
      { title: one, cell: row => written(row.written, row.correct) },
      { title: other, cell: row => written(row.other_written, row.other_correct) },
      { title: "calls", cell: row => (row.calls?.length ? row.calls.map(call => el("div", { className: "written" }, foreign(`${call.tool}(${call.input}) → ${call.result ?? "no result"}`))) : "–") },
    ], rows));
  };
  const button = (row, which) => el("button", { type: "button", onclick: () => ask(row.benchmark, which, row[which]).catch(failed(listed)), "aria-label": `${row[which]} ${which} in ${row.benchmark}` }, count(row[which]));
  data.pairs({ one, other }).then(rows => {
    place.replaceChildren(rows.length ? table(`${one} against ${other}; needless: a call after which the answer is no better`, [
      { title: "benchmark", cell: row => foreign(row.benchmark) },
      { title: "questions", number: true, cell: row => count(row.questions) },
      { title: "with a call", number: true, cell: row => count(row.called) },
      { title: "of these needless", number: true, cell: row => (row.called ? `${count(row.needless)} (${percent(row.needless / row.called)})` : "–") },
      { title: "won", number: true, cell: row => button(row, "won") },
      { title: "lost", number: true, cell: row => button(row, "lost") },
      { title: "both right", number: true, cell: row => count(row.both) },
    ], rows, { rowHeads: true }) : el("p", { className: "soft" }, "No question was asked under both."));
    const chosen = rows.find(row => row.benchmark === state("benchmark")), which = state("which");
    if (chosen && ["won", "lost"].includes(which)) ask(chosen.benchmark, which, chosen[which]).catch(failed(listed));
  }).catch(failed(place));
  return el("div", {}, el("div", { className: "filter" }, choose("one", "condition", one), choose("other", "against", other)), place, listed);
}

// A line per checkpoint over the steps.
function curve(rows, measure, checkpoints) {
  const points = rows.filter(row => row.measure === measure && typeof row.value === "number");
  if (points.length < 2) return null;
  const steps = points.map(row => row.step), values = points.map(row => row.value);
  const [low, high, last] = [Math.min(...values), Math.max(...values), Math.max(...steps)];
  const x = step => 44 + (step / Math.max(1, last)) * (CURVE_WIDTH - 60);
  const y = value => CURVE_HEIGHT - 24 - ((value - low) / Math.max(1e-9, high - low)) * (CURVE_HEIGHT - 40);
  const lines = checkpoints.map((one, number) => {
    const own = points.filter(row => row.checkpoint === one).sort((a, b) => a.step - b.step);
    const last = own.at(-1), ink = `curve tool-${number % 6}`;
    const end = last ? [svg("circle", { cx: x(last.step), cy: y(last.value), r: 3.5, class: ink })] : []; // a line of one point shows nothing
    return [svg("path", { d: own.map((row, at) => `${at ? "L" : "M"}${x(row.step)} ${y(row.value)}`).join(""), class: ink }), ...end];
  });
  const marks = [low, high].map(value => svg("text", { x: 0, y: y(value) + 4, class: "axis" }, nats(value, 2)));
  const end = svg("text", { x: CURVE_WIDTH - 16, y: CURVE_HEIGHT - 6, class: "axis", "text-anchor": "end" }, `step ${count(last)}`);
  return el("div", {}, el("h3", {}, foreign(measure)),
    svg("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`, class: "curves", role: "img", "aria-label": `${measure} over the steps of training, from ${nats(low)} to ${nats(high)}` },
      svg("path", { d: `M44 ${CURVE_HEIGHT - 24}H${CURVE_WIDTH}`, class: "floor" }), ...lines.flat(), ...marks, end));
}

function training(rows) {
  const checkpoints = [...new Set(rows.map(row => row.checkpoint))], measures = [...new Set(rows.map(row => row.measure))];
  const legend = el("p", { className: "legend" }, checkpoints.map((one, number) => [el("span", { className: `key line tool-${number % 6}` }), foreign(one), " "]));
  return [legend, ...measures.map(measure => curve(rows, measure, checkpoints)),
    el("details", {}, el("summary", {}, "As numbers"), table("Training", columnsOf(rows), rows))];
}

function costs(rows) {
  return table("Costs of the steps, the last first", [
    { title: "ended, UTC", cell: row => String(row.ended ?? "").slice(0, 16).replace("T", " ") },
    { title: "run", cell: row => foreign(String(row.run ?? "").slice(0, 8)) },
    { title: "stage", cell: row => foreign([row.tool, row.stage].filter(Boolean).join("/")) },
    { title: "seconds", number: true, cell: row => nats(row.seconds, 1) },
    ...["tokens", "calls", "computed", "reused"].map(name => ({ title: name, number: true, cell: row => plain(row[name]) })),
    { title: "cache hits", number: true, cell: row => (row.computed + row.reused ? percent(row.reused / (row.computed + row.reused)) : "–") },
    { title: "ended as", cell: row => (row.failed === null ? "–" : row.failed ? el("strong", {}, "failed") : "done") },
  ], rows);
}

export async function runs() {
  const found = await data.outcomes();
  const section = (title, rows, made) => el("section", {}, el("h2", {}, title), rows.length ? made() : absent("This is", found.made_by));
  const shares = ["accuracy", "low", "high", "calls", "right_tool"];
  return el("div", {},
    section("Questions won and lost", found.conditions, () => compared(found.conditions, found.compared)),
    section("Accuracy", found.accuracy, () => table("Accuracy", columnsOf(found.accuracy, ["benchmark", "condition", "n"]).concat(
      shares.map(name => ({ title: name.replaceAll("_", " "), number: true, cell: row => percent(row[name]) }))), found.accuracy)),
    section("Perplexity", found.perplexity, () => table("Perplexity", columnsOf(found.perplexity), found.perplexity)),
    section("Training", found.training_curve, () => el("div", {}, training(found.training_curve))),
    section("Costs", found.costs, () => costs(found.costs)));
}
