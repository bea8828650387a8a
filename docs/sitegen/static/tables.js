// Sorts every table of more than SMALL rows by a click on its headings; those of more than LONG rows are searched, too.
const SMALL = 5;
const LONG = 15;
const folder = document.currentScript.src.replace(/[^/]*$/, "");

document.addEventListener("DOMContentLoaded", () => {
  const rows = (table) => table.tBodies[0]?.rows.length ?? 0;
  const tables = [...document.querySelectorAll(".bd-article table.table")].filter((table) => table.tHead && rows(table) > SMALL);
  if (!tables.length) return;
  const script = document.createElement("script");
  script.src = folder + "datatables.js";
  script.onload = async () => {
    const module = URL.createObjectURL(new Blob([globalThis.dataTables], { type: "text/javascript" }));
    const { default: DataTable } = await import(module);
    for (const table of tables) {
      const searching = rows(table) > LONG;
      const layout = { topStart: null, topEnd: searching ? "search" : null, bottomStart: null, bottomEnd: null };
      // The order of the page is what one asks first.
      new DataTable(table, { order: [], paging: false, info: false, autoWidth: false, searching, layout });
    }
  };
  document.head.append(script);
});
