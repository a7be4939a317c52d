// The heat map: which numbers its cells show, which cell's details are open, and the arrow keys.
"use strict";
const table = document.getElementById("heat");
const switches = document.getElementById("switches");
const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1).map((cell) => cell.querySelector("button")));
const cells = rows.flat().filter(Boolean);
const tiers = [...switches.querySelectorAll('input[name="tier"]')].map((one) => one.value);

function show() {
  const place = 2 * tiers.indexOf(switches.elements.tier.value) + (switches.elements.view.value === "isolated" ? 0 : 1);
  for (const cell of cells) {
    const text = cell.dataset.texts.split("|")[place];
    cell.classList.remove("l0", "l1", "l2", "l3", "l4", "l5", "l6");
    cell.classList.add("l" + cell.dataset.levels[place]);
    cell.textContent = text;
    cell.setAttribute("aria-label", `${cell.dataset.name}: ${text}${cell.dataset.above[place] === "1" ? ", above its bound" : ""}${cell.dataset.state}`);
  }
}

function open(cell, scroll) {
  for (const one of cells) {
    const here = one === cell;
    one.setAttribute("aria-expanded", here);
    one.tabIndex = here ? 0 : -1;
    document.getElementById(one.getAttribute("aria-controls")).hidden = !here;
  }
  if (scroll) document.getElementById(cell.getAttribute("aria-controls")).scrollIntoView({ block: "nearest" });
}

function next(cell, down, right) {
  let row = rows.findIndex((one) => one.includes(cell));
  let column = rows[row].indexOf(cell);
  for (;;) {
    row += down;
    column += right;
    if (!rows[row] || column < 0 || column >= rows[row].length) return cell;
    if (rows[row][column]) return rows[row][column];
  }
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
table.addEventListener("keydown", (event) => {
  const cell = event.target.closest("button");
  if (!cell || !STEPS[event.key]) return;
  event.preventDefault();
  const target = next(cell, ...STEPS[event.key]);
  cell.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
});
table.addEventListener("click", (event) => {
  const cell = event.target.closest("button");
  if (cell) open(cell, true);
});
switches.addEventListener("change", show);
show();  // a browser may have kept other choices from before
const first = cells.find((cell) => !document.getElementById(cell.getAttribute("aria-controls")).hidden);
if (first) {
  open(first, false);
  const frame = document.getElementById("window");
  frame.scrollLeft = Math.max(0, first.getBoundingClientRect().right - frame.getBoundingClientRect().right + 8);
}
else cells.forEach((cell, place) => { cell.tabIndex = place ? -1 : 0; });
