// Sorts the rows of tables with class "sortable" by the column whose head is pressed. The page needs none of it.
for (const table of document.querySelectorAll("table.sortable")) {
  const value = (row, at) => {
    const text = row.cells[at].dataset.value ?? "";
    return text !== "" && isFinite(text) ? Number(text) : text;
  };
  const compare = (a, b) => {
    if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  };
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (up ? 1 : -1) * compare(value(a, at), value(b, at)));
      table.tBodies[0].append(...rows);
    });
  });
}
