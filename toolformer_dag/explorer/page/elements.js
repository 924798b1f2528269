// Elements without HTML in strings: whatever the corpus, a tool or the model wrote is text.

const SVG = "http://www.w3.org/2000/svg";
// Controls, invisible and bidirectional marks: shown by their number, so that they hide and reorder nothing.
const MARKS =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/g;

export function el(tag, properties = {}, ...kids) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  made.append(...kids.flat(Infinity).filter(kid => kid !== null && kid !== undefined));
  return made;
}

export function svg(tag, properties = {}, ...kids) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
  made.append(...kids);
  return made;
}

// Text of others, isolated from the text around it.
export function foreign(text, className) {
  const made = el("bdi", { className });
  const whole = String(text ?? "");
  let at = 0;
  for (const match of whole.matchAll(MARKS)) {
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    made.append(whole.slice(at, match.index), el("span", { className: "mark" }, `U+${code}`));
    at = match.index + match[0].length;
  }
  made.append(whole.slice(at));
  return made;
}

export const count = number => (number === null || number === undefined ? "–" : number.toLocaleString("en"));
export const nats = (number, digits = 3) => (number === null || number === undefined ? "–" : number.toFixed(digits));

export function table(caption, columns, rows, options = {}) {
  const head = el("tr", {}, columns.map(column => el("th", { scope: "col", className: column.number ? "number" : null }, column.title)));
  const body = rows.map(row =>
    el("tr", {}, columns.map((column, at) => {
      const content = column.cell(row);
      const properties = { className: column.number ? "number" : null };
      return at === 0 && options.rowHeads ? el("th", { scope: "row", ...properties }, content) : el("td", properties, content);
    })));
  const made = el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { className: "scroll", tabindex: 0, role: "region", "aria-label": caption }, made);
}

export function download(name, type, content) {
  const link = el("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A spreadsheet would run a cell that begins like a formula.
export function csv(rows) {
  const cell = value => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
