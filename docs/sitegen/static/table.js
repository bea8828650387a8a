// Tables that a reader searches, filters and sorts. Everything works on the rows of the page; nothing is loaded.
"use strict";

const textOf = (row, column) => row.cells[column].textContent.trim();

function compare(a, b) {
  const [x, y] = [parseFloat(a), parseFloat(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  // Rows without a number come last.
  if (!Number.isNaN(x)) return -1;
  if (!Number.isNaN(y)) return 1;
  return a.localeCompare(b);
}

function sort(rows, heads, column) {
  const falling = heads[column].getAttribute("aria-sort") === "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", falling ? "descending" : "ascending");
  const sign = falling ? -1 : 1;
  rows.sort((a, b) => sign * compare(textOf(a, column), textOf(b, column)));
  rows[0].parentElement.append(...rows);
}

function controlled(table) {
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows];
  const controls = document.createElement("div");
  controls.className = "table-controls";
  controls.innerHTML = '<label>Search <input type="search" placeholder="words"></label>';
  const selects = new Map();
  for (const heading of table.parentElement.dataset.filters.split("|")) {
    const column = heads.findIndex((head) => head.textContent === heading);
    const values = [...new Set(rows.map((row) => textOf(row, column)))].filter(Boolean).sort();
    const select = document.createElement("select");
    select.append(new Option("all", ""), ...values.map((value) => new Option(value)));
    const label = document.createElement("label");
    label.append(heading, select);
    controls.append(label);
    selects.set(column, select);
  }
  const count = document.createElement("span");
  count.className = "count";
  controls.append(count);
  const update = () => {
    const words = controls.querySelector("input").value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const chosen = [...selects].every(([column, select]) => !select.value || textOf(row, column) === select.value);
      row.hidden = !chosen || !words.every((word) => text.includes(word));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  for (const kind of ["input", "change"]) controls.addEventListener(kind, update);
  heads.forEach((head, column) => head.addEventListener("click", () => sort(rows, heads, column)));
  table.parentElement.before(controls);
  update();
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("table.interactive").forEach(controlled));
