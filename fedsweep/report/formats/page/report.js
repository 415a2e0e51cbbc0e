// A table or figure that is wider than the page scrolls. A line above it says so, and its hidden edge fades out.
for (const box of document.querySelectorAll(".scroll, .card")) {
  const cue = document.createElement("p");
  cue.className = "cue";
  cue.setAttribute("aria-hidden", "true");
  box.before(cue);
  const look = () => {
    const left = box.scrollLeft > 1;
    const right = box.scrollWidth - box.clientWidth - box.scrollLeft > 1;
    const kind = box.classList.contains("card") ? "the rest of this figure" : "more columns";
    cue.textContent = right ? `Scroll sideways to see ${kind} \u2192` : "\u2190 Scroll back to the left";
    cue.hidden = !(left || right);
    box.classList.toggle("fades-left", left);
    box.classList.toggle("fades-right", right);
  };
  box.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(box);
  box.closest("details")?.addEventListener("toggle", look);
  look();
}

// A click on the head of a column sorts the rows by this column; a second click reverses the order.
// Texts are sorted after numbers.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const number = (text) => parseFloat(text.replace(/[<>]/, ""));
  const compare = (a, b, sign) => {
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return sign * (Number.isNaN(x) ? a.localeCompare(b) : x - y);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      const text = (row) => row.cells[column].textContent.trim();
      const rows = [...body.rows].sort((a, b) => compare(text(a), text(b), descending ? -1 : 1));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}
