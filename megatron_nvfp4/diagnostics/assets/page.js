// The page: decodes its data, draws, and answers the sliders.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const MAP_ROWS = 96;
const FULL_GAP = 2; // nats at which the segment map is at full colour

function decode(packed) {
  const raw = Uint8Array.from(atob(packed.base64), (c) => c.charCodeAt(0));
  return new (globalThis[packed.type + "Array"])(raw.buffer);
}

function show(id) {
  document.getElementById(id).hidden = false;
}

const ABSENT = (values) => values.map((v) => (v === null || v === "inf" ? NaN : v));

// --- sliders ---------------------------------------------------------------------------------------

const SLIDERS = [
  { key: "mildMean", name: "mean gap below, first tier (nats)", min: -2, max: 0, step: 0.05 },
  { key: "deepMean", name: "mean gap below, second tier (nats)", min: -4, max: 0, step: 0.05 },
  { key: "tailGap", name: "tail token below (nats)", min: -12, max: -0.5, step: 0.25 },
  { key: "tailCount", name: "tail tokens at full strength", min: 1, max: 8, step: 1 },
  { key: "capIndex", name: "TIS cap C", min: 0, max: 0, step: 1 },
];
const OUTCOME = [
  ["gated", "segments gated", (v) => v.toLocaleString("en")],
  ["gated_share", "of the segments of A < 0", (v) => (100 * v).toFixed(2) + " %"],
  ["gated_tokens", "tokens gated", (v) => v.toLocaleString("en")],
  ["mean_weight", "mean gate weight", (v) => v.toFixed(4)],
  ["max_coefficient", "largest factor of an advantage", (v) => v.toFixed(3)],
  ["rho", "rho_asym as loaded", (v) => v.toFixed(3)],
  ["rho_gate", "rho_asym behind the gate", (v) => v.toFixed(3)],
  ["rho_tis", "rho_asym behind TIS", (v) => v.toFixed(3)],
  ["rho_both", "rho_asym behind both", (v) => v.toFixed(3)],
  ["tis_above", "tokens above C", (v) => (100 * v).toFixed(3) + " %"],
  ["tis_weight", "mean TIS weight", (v) => v.toFixed(4)],
];

let data = null, settings = null, weights = null;

function startWhatIf() {
  data = {};
  for (const [name, value] of Object.entries(page.whatif)) {
    data[name] = value !== null && value.base64 !== undefined ? decode(value) : value;
  }
  settings = Object.assign({}, page.settings);
  SLIDERS[4].max = data.caps.length - 1;
  const form = document.getElementById("sliders");
  for (const slider of SLIDERS) {
    const id = "slider-" + slider.key;
    form.insertAdjacentHTML(
      "beforeend",
      `<label for="${id}">${slider.name}</label><input type="range" id="${id}" min="${slider.min}" ` +
        `max="${slider.max}" step="${slider.step}"><output id="value-${slider.key}" for="${id}"></output>`,
    );
    document.getElementById(id).addEventListener("input", (event) => {
      settings[slider.key] = Number(event.target.value);
      // The second tier lies at or below the first.
      if (slider.key === "mildMean") settings.deepMean = Math.min(settings.deepMean, settings.mildMean);
      if (slider.key === "deepMean") settings.mildMean = Math.max(settings.deepMean, settings.mildMean);
      update();
    });
  }
  form.insertAdjacentHTML("beforeend", '<button type="button" id="reset">back to the settings of the run</button>');
  document.getElementById("reset").addEventListener("click", () => {
    settings = Object.assign({}, page.settings);
    update();
  });
  const start = whatIf(data, settings);
  document.querySelector("#outcome tbody").innerHTML = OUTCOME.map(
    ([key, name, form_]) =>
      `<tr id="row-${key}"><th scope="row">${name}</th><td>${shown(start[key], form_)}</td>` +
      `<td id="out-${key}"></td></tr>`,
  ).join("");
  const every = data.stride === 1 ? "all responses" : `every ${data.stride}th response, from the first on`;
  document.getElementById("what-if-note").textContent =
    `The rules of the gate (segments of ${data.width} positions, each response keeping its sum of weights) and of ` +
    `truncated importance weights, applied again to the loaded gaps: ${every}. Nothing is fitted or simulated.`;
  show("what-if");
}

function shown(value, form) {
  return Number.isFinite(value) ? form(value) : Number.isNaN(value) ? "-" : "inf";
}

function update() {
  weights = segmentWeights(data, settings);
  for (const slider of SLIDERS) {
    document.getElementById("slider-" + slider.key).value = settings[slider.key];
    const value = slider.key === "capIndex" ? data.caps[settings.capIndex] : settings[slider.key];
    document.getElementById("value-" + slider.key).textContent = String(Number(value.toFixed(2)));
  }
  const now = whatIf(data, settings, weights);
  for (const [key, , form] of OUTCOME) {
    const cell = document.getElementById("out-" + key);
    cell.textContent = shown(now[key], form);
    cell.dataset.exact = String(now[key]);
    cell.parentElement.classList.toggle("changed", cell.textContent !== cell.previousElementSibling.textContent);
  }
  drawSegments();
}

// --- segment map -----------------------------------------------------------------------------------

let reading = [0, 0], grid = null;

function startSegments() {
  const rows = data.segment_offsets.length - 1;
  const slider = document.getElementById("first-row");
  slider.max = Math.max(0, rows - MAP_ROWS);
  slider.parentElement.parentElement.hidden = rows <= MAP_ROWS;
  slider.addEventListener("input", () => drawSegments());
  const canvas = document.getElementById("segment-map");
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    reading = [reading[0] + move[0], reading[1] + move[1]];
    drawSegments();
  });
  canvas.addEventListener("pointermove", (event) => {
    const column = Math.floor((event.offsetX - grid.x) / grid.cw), row = Math.floor((event.offsetY - grid.y) / grid.ch);
    if (row >= 0 && row < grid.rows && column >= 0 && column < grid.columns) {
      reading = [row, column];
      drawSegments();
    }
  });
  document.getElementById("segments-note").textContent =
    `Rows are responses in the order of their steps, columns segments of ${data.width} positions. Colour: mean gap, ` +
    `full at ${FULL_GAP} nats. A dot: the gate at the sliders acts on the segment.` +
    (data.stride === 1 ? "" : ` Every ${data.stride}th response is shown.`);
  show("segments");
}

function drawSegments() {
  const total = data.segment_offsets.length - 1;
  const first = Math.min(Number(document.getElementById("first-row").value), Math.max(0, total - 1));
  const rows = Math.min(MAP_ROWS, total - first);
  const box = canvasBox("segment-map", { left: 64, right: 84 });
  let columns = 1;
  for (let r = first; r < first + rows; r++) {
    columns = Math.max(columns, data.segment_offsets[r + 1] - data.segment_offsets[r]);
  }
  const cw = box.w / columns, ch = box.h / Math.max(rows, 1);
  grid = { x: box.x, y: box.y, cw, ch, rows, columns };
  const ends = { low: color("warm"), high: color("cool"), mid: color("mid"), ink: color("ink") };
  for (let r = 0; r < rows; r++) {
    const begin = data.segment_offsets[first + r];
    for (let s = begin; s < data.segment_offsets[first + r + 1]; s++) {
      if (data.num_valid[s] === 0) continue;
      const mean = data.mean[s];
      const t = Math.min(Math.abs(mean) / FULL_GAP, 1) ** 0.5;
      const px = box.x + (s - begin) * cw, py = box.y + r * ch;
      box.draw.fillStyle = blend(ends.mid, mean < 0 ? ends.low : ends.high, t);
      box.draw.fillRect(px, py, Math.max(cw - 0.5, 0.5), Math.max(ch - 0.5, 0.5));
      if (data.eligible[s] && weights[s] !== 1) {
        const size = Math.max(Math.min(cw, ch) * 0.4, 1.5);
        box.draw.fillStyle = ends.ink;
        box.draw.fillRect(px + (cw - size) / 2, py + (ch - size) / 2, size, size);
      }
    }
  }
  const yTicks = [];
  for (let r = 0, last = null; r < rows; r++) {
    const step = data.step[first + r];
    const place = 1 - (r + 0.5) / rows;
    if (step !== last && (!yTicks.length || (yTicks[yTicks.length - 1][0] - place) * box.h > 16)) yTicks.push([place, String(step)]);
    last = step;
  }
  axes(box, evenTicks(0, columns * data.width, 8, true), yTicks, "position in the response (tokens)", "step");
  colorBar(box, ends);
  document.getElementById("rows-shown").textContent = `${first + 1} to ${first + rows} of ${total}`;
  readSegment(box, first);
}

function colorBar(box, ends) {
  const x = box.x + box.w + 16, h = box.h - 30;
  for (let i = 0; i < h; i++) {
    const v = 1 - (2 * i) / h;
    box.draw.fillStyle = blend(ends.mid, v < 0 ? ends.low : ends.high, Math.min(Math.abs(v), 1) ** 0.5);
    box.draw.fillRect(x, box.y + 22 + i, 12, 1);
  }
  box.draw.fillStyle = color("soft");
  box.draw.textAlign = "left";
  box.draw.textBaseline = "middle";
  box.draw.fillText("mean gap", x, box.y + 4);
  [[0, "+" + FULL_GAP], [0.5, "0"], [1, "-" + FULL_GAP]].forEach(([t, text]) => {
    box.draw.fillText(text + (t === 0 ? " nats" : ""), x + 17, box.y + 22 + t * (h - 1));
  });
}

function readSegment(box, first) {
  const text = document.getElementById("segment-read");
  if (!grid.rows) return;
  const row = Math.max(0, Math.min(reading[0], grid.rows - 1));
  const begin = data.segment_offsets[first + row], num = data.segment_offsets[first + row + 1] - begin;
  const column = Math.max(0, Math.min(reading[1], num - 1));
  reading = [row, column];
  const name = `response ${data.number[first + row]}, step ${data.step[first + row]}`;
  if (num === 0) {
    text.textContent = `${name}: empty`;
    return;
  }
  const s = begin + column;
  const mean = data.num_valid[s] ? data.mean[s].toFixed(4) + " nats" : "-";
  text.textContent =
    `${name}, tokens ${column * data.width} to ${(column + 1) * data.width - 1}: mean gap ${mean}, ` +
    `${data.num_valid[s]} tokens in the loss, ${data.num_negative[s]} of them below 0, gate weight ${short(weights[s])}`;
  box.draw.strokeStyle = color("ink");
  box.draw.lineWidth = 1.5;
  box.draw.strokeRect(box.x + column * grid.cw - 1, box.y + row * grid.ch - 1, grid.cw + 1, grid.ch + 1);
}

// --- maps of all tokens ----------------------------------------------------------------------------

function drawQuadrants() {
  const map = page.quadrants, shade = document.querySelector("input[name=shade]:checked").value;
  const values = map[shade], largest = Math.max(...values);
  const box = canvasBox("quadrant-map", {});
  const cw = box.w / map.columns, ch = box.h / map.rows;
  const floor = largest * 1e-6;
  for (let i = 0; i < values.length; i++) {
    if (!values[i]) continue;
    const row = Math.floor(i / map.columns) - (map.rows - 1) / 2, column = (i % map.columns) - (map.columns - 1) / 2;
    const t = 0.12 + 0.88 * Math.max(0, Math.log(values[i] / floor) / Math.log(largest / floor));
    const hue = row * column > 0 ? "warm" : row * column < 0 ? "cool" : "soft";
    box.draw.fillStyle = blend(color("panel"), color(hue), t);
    box.draw.fillRect(box.x + (column + (map.columns - 1) / 2) * cw, box.y + box.h - (row + (map.rows + 1) / 2) * ch, cw + 0.4, ch + 0.4);
  }
  const place = (v) => 0.5 + (0.5 * Math.sign(v) * Math.asinh(Math.abs(v) / map.scale)) / Math.asinh(map.reach / map.scale);
  const ticks = [-10, -1, -0.1, 0, 0.1, 1, 10].filter((v) => Math.abs(v) <= map.reach).map((v) => [place(v), String(v)]);
  axes(box, ticks, evenTicks(-map.top, map.top, 6), "delta (nats)", "advantage A (no unit)");
  labelQuadrants(box);
}

function labelQuadrants(box) {
  const { draw } = box;
  draw.fillStyle = color("ink");
  for (const [x, y, text] of [[0, 0, "narrows"], [1, 0, "widens"], [0, 1, "widens"], [1, 1, "narrows"]]) {
    draw.textAlign = x ? "right" : "left";
    draw.textBaseline = y ? "bottom" : "top";
    draw.fillText(text, box.x + (x ? box.w - 6 : 6), box.y + (y ? box.h - 6 : 6));
  }
}

function drawTails() {
  const { x, below, above } = page.tails;
  logChart("tail-curve", x, [
    { name: "delta < -x", values: below, color: "warm" },
    { name: "delta > x", values: above, color: "cool" },
  ], ["x (nats)", "share of tokens"], { logX: true, margin: { right: 22 } });
}

function drawSteps() {
  const s = page.steps;
  const columns = [["p999", "P99.9 of |delta|", "warm"], ["p99", "P99 of |delta|", "mark"], ["mean_abs", "mean |delta|", "ink"]];
  const tails = columns.map(([key, name, hue]) => ({ name, values: ABSENT(s[key]), color: hue }));
  tails.push({ name: "- 5 % quantile", values: ABSENT(s.q05).map((v) => -v), color: "cool", dash: [5, 4] });
  logChart("step-tails", s.step, tails, ["step", "gap (nats)"]);
  if (!s.rho_asym) return;
  logChart("step-rho", s.step, [
    { name: "tokens alike", values: ABSENT(s.rho_asym), color: "warm" },
    { name: "responses alike", values: ABSENT(s.rho_asym_by_response), color: "cool", dash: [5, 4] },
  ], ["step", "rho_asym (ratio)"], { level: 1 });
}

function drawAll() {
  if (page.tails) drawTails();
  if (page.quadrants) drawQuadrants();
  if (data) update();
  if (page.steps && page.steps.step.length > 1) drawSteps();
}

if (page.whatif) {
  startWhatIf();
  startSegments();
}
if (page.quadrants) {
  show("quadrants");
  document.querySelectorAll("input[name=shade]").forEach((radio) => radio.addEventListener("change", drawQuadrants));
}
if (page.tails) show("tails");
if (page.steps && page.steps.step.length > 1) show("over-steps");
drawAll();
window.addEventListener("resize", drawAll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
