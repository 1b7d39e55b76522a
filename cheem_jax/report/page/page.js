"use strict";

// ---- colours: replace each colour name of page.css by its value in the current theme

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function scale(name, num) {
  return Array.from({length: num}, (_, i) => [i / (num - 1), colour(`${name}${i}`)]);
}

function between(stops, place) {
  const at = Math.min(Math.floor(place * (stops.length - 1)), stops.length - 2);
  const share = place * (stops.length - 1) - at;
  const [a, b] = [stops[at], stops[at + 1]].map(([, c]) => c.match(/[\d.]+/g).map(Number));
  return `rgb(${[0, 1, 2].map(i => Math.round(a[i] + share * (b[i] - a[i]))).join(",")})`;
}

function coloured(value) {
  if (Array.isArray(value)) return value.map(coloured);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
  }
  if (typeof value !== "string" || value[0] !== "@") return value;
  if (value === "@sequential") return scale("seq", 5);
  if (value === "@diverging") return scale("div", 5);
  if (value === "@generations") return scale("gen", 3);
  if (value.startsWith("@ramp:")) return between(scale("ramp", 5), Number(value.slice(6)));
  return colour(value.slice(1)) || value;
}

// ---- charts: each one is plotted soon after it becomes visible, and again when the theme changes

const CONFIG = {displayModeBar: false, responsive: true, displaylogo: false, showTips: false};
const drawn = new Map();  // plot element -> its figure
const waiting = new Set(document.querySelectorAll(".chart"));  // figures that are not plotted yet

function laidOut(layout) {
  const [ink, faint, grid] = ["ink", "faint", "grid"].map(colour);
  const axis = {
    gridcolor: grid, zeroline: false, automargin: true, fixedrange: true, ticks: "",
    tickfont: {size: 11, color: faint},
  };
  const themed = {...layout, xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis}};
  for (const one of [themed.xaxis, themed.yaxis]) {
    if (one.title) one.title = {standoff: 8, font: {size: 12, color: faint}, ...one.title};
  }
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, autosize: true,
    hovermode: "closest", margin: {t: 8, b: 48, l: 52, r: 12},
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: ink},
    hoverlabel: {bgcolor: colour("panel"), bordercolor: colour("rule"), font: {color: ink, size: 13}, align: "left"},
    ...themed, legend: {orientation: "h", y: -0.2, yanchor: "top", traceorder: "normal", font: {size: 12, color: ink}},
  };
}

function draw(figure) {
  const plot = figure.querySelector(".plot");
  const specs = figure.querySelectorAll("script");
  const spec = JSON.parse(specs[Number(figure.dataset.variant)].textContent);
  const {height, ...layout} = spec.layout;
  if (height) plot.style.height = `${height}px`;
  const data = coloured(spec.data);
  const bar = {
    thickness: 8, outlinewidth: 0, len: 0.9, x: 1.01, xpad: 4, ticklen: 0, nticks: 6,
    tickfont: {size: 11, color: colour("faint")},
  };
  for (const one of data.flatMap(trace => [trace, trace.marker])) {
    if (one?.showscale) one.colorbar = {...bar, ...one.colorbar};
  }
  waiting.delete(figure);
  drawn.set(plot, figure);
  Plotly.react(plot, data, laidOut(coloured(layout)), CONFIG).then(() => {
    if (data.some(trace => trace.meta?.labelled)) label(plot);
    plot.dataset.drawn = "true";
  });
}

function drawNext() {  // needs no scroll event, because a screenshot of the whole page causes none
  const figure = [...waiting].find(one => one.offsetParent);
  if (!figure) return;
  draw(figure);
  setTimeout(drawNext);
}

for (const figure of document.querySelectorAll(".chart")) {
  const choose = figure.querySelector(".choose");
  choose?.addEventListener("change", event => choice(figure, event.target.selectedIndex));
  const buttons = [...figure.querySelectorAll(".choose button")];
  buttons.forEach((button, index) => button.addEventListener("click", () => {
    buttons.forEach(other => other.setAttribute("aria-pressed", String(other === button)));
    choice(figure, index);
  }));
}

function choice(figure, index) {
  figure.dataset.variant = index;
  draw(figure);
}

// ---- printing: use the light theme, and make charts as wide as a page

const root = document.documentElement;
let onScreen = "";  // the theme before printing

addEventListener("beforeprint", () => {
  onScreen = root.style.colorScheme;
  root.style.colorScheme = "light";
  root.classList.add("printing");
  for (const figure of document.querySelectorAll(".chart")) if (figure.offsetParent) draw(figure);
});
addEventListener("afterprint", () => {
  root.classList.remove("printing");
  root.style.colorScheme = onScreen;
  theme();
});

// ---- boxes with more content to the right fade out at the right edge

const sizes = new ResizeObserver(entries => entries.forEach(entry => hint(entry.target.closest(".box"))));

function hint(box) {
  box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
  box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
}

for (const box of document.querySelectorAll(".box")) {
  box.addEventListener("scroll", () => hint(box), {passive: true});
  for (const one of [box, ...box.children]) sizes.observe(one);
}

// ---- labels of markers: each label is at the position with the least overlap, if any fits

const PLACES = ["middle right", "top center", "bottom center", "middle left",
  "top right", "bottom right", "top left", "bottom left"];

function label(plot) {
  const {xaxis, yaxis} = plot._fullLayout;
  const marks = plot.data.flatMap((trace, t) => trace.x.map((x, i) => ({
    t, i, text: trace.text[i], x: xaxis.d2p(x), y: yaxis.d2p(trace.y[i]),
  })));
  const taken = marks.map(mark => [mark.x - 5, mark.y - 5, mark.x + 5, mark.y + 5]);
  const found = plot.data.map(trace => ({text: [...trace.text], textposition: []}));
  for (const mark of marks) {
    const width = 6 * mark.text.length + 2;
    const boxes = PLACES.map(place => {
      const [vertical, horizontal] = place.split(" ");
      const left = {right: mark.x + 6, center: mark.x - width / 2, left: mark.x - 6 - width}[horizontal];
      const top = {middle: mark.y - 6, top: mark.y - 20, bottom: mark.y + 7}[vertical];
      return [left, top, left + width, top + 13];
    });
    const best = boxes.findIndex(box => box[0] >= -45 && box[2] <= xaxis._length + 20 && box[1] >= -8
      && box[3] <= yaxis._length + 4 && !taken.some(other => overlap(box, other)));
    if (best < 0) found[mark.t].text[mark.i] = "";
    else taken.push(boxes[best]);
    found[mark.t].textposition[mark.i] = PLACES[Math.max(best, 0)];
  }
  found.forEach((update, t) => Plotly.restyle(plot, {
    mode: "markers+text", text: [update.text], textposition: [update.textposition], hovertext: [plot.data[t].text],
    hovertemplate: plot.data[t].hovertemplate.replace("%{text}", "%{hovertext}"), "textfont.size": 11,
  }, [t]));
}

function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}

// ---- light and dark

function remembered(value) {
  try {  // a page that is opened as a file might have no local storage
    if (value) localStorage.setItem("cheem-theme", value);
    return localStorage.getItem("cheem-theme");
  } catch { return null; }
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function theme(name) {
  if (name) document.documentElement.style.colorScheme = name;
  for (const figure of drawn.values()) waiting.add(figure);
  drawNext();
}

document.getElementById("theme").addEventListener("click", () => {
  const now = document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  remembered(next);
  theme(next);
});
dark.addEventListener("change", () => theme());
if (remembered()) theme(remembered());

// ---- runs: the page displays one run at a time; the fragment of the address contains its key

const runs = [...document.querySelectorAll("article.run")];
const picker = document.getElementById("runs");

function show(key) {
  const run = runs.find(one => one.id === key || key.startsWith(`${one.id}-`));
  if (!run) return;
  runs.forEach(one => { one.hidden = one !== run; });
  if (picker) picker.value = run.id;
  for (const [plot, figure] of drawn) if (run.contains(figure)) Plotly.Plots.resize(plot);  // the window size might have changed
  drawNext();
  follow(run);
}

function goTo() {
  let key = location.hash.slice(1);
  try { key = decodeURIComponent(key); } catch { /* the fragment of the address can be invalid */ }
  show(key || runs[0].id);
  document.getElementById(key)?.scrollIntoView();
}

picker?.addEventListener("change", () => { location.hash = picker.value; });
addEventListener("hashchange", goTo);

const sections = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const link of entry.target.closest(".run").querySelectorAll(".contents a")) {
      link.classList.toggle("here", link.hash === `#${entry.target.id}`);
    }
  }
}, {rootMargin: "-15% 0px -75% 0px"});

function follow(run) {
  sections.disconnect();
  run.querySelectorAll(".body > section").forEach(section => sections.observe(section));
}

show(runs[0].id);
if (location.hash) goTo();

// ---- architectures: display an expert's history and the tasks that share the expert

const tip = document.getElementById("tip");
const SHARERS = 8;
let asking = null;  // the cell that the tip is about

for (const figure of document.querySelectorAll(".architectures")) {
  const pool = JSON.parse(figure.querySelector("script").textContent);
  const rows = [...figure.querySelectorAll("tbody tr")];
  const table = figure.querySelector("table");
  const name = task => task === -2 ? "a forgotten task" : task < 0 ? "the backbone" : rows[task + 1]?.cells[0].textContent ?? `T${task + 1}`;
  const column = block => rows.map(row => row.cells[block + 1]);
  rows[0].cells[1].tabIndex = 0;

  function chain(block, expert) {
    const found = [];
    for (let at = expert; at >= 0 && !found.includes(at); at = pool[block][at][1]) found.push(at);
    return found;
  }

  function ask(cell) {
    const block = cell.cellIndex - 1, task = cell.parentNode.rowIndex - 2;
    quiet();
    table.classList.add("asking");
    const lines = [element("b", `${name(task)}, block ${block + 1}: ${cell.className.split(" ")[0]}`)];
    if (cell.dataset.e === undefined) {
      cell.classList.add("same");
      lines.push(element("p", "The branch is left out, so no expert runs here."));
    } else {
      const experts = chain(block, Number(cell.dataset.e)), users = [];
      column(block).forEach((other, row) => {
        if (other.dataset.e === cell.dataset.e) {
          other.classList.add("same");
          if (row !== task + 1) users.push(name(row - 1));
        } else if (experts.includes(Number(other.dataset.e ?? -1))) other.classList.add("kin");
      });
      const list = document.createElement("ol");
      for (const expert of experts) {
        const [origin, parent] = pool[block][expert];
        const kind = origin === -1 ? "pretrained, full" : parent < 0 ? "full" : `low-rank Δ on expert ${parent}`;
        list.append(element("li", `expert ${expert} of ${name(origin)}: ${kind}`));
      }
      const more = users.length > SHARERS ? ` and ${users.length - SHARERS} more` : "";
      lines.push(list, element("p", users.length ? `Shared with ${users.slice(0, SHARERS).join(", ")}${more}`
        : "No other task shares it"));
    }
    tip.replaceChildren(...lines);
    tip.hidden = false;
    asking = cell;
    place(cell.getBoundingClientRect());
  }

  function quiet() {
    asking = null;
    tip.hidden = true;
    table.classList.remove("asking");
    table.querySelectorAll(".same, .kin").forEach(cell => cell.classList.remove("same", "kin"));
  }

  const asked = event => event.target.closest?.("tbody td:not(.added)");
  table.addEventListener("pointerover", event => { const cell = asked(event); if (cell) ask(cell); else quiet(); });
  table.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") quiet(); });
  table.addEventListener("click", event => { const cell = asked(event); if (cell) { cell.focus(); ask(cell); } });
  table.addEventListener("focusin", event => { const cell = asked(event); if (cell) ask(cell); });
  table.addEventListener("focusout", quiet);
  table.addEventListener("keydown", event => {
    if (event.key === "Escape") return quiet();
    const step = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0]}[event.key];
    const cell = asked(event);
    if (!step || !cell) return;
    const next = rows[rows.indexOf(cell.parentNode) + step[0]]?.cells[cell.cellIndex + step[1]];
    if (!next || next.tagName !== "TD" || next.classList.contains("added")) return;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  addEventListener("scroll", () => {  // of the page or the table's box; focus changes also scroll
    if (!asking || !table.contains(asking)) return;
    if (asking.matches(":focus-visible") && inSight(asking)) place(asking.getBoundingClientRect());
    else quiet();
  }, {passive: true, capture: true});
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function inSight(cell) {
  const [box, at] = [cell.closest(".box"), cell].map(one => one.getBoundingClientRect());
  return at.bottom > Math.max(box.top, 0) && at.top < Math.min(box.bottom, innerHeight)
    && at.right > box.left && at.left < box.right;
}

function place(cell) {  // next to the cell if there is room, so that the column stays visible
  const {width, height} = tip.getBoundingClientRect();
  const fits = cell.right + width + 20 < innerWidth ? cell.right + 12 : cell.left - width - 12;
  const bottom = innerHeight - height - 8;
  if (fits >= 8) {
    tip.style.left = `${fits}px`;
    tip.style.top = `${Math.max(8, Math.min(cell.top - 12, bottom))}px`;
  } else {
    tip.style.left = `${(innerWidth - width) / 2}px`;
    tip.style.top = `${cell.bottom + 8 < bottom ? bottom : 64}px`;
  }
}
