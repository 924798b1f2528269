// The page: which view is shown, and what the address asks for.

import { calls } from "./calls.js";
import { conversations } from "./conversations.js";
import { data } from "./data.js";
import { el, foreign } from "./elements.js";
import { pipeline } from "./pipeline.js";
import { runs } from "./runs.js";
import { link, listen, state } from "./state.js";
import { texts } from "./texts.js";
import { thresholds } from "./thresholds.js";

const VIEWS = {
  thresholds: ["Thresholds", thresholds],
  calls: ["Calls", calls],
  text: ["Text", texts],
  pipeline: ["Pipeline", pipeline],
  runs: ["Evaluation and costs", runs],
  traces: ["Conversations", conversations],
};
const main = document.getElementById("main");
let overview, shown = 0;

// Conversations are there once `judge` has read some; where that is all that was done, there is nothing else.
const isThere = name => Object.hasOwn(VIEWS, name) && (name === "traces" ? Boolean(overview?.traces) : !(overview?.traces && !overview.tools.length));
const viewNames = () => Object.keys(VIEWS).filter(isThere);

function navigation() {
  const current = isThere(state("view")) ? state("view") : viewNames()[0];
  document.getElementById("views").replaceChildren(...viewNames().map(name =>
    el("a", { href: link({ view: name }), "aria-current": name === current ? "page" : null }, VIEWS[name][0])));
  document.title = `${VIEWS[current][0]} · toolformer-dag explore`;
  return current;
}

async function show() {
  const mine = ++shown;
  let name = navigation();
  try {
    if (!overview) {
      overview = await data.overview();
      const judge = overview.judge ? ` · conversations judged by ${overview.judge}` : "";
      document.getElementById("about").replaceChildren(foreign(overview.about + judge));
      name = navigation();
    }
    const made = await VIEWS[name][1](overview);
    if (mine !== shown) return;
    main.replaceChildren(made);
  } catch (error) {
    if (mine !== shown) return;
    main.replaceChildren(el("p", { role: "alert" }, String(error.message)));
  }
  main.dataset.view = name;
}

document.getElementById("views").addEventListener("focusin", event => keep(event));
document.getElementById("views").addEventListener("pointerdown", event => keep(event));
// A slider changes the address without drawing the links anew.
function keep(event) {
  const name = viewNames()[[...event.currentTarget.children].indexOf(event.target)];
  if (name) event.target.href = link({ view: name });
}

listen(show);
show();
