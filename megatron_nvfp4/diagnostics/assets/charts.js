// Drawing on canvases: axes with units, lines, cells. Colours are the page's own.
"use strict";

const FONT = "12px system-ui, 'Segoe UI', Arial, sans-serif";

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Between two colours, t from 0 to 1.
function blend(from, to, t) {
  const a = rgb(from), b = rgb(to);
  return "rgb(" + a.map((x, i) => Math.round(x + (b[i] - x) * t)).join(",") + ")";
}

// A canvas cleared at the screen's resolution, with the plot's box inside its margins.
function canvasBox(id, margin) {
  const canvas = document.getElementById(id);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  draw.font = FONT;
  const m = Object.assign({ left: 66, right: 14, top: 12, bottom: 42 }, margin);
  return { draw, x: m.left, y: m.top, w: width - m.left - m.right, h: height - m.top - m.bottom };
}

function short(value) {
  if (value === null || Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

// Axis lines, ticks [[place in 0..1, text]], and the axis' names with units.
function axes(box, xTicks, yTicks, xName, yName) {
  const { draw, x, y, w, h } = box;
  draw.strokeStyle = color("line");
  draw.fillStyle = color("soft");
  draw.lineWidth = 1;
  draw.textAlign = "center";
  draw.textBaseline = "top";
  for (const [place, text] of xTicks) {
    draw.fillText(text, x + place * w, y + h + 6);
    line(draw, [[x + place * w, y + h], [x + place * w, y + h + 4]]);
  }
  draw.fillText(xName, x + w / 2, y + h + 24);
  draw.textAlign = "right";
  draw.textBaseline = "middle";
  for (const [place, text] of yTicks) {
    draw.fillText(text, x - 7, y + h - place * h);
    line(draw, [[x - 4, y + h - place * h], [x, y + h - place * h]]);
  }
  draw.save();
  draw.translate(12, y + h / 2);
  draw.rotate(-Math.PI / 2);
  draw.textAlign = "center";
  draw.fillText(yName, 0, 0);
  draw.restore();
  draw.strokeRect(x, y, w, h);
}

function line(draw, points) {
  draw.beginPath();
  let pen = false;
  for (const [px, py] of points) {
    if (!Number.isFinite(px) || !Number.isFinite(py)) {
      pen = false;
      continue;
    }
    if (pen) draw.lineTo(px, py);
    else draw.moveTo(px, py);
    pen = true;
  }
  draw.stroke();
}

// Powers of ten in [low, high], with their place on a logarithmic axis.
function decades(low, high) {
  const a = Math.log10(low), b = Math.log10(high), ticks = [];
  const stride = Math.max(1, Math.ceil((b - a) / 6));
  for (let k = Math.ceil(a - 1e-9); k <= b + 1e-9; k += stride) {
    ticks.push([(k - a) / (b - a), k >= -3 && k <= 3 ? String(Number((10 ** k).toPrecision(1))) : "1e" + k]);
  }
  return ticks;
}

function evenTicks(low, high, num, whole) {
  if (high <= low) return [[0.5, short(low)]];
  let step = (high - low) / num;
  const power = 10 ** Math.floor(Math.log10(step));
  step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= step);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) {
    ticks.push([(k * step - low) / (high - low), short(k * step)]);
  }
  return ticks;
}

// Lines over x on a logarithmic y axis; series: {name, values, color, dash}.
function logChart(id, x, series, names, options) {
  const box = canvasBox(id, Object.assign({ top: 30 }, options && options.margin));
  const values = series.flatMap((s) => s.values).filter((v) => Number.isFinite(v) && v > 0);
  if (!values.length) return;
  let low = Math.min(...values), high = Math.max(...values);
  if (options && options.floor) low = Math.max(low, options.floor);
  low = 10 ** Math.floor(Math.log10(low));
  high = 10 ** Math.ceil(Math.log10(high));
  if (high === low) high = low * 10;
  const logX = options && options.logX;
  const map = logX ? Math.log10 : (v) => v;
  const x0 = map(x[0]), x1 = map(x[x.length - 1]);
  const px = (v) => box.x + (x1 === x0 ? 0.5 : (map(v) - x0) / (x1 - x0)) * box.w;
  const py = (v) => box.y + box.h * (1 - Math.log10(v / low) / Math.log10(high / low));
  const yTicks = decades(low, high);
  box.draw.strokeStyle = color("line");
  for (const [place] of yTicks) {
    line(box.draw, [[box.x, box.y + box.h * (1 - place)], [box.x + box.w, box.y + box.h * (1 - place)]]);
  }
  if (options && options.level) {
    box.draw.strokeStyle = color("soft");
    line(box.draw, [[box.x, py(options.level)], [box.x + box.w, py(options.level)]]);
  }
  const xTicks = logX ? decades(x[0], x[x.length - 1]) : evenTicks(x0, x1, 6, true);
  box.draw.save();
  box.draw.beginPath();
  box.draw.rect(box.x, box.y, box.w, box.h);
  box.draw.clip();
  box.draw.lineWidth = 2;
  for (const s of series) {
    box.draw.strokeStyle = color(s.color);
    box.draw.setLineDash(s.dash || []);
    line(box.draw, x.map((v, i) => [px(v), s.values[i] > 0 ? py(s.values[i]) : NaN]));
  }
  box.draw.setLineDash([]);
  box.draw.restore();
  axes(box, xTicks, yTicks, names[0], names[1]);
  legend(box, series);
}

// Names of the lines in a row above the plot.
function legend(box, series) {
  const { draw } = box;
  draw.textAlign = "left";
  draw.textBaseline = "middle";
  let x = box.x;
  for (const s of series) {
    draw.strokeStyle = color(s.color);
    draw.lineWidth = 2;
    draw.setLineDash(s.dash || []);
    line(draw, [[x, 12], [x + 22, 12]]);
    draw.setLineDash([]);
    draw.fillStyle = color("ink");
    draw.fillText(s.name, x + 27, 12);
    x += draw.measureText(s.name).width + 42;
  }
}
