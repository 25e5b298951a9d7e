
"use strict";
// Tables: a click or the keyboard on a heading sorts, again reverses.
function sortKey(cell) {
  const text = (cell.firstChild ? cell.firstChild.textContent : "").trim().replace(/\u2212/g, "-");
  const found = text.replace(/,(?=\d{3})/g, "").match(/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?/);
  return found ? Number(found[0]) : text;
}
function sortTable(table, index, button) {
  const heading = button.parentNode;
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const rows = Array.from(table.tBodies[0].rows, (row) => [sortKey(row.cells[index]), row]);
  rows.sort(([a], [b]) => {
    // Cells without a value stay below, whichever way the rest goes.
    const gone = (value) => value === "" || value === "\u2013";
    if (gone(a) || gone(b)) return gone(a) - gone(b);
    const kind = (typeof a === "string") - (typeof b === "string");
    const order = kind || (typeof a === "string" ? a.localeCompare(b) : a - b);
    return ascending ? order : -order;
  });
  for (const [, row] of rows) table.tBodies[0].append(row);
}
for (const table of document.querySelectorAll("table[data-sort]")) {
  Array.from(table.tHead.rows[0].cells).forEach((heading, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    const arrow = document.createElement("span");
    arrow.className = "arrow";
    arrow.setAttribute("aria-hidden", "true");
    button.insertBefore(arrow, button.querySelector("small"));
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sortTable(table, index, button));
  });
}
// Steps: put on the page as text when they are opened.
function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function shownStep(parts) {
  const box = element("pre", undefined, "step");
  box.tabIndex = 0;
  let first = true;
  for (const [text, differs] of parts) {
    if (!differs) box.append(text);
    else {
      box.append(element("mark", text, first ? "first" : ""));
      first = false;
    }
  }
  return box;
}
// Lengths in turn: what both steps have, what the other lacks, what both have, and so on.
function cut(text, lengths) {
  const points = Array.from(text);
  let start = 0;
  return lengths.map((length, place) => [points.slice(start, (start += length)).join(""), place % 2]);
}
function fill(details, exact, method) {
  const pair = element("div", undefined, "pair");
  for (const [title, parts] of [["exact top-k", cut(exact, method.left)], [method.label, cut(method.step, method.right)]]) {
    const side = element("div");
    side.append(element("h5", title), shownStep(parts));
    pair.append(side);
  }
  details.append(pair);
}
function folded(id, title, note, open) {
  const details = element("details");
  details.id = id;
  const summary = element("summary", title);
  if (note) summary.append(" ", element("span", note, "error"));
  details.append(summary);
  let done = false;
  details.addEventListener("toggle", () => {
    if (details.open && !done) {
      done = true;
      open(details);
    }
  });
  return details;
}
for (const viewer of document.querySelectorAll("[data-steps]")) {
  const sessions = JSON.parse(document.getElementById(viewer.dataset.steps).textContent);
  sessions.forEach((session, number) => {
    const prefix = `${viewer.dataset.prefix}-${number}`;
    viewer.append(element("h4", session.title));
    const about = session.recorded === null ? "Sources" : "Sources and the recorded step";
    viewer.append(
      folded(`${prefix}-sources`, about, "", (details) => {
        const list = element("ul", undefined, "long");
        for (const source of session.sources) list.append(element("li", source));
        details.append(list);
        if (session.recorded !== null) details.append(shownStep([[session.recorded, 0]]));
      })
    );
    session.steps.forEach((at, place) => {
      at.methods.forEach((method, index) => {
        const title = (at.k ? `${at.k}: ` : "") + method.label;
        const id = `${prefix}-${place}-${index}`;
        viewer.append(folded(id, title, `(${method.facts})`, (details) => fill(details, at.exact, method)));
      });
    });
  });
}
// A link to something folded away opens it.
function reveal() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();
