// Where the numbers come from: the server that sent the page, or, in an exported page, the page itself.

import { KEY } from "./state.js";

const exported = document.getElementById("exported");
const stored = exported ? JSON.parse(exported.textContent) : null;
export const offline = stored !== null;

// The parameters stand in the address; what the model is asked stands in the body, which has room for a long text.
async function ask(name, parameters = {}, method = "GET") {
  const fields = new URLSearchParams(parameters);
  const answer = await (method === "GET" ? fetch(`api/${name}?${fields}`) : fetch(`api/${name}`, { method, body: fields }));
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

const same = (call, key, names) => names.every(name => String(call[name]) === String(key[name]));

// Which calls have these reasons follows from the threshold: REASONS_OF_THRESHOLD of the server.
const reasonsOfThreshold = ["no_threshold", "below_tau_f", "not_best_at_position"];

// The verdict of a call at a threshold, as VERDICT of the server gives it.
export function verdictAt(call, tau) {
  if (!call.eligible) return call.reason;
  if (!(call.delta >= tau)) return "below_tau_f";
  return call.best ? "kept" : "not_best_at_position";
}

function storedCalls(asked) {
  const tau = Number(asked.tau);
  const text = (asked.text ?? "").toLowerCase();
  const wanted = stored.calls.filter(call => {
    const verdict = verdictAt(call, tau);
    return call.tool === asked.tool && (!asked.domain || call.domain === asked.domain)
      && (!text || `${call.input}\u0000${call.result}`.toLowerCase().includes(text))
      && (!asked.verdict || (verdict === "kept") === (asked.verdict === "kept"))
      && (!asked.reason || (reasonsOfThreshold.includes(asked.reason) ? verdict : call.reason) === asked.reason);
  });
  const scored = wanted.filter(call => call.delta !== null).sort((a, b) => b.delta - a.delta);
  const near = stored.overview.near;
  const above = scored.filter(call => call.delta >= tau).slice(-near);
  const below = scored.filter(call => call.delta < tau).slice(0, near);
  const unscored = wanted.filter(call => call.delta === null).slice(0, near);
  const nearest = [...above, ...below].sort((a, b) => Math.abs(a.delta - tau) - Math.abs(b.delta - tau));
  return { rows: [...nearest, ...unscored].map(call => ({ ...call, verdict: verdictAt(call, tau) })) };
}

// The rows are those with the lowest gains of all, so also of those that fit.
function storedRecorded(asked) {
  const fits = one => (!asked.tool || one.tool === asked.tool) && (!asked.verdict || one.verdict === asked.verdict);
  const { rows, counts, ...names } = stored.recorded;
  const fitting = counts.filter(fits).reduce((sum, one) => sum + one.calls, 0);
  return { ...names, rows: rows.filter(fits), fitting };
}

const online = {
  overview: () => ask("overview"),
  calls: asked => ask("calls", asked),
  excerpts: rows => ask("excerpts", { rows: rows.join(",") }),
  text: key => ask("text", key),
  call: key => ask("call", key),
  tokens: key => ask("tokens", key, "POST"),
  line: asked => ask("line", asked, "POST"),
  complete: asked => ask("complete", asked, "POST"),
  outcomes: () => ask("outcomes"),
  pairs: asked => ask("pairs", asked),
  questions: asked => ask("questions", asked),
  recorded: asked => ask("recorded", asked),
  conversation: key => ask("conversation", key),
};

const missing = () => Promise.reject(new Error("This is not part of the exported page; run toolformer-dag explore."));
const kept = (listed, asked) => listed.find(one => Object.entries(asked).every(([name, value]) => one[name] === value))?.rows ?? missing();
const inPage = {
  overview: async () => stored.overview,
  calls: async asked => storedCalls(asked),
  excerpts: async () => ({ rows: stored.excerpts }),
  text: async key => stored.texts.find(text => same(text, key, KEY.slice(0, 4))) ?? missing(),
  call: missing,
  tokens: missing,
  line: missing,
  complete: missing,
  outcomes: async () => stored.outcomes,
  pairs: async asked => kept(stored.pairs, asked),
  questions: async asked => kept(stored.questions, asked),
  recorded: async asked => storedRecorded(asked),
  conversation: async key => stored.conversations.find(one => same(one, key, Object.keys(key)))?.shown ?? missing(),
};

export const data = offline ? inPage : online;
