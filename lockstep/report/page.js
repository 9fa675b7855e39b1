// SPDX-License-Identifier: Apache-2.0
// Makes the static pictures of a report interactive. Without it, or without Dygraph, they stay.
(function () {
  "use strict";
  const root = document.documentElement;
  const all = (selector, within) => Array.from((within || document).querySelectorAll(selector));
  const make = (tag, attributes, text) => {
    const element = document.createElement(tag);
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const runs = JSON.parse(document.getElementById("data").textContent).runs;
  const colour = (i) => getComputedStyle(root).getPropertyValue("--c" + (i % 8)).trim();
  const splitColours = {compute: 2, communication: 0, bubble: 7, stall: 3, optimizer: 4, data: 1, checkpoint: 5};
  const short = (v) => {
    if (v === null || v === undefined || Number.isNaN(v)) return "-";
    const size = Math.abs(v);
    if (size >= 1e6) return +(v / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(v / 1e3).toPrecision(4) + "k";
    if (size > 0 && size < 1e-3) return v.toExponential(2);
    return String(+v.toPrecision(5));
  };
  const xNames = {step: "step", tokens: "tokens", hours: "hours"};
  const view = {x: "step", log: true, smooth: 0};
  const charts = [];
  let busy = false;

  // One position on the axis for each row of a run.
  const xOf = (run) => run[view.x];
  const atStep = (run, step) => {
    const steps = run.step;
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return xOf(run)[low];
  };
  // A running mean that does not begin at 0.
  const smoothed = (values) => {
    if (view.smooth === 0) return values;
    let mean = 0, weight = 0;
    return values.map((v) => {
      if (v === null) return null;
      mean = view.smooth * mean + (1 - view.smooth) * v;
      weight = view.smooth * weight + (1 - view.smooth);
      return mean / weight;
    });
  };
  // Columns of [x, y] lists as the rows that Dygraph reads.
  const rowsOf = (columns) => {
    const rows = new Map();
    columns.forEach((points, i) => points.forEach(([x, y]) => {
      if (x === null || x === undefined) return;
      if (!rows.has(x)) rows.set(x, [x].concat(columns.map(() => null)));
      rows.get(x)[i + 1] = y;
    }));
    return Array.from(rows.values()).sort((a, b) => a[0] - b[0]);
  };
  const pair = (xs, ys) => xs.map((x, i) => [x, ys[i]]);

  function content(kind) {
    const lines = [];  // {name, colour, points, options}
    if (kind.startsWith("split")) {
      const run = runs[+kind.slice(5)];
      for (const name in run.split) lines.push({name, colour: splitColours[name], points: pair(xOf(run), run.split[name])});
      return lines;
    }
    runs.forEach((run, i) => {
      const raw = pair(xOf(run), run[kind]);
      const noisy = kind === "loss" || kind === "grad_norm" || kind === "tokens_per_s" || kind === "step_ms";
      if (noisy && view.smooth > 0) {
        lines.push({name: run.name + " (each step)", colour: i, points: raw, faint: true});
        lines.push({name: run.name, colour: i, points: pair(xOf(run), smoothed(run[kind]))});
      } else {
        lines.push({name: run.name, colour: i, points: raw});
      }
      if (kind === "loss" && run.validation.length)
        lines.push({name: run.name + ", validation", colour: i, dots: true, points: run.validation.map(([step, loss]) => [atStep(run, step), loss])});
    });
    // Dygraph knows a line by its name.
    const seen = new Set();
    lines.forEach((line) => {
      while (seen.has(line.name)) line.name += " ";
      seen.add(line.name);
    });
    return lines;
  }

  function showLegend(chart, x, points) {
    const legend = chart.figure.querySelector(".legend");
    legend.textContent = "";
    if (x !== undefined) legend.append(make("span", {}, xNames[view.x] + " " + short(x)));
    chart.lines.forEach((line) => {
      if (line.faint) return;
      const entry = make("span", {}), dot = make("i", {class: "b" + (line.colour % 8)});
      entry.append(dot, line.name.trim());
      const point = points && points.find((p) => p.name === line.name);
      if (point && point.yval !== null) {
        entry.append(" ", make("b", {}, short(point.yval)));
        const run = runs.find((r) => r.name === line.name);
        if (chart.kind === "tokens_per_s" && run && run.mfu) entry.append(" MFU " + (100 * run.mfu * point.yval).toFixed(1) + " %");
      }
      legend.append(entry);
    });
  }

  const eventColours = {started: 4, slow: 1, warning: 1, failed: 3, skipped: 3};
  function drawEvents(canvas, area, graph) {
    canvas.save();
    canvas.setLineDash([2, 3]);
    runs.forEach((run) => {
      if (runs.length > 1) return;
      run.events.forEach(([step, kind]) => {
        if (step <= 0 || kind === "finished" || kind === "stopped") return;
        const at = graph.toDomXCoord(atStep(run, step));
        if (at < area.x || at > area.x + area.w) return;
        canvas.strokeStyle = colour(eventColours[kind] === undefined ? 7 : eventColours[kind]);
        canvas.globalAlpha = 0.7;
        canvas.beginPath();
        canvas.moveTo(at, area.y);
        canvas.lineTo(at, area.y + area.h);
        canvas.stroke();
      });
    });
    canvas.restore();
  }

  function options(chart) {
    const series = {};
    chart.lines.forEach((line) => {
      series[line.name] = line.dots ? {drawPoints: true, pointSize: 3.5, strokePattern: [4, 3], strokeWidth: 1.2}
        : line.faint ? {strokeWidth: 0.8, highlightCircleSize: 0} : {strokeWidth: 1.8};
    });
    const style = getComputedStyle(root), stacked = chart.kind.startsWith("split");
    const wantsLog = chart.kind === "loss" || chart.kind === "grad_norm";
    return {
      labels: ["x"].concat(chart.lines.map((line) => line.name)),
      colors: chart.lines.map((line) => {
        const c = colour(line.colour);
        return line.faint ? c + "55" : c;
      }),
      series, connectSeparatedPoints: true, legend: "never", labelsKMB: false,
      stackedGraph: stacked, fillAlpha: 0.75, logscale: wantsLog && view.log,
      includeZero: chart.kind === "tokens_per_s" || chart.kind === "step_ms" || stacked,
      gridLineColor: style.getPropertyValue("--rule").trim(), axisLineColor: style.getPropertyValue("--rule").trim(),
      axes: {x: {axisLabelFormatter: short, valueFormatter: short}, y: {axisLabelFormatter: short, valueFormatter: short, axisLabelWidth: 52}},
      underlayCallback: drawEvents,
    };
  }

  function select(chart, x, from) {
    charts.forEach((other) => {
      if (other === from) return;
      const data = other.graph.rawData_ || [];
      let low = 0, high = data.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (data[middle][0] < x) low = middle + 1; else high = middle;
      }
      busy = true;
      other.graph.setSelection(low);
      busy = false;
      showLegend(other, x, other.graph.selPoints_);
    });
  }

  function build(figure) {
    const div = figure.querySelector(".chart");
    const chart = {kind: div.dataset.chart, figure, div, lines: []};
    chart.lines = content(chart.kind);
    const rows = rowsOf(chart.lines.map((line) => line.points));
    if (!rows.length) return;
    figure.classList.add("live");
    div.tabIndex = 0;
    div.setAttribute("role", "application");
    div.setAttribute("aria-label", figure.querySelector("figcaption").textContent + ": arrow keys move along the curve, + and - zoom, 0 resets");
    chart.graph = new Dygraph(div, rows, Object.assign(options(chart), {
      highlightCallback(event, x, points) {
        showLegend(chart, x, points);
        chart.row = points.length ? points[0].idx : 0;
        if (!busy) select(chart, x, chart);
      },
      unhighlightCallback() {
        showLegend(chart);
        if (busy) return;
        busy = true;
        charts.forEach((other) => other !== chart && other.graph.clearSelection());
        busy = false;
      },
      drawCallback(graph, initial) {
        if (initial || busy) return;
        busy = true;
        const range = graph.isZoomed("x") ? graph.xAxisRange() : null;
        charts.forEach((other) => other !== chart && other.graph.updateOptions({dateWindow: range}));
        busy = false;
      },
    }));
    showLegend(chart);
    div.addEventListener("keydown", (event) => keyboard(event, chart));
    charts.push(chart);
  }

  function keyboard(event, chart) {
    const rows = chart.graph.numRows(), range = chart.graph.xAxisRange();
    const jump = event.shiftKey ? Math.max(1, Math.round(rows / 20)) : 1;
    const moves = {ArrowRight: jump, ArrowLeft: -jump, Home: -rows, End: rows};
    if (event.key in moves) {
      const row = Math.min(rows - 1, Math.max(0, (chart.row === undefined ? 0 : chart.row) + moves[event.key]));
      chart.row = row;
      chart.graph.setSelection(row);
      const x = chart.graph.getValue(row, 0);
      showLegend(chart, x, chart.graph.selPoints_);
      select(chart, x, chart);
    } else if (event.key === "+" || event.key === "-") {
      const x = chart.row === undefined ? (range[0] + range[1]) / 2 : chart.graph.getValue(chart.row, 0);
      const half = (range[1] - range[0]) / 2 * (event.key === "+" ? 0.6 : 1 / 0.6);
      chart.graph.updateOptions({dateWindow: [x - half, x + half]});
    } else if (event.key === "0" || event.key === "Escape") {
      chart.graph.updateOptions({dateWindow: null});
      chart.graph.clearSelection();
    } else {
      return;
    }
    event.preventDefault();
  }

  function redraw() {
    busy = true;
    charts.forEach((chart) => {
      chart.lines = content(chart.kind);
      chart.graph.updateOptions(Object.assign(options(chart), {file: rowsOf(chart.lines.map((line) => line.points)), dateWindow: null}));
      showLegend(chart);
    });
    busy = false;
  }

  function choice(name, values, current, change) {
    const set = make("fieldset", {});
    set.append(make("legend", {class: "visually-hidden"}, name));
    const buttons = values.map(([value, label]) => {
      const button = make("button", {type: "button", "aria-pressed": String(value === current)}, label);
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        change(value);
      });
      set.append(button);
      return button;
    });
    return set;
  }

  function addControls() {
    const controls = document.getElementById("controls");
    if (!controls) return;
    const axes = [["step", "Steps"], ["tokens", "Tokens"], ["hours", "Hours"]].filter(([key]) => runs.every((run) => run[key].some((x) => x !== null)));
    controls.append(choice("Horizontal axis", axes, view.x, (x) => { view.x = x; redraw(); }));
    controls.append(choice("Scale of loss and gradient norm", [[true, "Log"], [false, "Linear"]], view.log, (log) => { view.log = log; redraw(); }));
    const label = make("label", {}, "Smoothing"), slider = make("input", {type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing"});
    slider.addEventListener("input", () => { view.smooth = +slider.value; redraw(); });
    label.append(slider);
    controls.append(label);
    controls.hidden = false;
  }

  function addTheme() {
    const button = make("button", {type: "button", title: "Light or dark"}, "Theme");
    button.addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      if (charts.length) redraw();
    });
    document.querySelector("header").append(button);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.length && redraw());
  }

  // A table goes to the clipboard as lines with tabs.
  function addCopy() {
    all(".scroll").forEach((box) => {
      const button = make("button", {type: "button", class: "copy"}, "Copy");
      button.addEventListener("click", () => {
        const text = all("tr", box).map((row) => all("th,td", row).map((cell) => cell.textContent.trim()).join("\t")).join("\n");
        const done = () => { button.textContent = "Copied"; };
        const fallback = () => {
          const area = make("textarea", {}, text);
          document.body.append(area);
          area.select();
          if (document.execCommand("copy")) done();
          area.remove();
        };
        if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, fallback); else fallback();
      });
      box.append(button);
    });
  }

  const mapTitles = {grad_norm: "Gradient norm", grad_max: "Largest gradient", grad_zeros: "Share of gradients that are 0", weight_norm: "Weight norm", weight_max: "Largest weight", update_ratio: "Update / weight"};
  function drawMap(div, map, log) {
    const value = (v) => v === null || (log && v <= 0) ? null : log ? Math.log10(v) : v;
    const flat = map.values.flat().map(value).filter((v) => v !== null);
    const low = Math.min(...flat), high = Math.max(...flat), ns = "http://www.w3.org/2000/svg";
    const svg = div.querySelector("svg");
    all("path", svg).forEach((path) => path.remove());
    const width = (svg.viewBox.baseVal.width - 120 - 12) / map.columns.length, height = Math.min(22, Math.max(5, 240 / map.rows.length));
    const paths = Array.from({length: 10}, () => "");
    map.values.forEach((row, r) => row.forEach((v, c) => {
      const scaled = value(v);
      if (scaled === null) return;
      const level = high > low ? Math.round((scaled - low) / (high - low) * 9) : 5;
      paths[level] += "M" + (120 + c * width) + " " + (2 + r * height) + "h" + (width + 0.3) + "v" + (height - 0.6) + "h-" + (width + 0.3) + "z";
    }));
    paths.forEach((d, level) => {
      const path = document.createElementNS(ns, "path");
      path.setAttribute("class", "h" + level);
      path.setAttribute("d", d);
      svg.prepend(path);
    });
    const texts = all("text", svg).slice(-2);
    if (texts.length === 2) [low, high].forEach((v, i) => { texts[i].textContent = short(log ? Math.pow(10, v) : v); });
  }

  // Values under the pointer, and other quantities of the same layers.
  function addMaps() {
    all(".map").forEach((div) => {
      const index = +div.dataset.map.match(/\d+$/)[0], maps = runs[index].maps;
      let map = maps[div.dataset.map];
      if (!map) return;
      const tip = make("div", {class: "tip", hidden: ""});
      div.append(tip);
      div.addEventListener("pointermove", (event) => {
        const svg = div.querySelector("svg"), box = svg.getBoundingClientRect(), wide = svg.viewBox.baseVal.width, scale = wide / box.width;
        const height = Math.min(22, Math.max(5, 240 / map.rows.length));
        const column = Math.floor(((event.clientX - box.left) * scale - 120) / ((wide - 132) / map.columns.length));
        const row = Math.floor(((event.clientY - box.top) * scale - 2) / height);
        const found = map.values[row] && map.values[row][column];
        tip.hidden = found === undefined || found === null;
        if (tip.hidden) return;
        tip.textContent = map.rows[row] + ", " + map.columns[column] + ": " + short(found);
        tip.style.left = Math.min(event.clientX - box.left + 12, box.width - 180) + "px";
        tip.style.top = event.clientY - box.top + 14 + "px";
      });
      div.addEventListener("pointerleave", () => { tip.hidden = true; });
      const quantities = Object.keys(maps).filter((key) => !key.startsWith("ranks") && maps[key].rows.length);
      if (div.dataset.map.startsWith("ranks") || quantities.length < 2) return;
      const choose = make("select", {"aria-label": "Quantity"});
      quantities.forEach((key) => choose.append(make("option", {value: key}, mapTitles[key.replace(/\d+$/, "")] || key)));
      choose.value = div.dataset.map;
      choose.addEventListener("change", () => {
        map = maps[choose.value];
        drawMap(div, map, !choose.value.startsWith("grad_zeros"));
      });
      div.parentElement.querySelector("figcaption").replaceChildren(choose);
    });
  }

  addTheme();
  addCopy();
  addMaps();
  if (typeof Dygraph !== "undefined") {
    all("figure").filter((figure) => figure.querySelector(".chart")).forEach(build);
    if (charts.length) addControls();
    // Pictures in closed parts have no size yet.
    all("details.of").forEach((part) => part.addEventListener("toggle", () => charts.forEach((chart) => chart.graph.resize())));
  }
  root.dataset.ready = "true";
})();
