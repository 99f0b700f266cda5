"use strict";
(() => {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("zloss-theme"); } catch { return null; } };
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const chosen = stored();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  function toggleTheme() {
    root.dataset.theme = dark() ? "light" : "dark";
    // A page opened from disk may have no storage; the choice then lasts until it is closed.
    try { localStorage.setItem("zloss-theme", root.dataset.theme); } catch { /* no storage */ }
  }

  function sortBy(header) {
    const table = header.closest("table"), column = [...header.parentNode.children].indexOf(header);
    const numeric = header.classList.contains("n");
    const now = header.getAttribute("aria-sort");
    const direction = now === "descending" ? "ascending" : now === "ascending" ? "descending" : numeric ? "descending" : "ascending";
    for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const key = row => { const cell = row.children[column]; return cell.dataset.value ?? cell.textContent.trim(); };
    const body = table.tBodies[0], rows = [...body.rows];
    rows.sort((a, b) => {
      const x = key(a), y = key(b);
      // Missing numbers stay last whichever way the column runs.
      if (numeric && (x === "" || y === "")) return (x === "") - (y === "");
      return sign * (numeric ? Number(x) - Number(y) : x.localeCompare(y));
    });
    body.append(...rows);
  }

  function selectTab(button) {
    const tabs = button.closest(".tabs"), buttons = [...tabs.querySelectorAll("[role=tab]")];
    tabs.querySelectorAll("[role=tabpanel]").forEach((panel, i) => { panel.hidden = buttons[i] !== button; });
    buttons.forEach(other => other.setAttribute("aria-selected", String(other === button)));
  }

  // Specifications are data: the interpreter of vega-embed draws them without `eval`, and no style is written into the page.
  const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false, tooltip: { disableDefaultStyle: true } };
  const views = new WeakMap();

  async function drawFigures() {
    for (const data of document.querySelectorAll("figure script")) {
      const figure = data.closest("figure"), spec = JSON.parse(data.textContent);
      const drawn = await vegaEmbed(figure.querySelector(".chart"), spec, options);
      views.set(figure, drawn.view);
    }
    root.dataset.drawn = "true";
  }

  function toggleSeries(chip) {
    const plots = chip.closest(".plots"), chips = [...plots.querySelectorAll(".chip")];
    chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") === "false"));
    const hidden = chips.filter(one => one.getAttribute("aria-pressed") === "false").map(one => one.dataset.series);
    plots.querySelectorAll("figure").forEach(figure => views.get(figure)?.signal("hidden", hidden).runAsync());
  }

  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", toggleTheme);
    document.querySelectorAll("table.sortable thead th").forEach(header => {
      header.tabIndex = 0;
      header.addEventListener("click", () => sortBy(header));
      header.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sortBy(header); } });
    });
    document.querySelectorAll("[role=tab]").forEach(button => button.addEventListener("click", () => selectTab(button)));
    document.querySelectorAll("button.chip").forEach(chip => chip.addEventListener("click", () => toggleSeries(chip)));
    drawFigures();
  });
})();
