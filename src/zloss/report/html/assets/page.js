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

  const dots = new WeakMap();
  function pointsOf(chart) {
    if (!dots.has(chart)) {
      dots.set(chart, [...chart.querySelectorAll("path[data-label]")].flatMap(path =>
        [...(path.getAttribute("d") || "").matchAll(/[ML]([-\d.]+),([-\d.]+)/g)].map(m => [Number(m[1]), Number(m[2]), path.dataset.label])));
    }
    return dots.get(chart);
  }
  function invert(spec, pixel) {
    const [low, high, start, end, log] = spec.split(" ").map(Number);
    const at = (pixel - start) / (end - start);
    return log ? Math.exp(Math.log(low) + at * Math.log(high / low)) : low + at * (high - low);
  }
  function hover(event) {
    const tip = document.getElementById("tip");
    const chart = event.target.closest && event.target.closest("svg.chart");
    const points = chart ? pointsOf(chart) : [];
    if (!points.length) { tip.hidden = true; return; }
    const box = chart.getBoundingClientRect(), unit = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * unit, y = (event.clientY - box.top) * unit;
    let best = null, nearest = 100;
    for (const point of points) {
      const d = (point[0] - x) ** 2 + (point[1] - y) ** 2;
      if (d < nearest) { nearest = d; best = point; }
    }
    tip.hidden = best === null;
    if (best === null) return;
    const [valueX, valueY] = [invert(chart.dataset.x, best[0]), invert(chart.dataset.y, best[1])].map(v => v.toPrecision(3));
    tip.textContent = chart.id.startsWith("compare-") ? `${best[2]}: ${valueX}` : `${best[2]}\n${chart.dataset.xName}: ${valueX}\n${chart.dataset.yName}: ${valueY}`;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  }

  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", toggleTheme);
    document.querySelectorAll("table.sortable thead th").forEach(header => {
      header.tabIndex = 0;
      header.addEventListener("click", () => sortBy(header));
      header.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sortBy(header); } });
    });
    document.querySelectorAll("[role=tab]").forEach(button => button.addEventListener("click", () => selectTab(button)));
    document.addEventListener("mousemove", hover);
  });
})();
