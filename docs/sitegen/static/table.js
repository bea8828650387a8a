// Tables that a reader filters and sorts. Everything works on the rows that the page has; nothing is loaded.
"use strict";

function keyOf(cell) {
  return cell.dataset.value ?? cell.textContent.trim();
}

function isShown(row, words, chosen) {
  const text = row.textContent.toLowerCase();
  return words.every((word) => text.includes(word)) &&
    chosen.every(([column, value]) => keyOf(row.cells[column]) === value);
}

function update(table) {
  const controls = (kind) => [...document.querySelectorAll(`${kind}[data-table="${table.id}"]`)];
  const words = controls("input")[0].value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = controls("select").filter((each) => each.value).map((each) => [+each.dataset.column, each.value]);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !isShown(row, words, chosen);
    shown += row.hidden ? 0 : 1;
  }
  const total = table.tBodies[0].rows.length;
  document.querySelector(`[data-count="${table.id}"]`).textContent =
    shown === total ? `${total} rows` : `${shown} of ${total} rows`;
}

function compare(numbers, a, b) {
  if (!numbers) return a.localeCompare(b);
  const [x, y] = [parseFloat(a), parseFloat(b)];
  // Rows without a number come last.
  return (Number.isNaN(x) ? Infinity : x) - (Number.isNaN(y) ? Infinity : y) || 0;
}

function sort(table, head) {
  const falling = head.getAttribute("aria-sort") === "ascending";
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", falling ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows];
  const keys = new Map(rows.map((row) => [row, keyOf(row.cells[head.cellIndex])]));
  const sign = falling ? -1 : 1;
  rows.sort((a, b) => sign * compare(head.dataset.numbers === "1", keys.get(a), keys.get(b)));
  table.tBodies[0].append(...rows);
}

async function copy(button) {
  const shown = button.parentElement.querySelector("details");
  const block = shown.querySelector("pre");
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "copied";
  } else {
    // Pages that are opened as files may not write to it.
    shown.open = true;
    getSelection().selectAllChildren(block);
    button.textContent = "press Ctrl+C";
  }
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

// claims.html?paper=DIP chooses that value; a search is claims.html?search=memory.
function preset(table) {
  const given = new URLSearchParams(location.search);
  for (const select of document.querySelectorAll(`select[data-table="${table.id}"]`)) {
    const heading = table.tHead.rows[0].cells[+select.dataset.column].textContent;
    if (given.has(heading)) select.value = given.get(heading);
  }
  if (given.has("search")) document.querySelector(`input[data-table="${table.id}"]`).value = given.get("search");
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.interactive")) {
    preset(table);
    for (const each of document.querySelectorAll(`[data-table="${table.id}"]`)) {
      each.addEventListener("input", () => update(table));
    }
    for (const head of table.tHead.rows[0].cells) {
      if (head.classList.contains("unsorted")) continue;
      head.tabIndex = 0;
      head.addEventListener("click", () => sort(table, head));
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(table, head); });
    }
    for (const button of table.querySelectorAll("td.command button")) {
      button.hidden = false;
      button.addEventListener("click", () => copy(button));
    }
    update(table);
  }
});
