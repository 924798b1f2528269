// The page: which view is shown, and what the address asks for.

import { calls } from "./calls.js";
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
};
const main = document.getElementById("main");
let overview, shown = 0;

function navigation(current) {
  document.getElementById("views").replaceChildren(...Object.entries(VIEWS).map(([name, [title]]) =>
    el("a", { href: link({ view: name }), "aria-current": name === current ? "page" : null }, title)));
}

async function show() {
  const mine = ++shown;
  const name = Object.hasOwn(VIEWS, state("view")) ? state("view") : "thresholds";
  navigation(name);
  document.title = `${VIEWS[name][0]} · toolformer-dag explore`;
  try {
    if (!overview) {
      overview = await data.overview();
      document.getElementById("about").replaceChildren(foreign(overview.about));
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
  const name = Object.keys(VIEWS)[[...event.currentTarget.children].indexOf(event.target)];
  if (name) event.target.href = link({ view: name });
}

listen(show);
show();
