// What the words and signs of the page mean, a line each, on hover.

import { el } from "./elements.js";

const TERMS = {
  p: "The model's probability that a call begins here; positions above τ_s get samples.",
  delta: "Δ = L⁻ − L⁺, in nats: by how much a call with its result lowers the loss of what follows.",
  tau_f: "τ_f: a call is kept where Δ is at least this much, in nats.",
  tau_s: "τ_s: positions where a call is at least this probable get samples.",
  swap: "A swap: the same call with the result that another document got; the control of what chance keeps.",
  by_chance: "Positions that would be kept if each call had a result of another document; in brackets the 95 % interval.",
  fdr: "False discovery rate: the share of the kept positions that would be kept by chance; at most: its 95 % bound.",
  echo: "Δ of the result of another input that holds the same words: what the words alone gain.",
  source: "Who proposed the call: the model by sampling, a rule that reads the text, or a file of calls.",
  loss_empty: "L(ε): loss of what follows without a call, in nats.",
  loss_call: "L(c): loss with the call before the text, without its result.",
  loss_result: "L(c, r): loss with the call and its result before the text; L⁺.",
  gain: "Mean loss of what the assistant writes next with swapped results, less that with the recorded result; nats per token.",
  swapped_gain: "What the result of another conversation gains over the other swapped results of this call: gain by chance.",
  gain_threshold: "The gain above which the call helps: relative to the loss, a share of all swapped results gains more (traces.share).",
  overlap: "The share of the words that the assistant writes next which stand in the result; needs no model.",
  times: "How many samples at this position were this same call.",
};

export const term = (name, shown) => el("span", { className: "term", title: TERMS[name] }, shown);
