"use strict";
(() => {
  const nodes = JSON.parse(document.getElementById("nodes").textContent);
  const levels = [...document.querySelectorAll("svg.level")];
  const panel = document.getElementById("panel");
  const detail = document.getElementById("detail");
  const whole = levels.map((svg) => svg.getAttribute("viewBox").split(" ").map(Number));
  const current = () => levels[Number(detail.value)];
  const box = () => current().getAttribute("viewBox").split(" ").map(Number);
  const setBox = (values) => current().setAttribute("viewBox", values.join(" "));

  // A drawing that is much taller than the window opens at its top, at a size that can be read.
  const fit = (readable) => {
    const [x, y, w, h] = whole[Number(detail.value)];
    const graph = document.getElementById("graph");
    const height = readable ? Math.min(h, Math.max(w, 900) * graph.clientHeight / graph.clientWidth) : h;
    setBox([x, y, w, height]);
  };

  const show = () => {
    levels.forEach((svg, index) => svg.toggleAttribute("hidden", index !== Number(detail.value)));
    panel.hidden = true;
    fit(true);
  };

  const zoom = (event) => {
    event.preventDefault();
    const svg = current();
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const factor = event.deltaY > 0 ? 1.15 : 1 / 1.15;
    const [x, y, w, h] = box();
    setBox([at.x - (at.x - x) * factor, at.y - (at.y - y) * factor, w * factor, h * factor]);
  };

  let held = null;
  const grab = (event) => { held = { x: event.clientX, y: event.clientY, box: box(), moved: false }; };
  const drag = (event) => {
    if (!held) return;
    const scale = current().getScreenCTM().a;
    const [x, y, w, h] = held.box;
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    held.moved = held.moved || Math.abs(dx) + Math.abs(dy) > 4;
    setBox([x - dx / scale, y - dy / scale, w, h]);
  };
  const release = (event) => {
    if (held && !held.moved) choose(event.target.closest(".box"));
    held = null;
  };

  const cell = (row, text, tag = "td") => { const c = document.createElement(tag); c.textContent = text; row.append(c); };
  const choose = (chosen) => {
    document.querySelectorAll(".box.chosen").forEach((other) => other.classList.remove("chosen"));
    panel.hidden = !chosen;
    if (!chosen) return;
    chosen.classList.add("chosen");
    const table = document.createElement("table");
    const head = table.insertRow();
    ["node", "operation", "placement", "shape", "µs"].forEach((title) => cell(head, title, "th"));
    for (const index of chosen.dataset.nodes.split(",")) {
      const [name, operation, placement, shape, us] = nodes[Number(index)];
      const row = table.insertRow();
      [name, operation, placement, shape.join("x"), us].forEach((value) => cell(row, value));
    }
    panel.replaceChildren(table);
  };

  levels.forEach((svg) => {
    svg.addEventListener("wheel", zoom, { passive: false });
    svg.addEventListener("pointerdown", grab);
  });
  window.addEventListener("pointermove", drag);
  window.addEventListener("pointerup", release);
  detail.addEventListener("change", show);
  document.getElementById("fit").addEventListener("click", () => fit(false));
  show();
})();
