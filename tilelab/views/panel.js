// uses: renderCode from code
// The sweep panel: menus, a map of the configurations, their details, a comparison, a roofline and a table.
// Python sends rows (tilelab/views/panel/widget.py); everything is drawn here, so that a selection needs no answer from it.

const CIVIDIS = ["#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78",
  "#8c8878", "#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838"]
  .map(text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)));
// Orange is slower than the peer, white as fast, purple faster.
const PURPLE_ORANGE = ["#7f3b08", "#b35806", "#e08214", "#fdb863", "#fee0b6", "#f7f7f7", "#d8daeb", "#b2abd2", "#8073ac",
  "#542788", "#2d004b"].map(text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)));
const COUNTS = ["registers", "spills", "threads", "programs_per_sm"];
const COLUMNS = { kernel: "configuration", status: "status", ratio: "speed, × {}", ms: "time, ms", tflops: "TFLOP/s",
  gbps: "GB/s", predicted_ms: "predicted time, ms", registers: "registers per thread", spills: "spilled, bytes per thread",
  smem: "shared memory, KiB", programs_per_sm: "programs per SM" };
const MENU_LABELS = { kernel: "kernel", shape: "shape", sizes: "or sizes", dtype: "type", preset: "configurations",
  target: "target" };

// ---- rows: the same rules as tilelab/views/panel/rows.py

function getValue(row, field) {
  if (field === "kernel" || field === "status") return row[field];
  if (row.status !== "ok" && !(row.status === "waiting" && field === "predicted_ms")) return null;
  const value = row[field] ?? row.built?.[field] ?? (field === "spills" && getValue(row, "registers") ? 0 : null);
  return field === "smem" && value !== null ? value / 1024 : value;
}

// The span of a scale of ratios around 1, as a logarithm: outliers do not stretch it.
function findSpan(values) {
  const sizes = values.map(value => Math.abs(Math.log(Math.max(value, 1e-9)))).sort((a, b) => a - b);
  return Math.min(Math.max(sizes[Math.floor(0.9 * (sizes.length - 1))] ?? 0, Math.log(1.1)), Math.log(3));
}

function shade(value, values, field, lessIsBetter) {
  const log = number => Math.log(Math.max(number, 1e-9));
  if (field === "ratio") return Math.min(Math.max(0.5 + log(value) / (2 * findSpan(values)), 0), 1);
  const [at, low, high] = [value, Math.min(...values), Math.max(...values)].map(log);
  const part = high > low ? (at - low) / (high - low) : 1;
  return lessIsBetter && high > low ? 1 - part : part;
}

function shadeColor(part, field) {
  const colors = field === "ratio" ? PURPLE_ORANGE : CIVIDIS;
  const at = Math.min(Math.max(part, 0), 1) * (colors.length - 1), left = Math.min(Math.floor(at), colors.length - 2);
  return colors[left].map((channel, i) => Math.round(channel + (at - left) * (colors[left + 1][i] - channel)));
}

// Black or white, whichever has more contrast (WCAG's relative luminance).
function textColor(color) {
  const [r, g, b] = color.map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

function formatNumber(value, field = "ms") {
  if (value === null || value === undefined) return "–";
  if (field === "ratio") return value.toFixed(2);
  if (COUNTS.includes(field) || value >= 99.95) return Math.round(value).toLocaleString("en-US");
  return value > 0 && value < 1e-4 ? value.toExponential(2) : value.toPrecision(3);
}

// Leave out the words that all names have; return the short names and the words left out.
function shortenNames(names) {
  const separator = [" · ", ", ", " "].find(one => names.some(name => name.includes(one))) ?? " ";
  const split = names.map(name => name.split(separator));
  const common = names.length > 1 ? split[0].filter(word => split.every(words => words.includes(word))) : [];
  return { short: split.map((words, i) => words.filter(word => !common.includes(word)).join(separator) || names[i]),
    common: common.join(separator) };
}

// Text that may break after a comma or a multiplication sign.
const breakable = text => text.replace(/[,×] ?/g, "$&\u200b");

const makeIcon = () => h("svg:svg", { viewBox: "0 0 16 16", width: "1.1em", height: "1.1em", "aria-hidden": true },
  h("svg:path", { d: "M2 6V2h4M10 2h4v4M14 10v4h-4M6 14H2v-4", fill: "none", stroke: "currentColor",
    "stroke-width": 2 }));

// Three to about six round numbers between the ends of a logarithmic axis.
function chooseTicks(low, high) {
  let found = [];
  for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]]) {
    found = [];
    for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade++) {
      found.push(...digits.map(digit => digit * 10 ** decade).filter(tick => low <= tick && tick <= high));
    }
    if (found.length >= 3) break;
  }
  return found;
}

function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function render({ model, el }) {
  const live = model.get("live");
  let data = model.get("data");
  let values = data.state.values; // of the menus
  let selected = -1, pinned = -1, hovered = -1; // indices of rows
  let sort = { column: null, down: false };
  let nameParts = { short: [], common: "" };
  let cells = []; // of the map: { element, rows, x, y, drawn }
  let cellOf = []; // the cell of each row
  let columns = [], lines = [];
  const onPage = [];
  let endCode = () => {}; // what the listings of code leave to be undone
  let wanted = null; // the name of a configuration that the address of the page asks for
  const stage = data.alone && document.body.hasAttribute("data-voila");

  const listen = (target, type, handler) => {
    target.addEventListener(type, handler);
    onPage.push(() => target.removeEventListener(type, handler));
  };
  const send = (type, more = {}) => live && model.send({ type, ...more });
  const rows = () => data.rows;
  const fieldLabel = field => data.fields[field][0].replace("{}", data.choice ? data.choice.peer : "the peer");
  const fileName = suffix => data.choice.name.replace(/[^\p{L}\p{N}_]+/gu, "-").replace(/^-|-$/g, "") + suffix;

  // ---- elements

  const menus = {}, buttons = {};
  for (const name of Object.keys(MENU_LABELS)) {
    menus[name] = name === "sizes" ? h("input", { type: "text", spellcheck: "false" }) : h("select");
    menus[name].addEventListener("change", () => changeMenu(name));
  }
  for (const name of ["show", "x", "y"]) {
    menus[name] = h("select");
    menus[name].addEventListener("change", () => changeView(name));
  }
  const button = (name, text, title, action) => (buttons[name] = h("button", {
    type: "button", class: `tiles-button tiles-${name}`, title, onclick: action }, text));
  const progress = h("progress", { class: "tiles-progress", max: 1, "aria-label": "progress of the sweep" });
  const status = h("div", { class: "tiles-status", role: "status" });
  const answer = h("div");
  const words = h("p", { class: "tiles-words" });
  const menuBox = h("div", { class: "tiles-menus" }, ...Object.entries(MENU_LABELS).map(([name, text]) =>
    h("label", { class: `tiles-menu tiles-menu-${name}` }, h("span", {}, text), menus[name])));
  const actions = h("div", { class: "tiles-actions" },
    button("run", "Run", "sweep, or go on where a sweep was cancelled (R)", () => send("run")),
    button("cancel", "Cancel", "stop now; what is finished stays (Esc)", () => send("cancel")),
    button("again", "Start over", "forget this choice's rows and sweep again", () => send("again")),
    stage && button("theme", "Theme", "light or dark", switchTheme));
  const title = h("h2", { class: "tiles-name" });
  const source = h("span", { class: "tiles-source" });
  const scale = h("span", { class: "tiles-scale" });
  const legend = h("p", { class: "tiles-legend" });
  const map = h("div", { class: "tiles-map", role: "grid", "aria-label": "map of the configurations" });
  const chosen = h("p", { class: "tiles-chosen" });
  const mapPane = h("section", { class: "tiles-map-pane" },
    h("div", { class: "tiles-head" }, title, source),
    h("div", { class: "tiles-head" }, h("label", {}, "shows ", menus.show), h("label", {}, "across ", menus.x),
      h("label", {}, "upwards ", menus.y), h("span", { class: "tiles-right" },
        button("full", makeIcon(), "the map on the full screen (F); Esc leaves",
          () => setFull(!root.classList.contains("tiles-full"))))),
    map, h("div", { class: "tiles-head" }, legend, scale), chosen);
  buttons.full.setAttribute("aria-label", "full screen");

  const detail = h("div", { class: "tiles-body tiles-detail" });
  const compared = h("div", { class: "tiles-body tiles-compared" });
  const roofline = h("div", { class: "tiles-body tiles-roofline" });
  const tableHead = h("tr"), tableBody = h("tbody"), tableNote = h("p", { class: "tiles-note" });
  const filter = h("input", { type: "search", class: "tiles-filter", "aria-label": "filter the rows",
    spellcheck: "false",
    placeholder: "filter: 128, failed, registers<200", oninput: () => drawTable() });
  const table = h("div", { class: "tiles-body tiles-table" },
    filter, tableNote,
    h("div", { class: "tiles-scroll" }, h("table", {}, h("thead", {}, tableHead), tableBody)));
  const upper = makeTabs("upper", { details: ["Details", detail], compare: ["Compare", compared] });
  const lower = makeTabs("lower", { roofline: ["Roofline", roofline], table: ["Table", table] });
  upper.bar.append(
    button("pin", "Pin", "pin the selected configuration, to compare others with it (P)", pinSelected),
    live ? button("listing", "Code", "the code of the pinned and the selected configuration", askForCode) : "",
    button("copy", "Copy as Python", "copy the selected configuration as Python code", copyPython));
  lower.bar.append(button("csv", "CSV", "save the rows of the table", exportTable),
    button("png", "PNG", "save the map as a picture", exportPicture));
  const tip = h("div", { class: "tiles-tip", hidden: true });
  const code = h("dialog", { class: "tiles-code-dialog", onclose: () => endCode() });
  const root = h("div", { class: `tiles-view tiles-panel${stage ? " tiles-stage" : ""}` },
    h("div", { class: "tiles-in", role: stage && "main" },
      stage && h("div", { class: "tiles-head" }, h("h1", { class: "tiles-title" }, "Which tile configuration is fastest?"),
        h("p", {}, live ? "Choose a kernel, and select a cell of the map: each is a configuration. Run tries them on this machine."
          : "Select a cell of the map: each is a configuration. Other kernels and Run follow in some seconds.")),
      live && menuBox, h("div", { class: "tiles-run-line" }, live && actions,
        h("div", { class: "tiles-said" }, live && progress, status)), answer, words,
      h("div", { class: "tiles-main" }, mapPane, h("div", { class: "tiles-side" }, upper.pane, lower.pane))),
    tip, code);
  el.append(root);
  keepKeys(root);

  function makeTabs(place, tabs) {
    const bar = h("div", { class: "tiles-tabs" }), list = h("div", { role: "tablist", class: "tiles-tablist" });
    bar.append(list);
    const pane = h("section", { class: `tiles-${place}` }, bar, ...Object.values(tabs).map(([, body]) => body));
    const heads = {};
    const show = name => {
      for (const [other, [, body]] of Object.entries(tabs)) {
        body.hidden = other !== name;
        heads[other].setAttribute("aria-selected", other === name);
        heads[other].tabIndex = other === name ? 0 : -1;
      }
      found.current = name;
    };
    for (const [name, [text, body]] of Object.entries(tabs)) {
      heads[name] = h("button", { type: "button", role: "tab", class: `tiles-tab tiles-tab-${name}`,
        onclick: () => { show(name); drawPanes(); } }, text);
      body.setAttribute("role", "tabpanel");
      body.tabIndex = 0; // so that arrows scroll it
      body.setAttribute("aria-label", text);
      list.append(heads[name]);
    }
    list.addEventListener("keydown", event => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const next = Object.keys(tabs).find(name => name !== found.current);
      show(next);
      drawPanes();
      heads[next].focus();
    });
    const found = { pane, bar, show, current: Object.keys(tabs)[0] };
    show(found.current);
    return found;
  }

  // ---- menus

  // The options `unrecorded` stand apart, last.
  function fillMenu(menu, options, value, unrecorded = []) {
    const key = JSON.stringify([options, unrecorded]);
    if (menu.dataset.options !== key) {
      menu.dataset.options = key;
      const [first, last] = [false, true].map(apart => options.filter(([name]) => unrecorded.includes(name) === apart)
        .map(([name, text]) => h("option", { value: name }, text)));
      menu.replaceChildren(...first, ...(last.length ? [h("optgroup", { label: "not all recorded" }, ...last)] : []));
    }
    menu.value = value;
    menu.title = menu.selectedOptions[0]?.text ?? ""; // some are longer than their menu
  }

  function drawMenus() {
    const kernel = data.kernels[values.kernel], same = names => names.map(name => [name, name]);
    const named = Object.hasOwn(kernel.shapes, values.shape), { shape, dtype, preset } = data.choice?.unrecorded ?? {};
    fillMenu(menus.kernel, same(Object.keys(data.kernels)), values.kernel);
    fillMenu(menus.shape, [...same(Object.keys(kernel.shapes)), ["", "other sizes"]], named ? values.shape : "",
      shape && [...shape, ""]);
    menus.shape.options[menus.shape.options.length - 1].disabled = named;
    if (document.activeElement !== menus.sizes || !data.state.problem) {
      menus.sizes.value = named ? kernel.shapes[values.shape] : values.shape;
    }
    fillMenu(menus.dtype, same(kernel.dtype), values.dtype, dtype);
    fillMenu(menus.preset, same(kernel.preset), values.preset, preset);
    fillMenu(menus.target, Object.entries(data.targets), values.target);
    fillMenu(menus.x, same(kernel.axes), values.x);
    fillMenu(menus.y, same(kernel.axes), values.y);
    for (const name of Object.keys(MENU_LABELS)) menus[name].disabled = data.state.running;
  }

  function changeMenu(name) {
    if (name === "shape" && !menus.shape.value) return;
    const wanted = name === "sizes" ? { shape: menus.sizes.value } : { [name]: menus[name].value };
    root.setAttribute("aria-busy", "true");
    send("choose", { values: wanted });
  }

  function changeView(name) {
    values = { ...values, [name]: menus[name].value };
    data.state.values = values;
    send("choose", { values: { [name]: values[name] } });
    drawAll();
  }

  // ---- messages

  function takeData(next) {
    const name = index => index >= 0 && data.rows[index] ? data.rows[index].kernel : null;
    const kept = [name(selected), name(pinned)];
    data = next;
    values = data.state.values;
    [selected, pinned] = kept.map(wanted => wanted === null ? -1 : data.rows.findIndex(row => row.kernel === wanted));
    hovered = -1;
    nameRows();
    findWanted();
    drawAll();
  }

  // Select the configuration that the address of the page names, once its rows are here.
  function findWanted() {
    const index = wanted === null ? -1 : data.rows.findIndex(row => row.kernel === wanted);
    if (index >= 0) [selected, wanted] = [index, null];
  }

  function nameRows() {
    nameParts = shortenNames(data.rows.map(row => row.kernel));
  }

  function receive(message) {
    root.removeAttribute("aria-busy");
    if (message.type === "data") takeData(message.data);
    else if (message.type === "rows") {
      for (const [index, row] of Object.entries(message.rows)) data.rows[index] = row;
      data.state = message.state;
      values = data.state.values;
      drawAll();
    } else if (message.type === "code") showCode(message);
  }

  // ---- the address of the page

  function readAddress() {
    const found = new URLSearchParams(location.hash.slice(1));
    return Object.fromEntries(["kernel", "shape", "dtype", "preset", "target", "x", "y", "show"]
      .filter(name => found.has(name)).map(name => [name, found.get(name)]));
  }

  function writeAddress() {
    if (!stage) return;
    const kept = live ? values : Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const config = selected >= 0 ? { config: rows()[selected].kernel } : {};
    history.replaceState(history.state, "", "#" + new URLSearchParams({ ...kept, ...config }));
  }

  // ---- the map

  function chooseField() {
    const known = Object.keys(data.fields).filter(name => rows().some(row => getValue(row, name)));
    if (known.includes(values.show) || !known.length) return known.length || data.choice?.measures ? values.show
      : "registers";
    return known[0];
  }

  function arrangeMap() {
    const layout = JSON.stringify([values.x, values.y, data.choice.keys, rows().length]);
    if (map.dataset.layout === layout) return;
    map.dataset.layout = layout;
    const [across, upwards] = [data.choice.axes[values.x], data.choice.axes[values.y]];
    columns = across.labels;
    lines = [...upwards.labels].reverse();
    const byPlace = new Map();
    cellOf = [];
    rows().forEach((_, index) => {
      const x = across.of[index], y = lines.length - 1 - upwards.of[index], key = `${x},${y}`;
      if (!byPlace.has(key)) byPlace.set(key, { x, y, rows: [], drawn: "" });
      byPlace.get(key).rows.push(index);
      cellOf[index] = byPlace.get(key);
    });
    cells = [...byPlace.values()].sort((a, b) => a.y - b.y || a.x - b.x);
    for (const cell of cells) {
      cell.element = h("div", { class: "tiles-cell", role: "gridcell", tabindex: -1,
        onclick: () => select(cell.rows[0], true), onfocus: () => cell.rows.includes(selected) || select(cell.rows[0]),
        onpointerenter: () => hover(cell.rows[0], cell.element), onpointerleave: () => hover(-1) });
    }
    map.style.setProperty("--columns", columns.length);
    map.style.setProperty("--lines", lines.length);
    map.replaceChildren(...lines.map((line, y) => h("div", { class: "tiles-line", role: "row" },
      h("div", { class: "tiles-tick tiles-upwards", role: "rowheader" }, line),
      ...columns.map((_, x) => byPlace.get(`${x},${y}`)?.element ?? h("div", { role: "gridcell" })))),
    h("div", { class: "tiles-line", role: "row" }, h("div", { class: "tiles-tick tiles-corner" }),
      ...columns.map(column => h("div", { class: "tiles-tick tiles-across", role: "columnheader" },
        breakable(column)))));
  }

  function drawMap() {
    const field = chooseField(), lessIsBetter = data.fields[field][1];
    const rank = [];
    data.state.order.forEach((index, place) => { rank[index] = place; });
    const known = rows().map(row => getValue(row, field)).filter(value => value !== null);
    fillMenu(menus.show, Object.keys(data.fields).map(name => [name, fieldLabel(name)]), field);
    for (const option of menus.show.options) {
      option.disabled = option.value !== field && !rows().some(row => getValue(row, option.value));
    }
    arrangeMap();
    for (const cell of cells) {
      cell.rows.sort((a, b) => rank[a] - rank[b]);
      const row = rows()[cell.rows[0]], value = getValue(row, field), best = cell.rows.includes(data.state.best);
      const more = cell.rows.length > 1 && row.status !== "rejected" ? `\u2002+${cell.rows.length - 1}` : "";
      const word = ["rejected", "waiting"].includes(row.status) ? "" : row.word ?? "–"; // the legend says the others
      const text = `${best ? "★\u2009" : ""}${value === null ? word : formatNumber(value, field)}${more}`;
      const here = cell.rows.some(index => rows()[index].here);
      const part = value !== null && row.status === "ok" ? shade(value, known, field, lessIsBetter) : null;
      const drawn = JSON.stringify([text, part, row.status, best, row.reason, here, field]);
      if (cell.drawn === drawn) continue;
      cell.drawn = drawn;
      const color = part === null ? null : shadeColor(part, field);
      cell.element.textContent = text;
      cell.element.style.background = color ? `rgb(${color})` : "";
      cell.element.style.color = color ? textColor(color) : "";
      for (const name of ["ok", "waiting", "rejected", "wrong", "failed"]) {
        cell.element.classList.toggle(`tiles-${name}`, row.status === name);
      }
      cell.element.classList.toggle("tiles-best", best);
      cell.element.classList.toggle("tiles-here", here);
      cell.element.dataset.cause = row.status === "rejected" ? row.word : "";
      cell.element.setAttribute("aria-label", `${columns[cell.x]}, ${lines[cell.y]}: ` +
        (value === null ? row.reason || row.word : `${text} (${fieldLabel(field)})`) +
        (here ? `, ${describeHere()}` : ""));
    }
    drawLegend();
    const overlaid = rows().some(row => row.from_record),
      timed = data.choice.measures || rows().some(row => getValue(row, "ms"));
    title.textContent = data.choice.name;
    source.textContent = timed ? (overlaid ? data.choice.source : "") : "no recorded time for this choice";
    const parts = [];
    if (known.length && rows().some(row => row.status === "ok")) {
      const ends = [Math.min(...known), Math.max(...known)];
      if (lessIsBetter) ends.reverse();
      const bar = (from, to) => h("i", { style: `background: linear-gradient(90deg, ${[0, 1, 2, 3, 4].map(step =>
        `rgb(${shadeColor(from + (to - from) * step / 4, field)})`)})` });
      if (field === "ratio") { // around 1, as far as the ratios reach
        const span = Math.exp(findSpan(known)), [below, above] = ends.map(end => shade(end, known, field));
        if (below <= 0.45) parts.push(ends[0] * span < 1 ? `≤ ${(1 / span).toFixed(2)}` : ends[0].toFixed(2), bar(below, 0.5));
        parts.push("1.00");
        if (above >= 0.55) parts.push(bar(0.5, above), ends[1] > span ? `≥ ${span.toFixed(2)}` : ends[1].toFixed(2));
      } else parts.push(formatNumber(ends[0], field), bar(0, 1), formatNumber(ends[1], field));
    }
    scale.replaceChildren(...parts);
  }

  const describeHere = () => data.choice.measures ? "measured here" : "built here";

  // Every mark on the map in words.
  function drawLegend() {
    const drawn = cells.map(cell => rows()[cell.rows[0]]), item = (mark, ...text) => h("span", {}, mark, " ", ...text);
    const swatch = (kind, cause = "") => h("i", { class: `tiles-cell ${kind}`, "data-cause": cause, "aria-hidden": true });
    const most = Math.max(...cells.map(cell => cell.rows.length));
    const words = status => [...new Set(drawn.filter(row => row.status === status).map(row => row.word))];
    legend.replaceChildren(...[
      data.state.best !== null && item("★", "fastest"),
      most > 1 && item(`+${most - 1}:`, `as many slower ones in the cell (Enter shows them)`),
      ...words("rejected").map(word => item(swatch("tiles-rejected", word), word)),
      words("waiting").length && item(swatch("tiles-waiting"), "not built"),
      rows().some(row => row.here) && item(swatch("tiles-here"), describeHere()),
      pinned >= 0 && item(swatch("tiles-pinned"), "pinned"),
    ].filter(Boolean));
  }

  // What the words mean in the name of the selected configuration, or else of the fastest one.
  function drawWords() {
    const named = rows()[selected >= 0 ? selected : data.state.best ?? data.state.order[0]], { words: meanings = {} } = data.choice;
    const said = named ? [...named.kernel.split(" · "), named.ratio ? `× ${data.choice.peer}` : ""] : [];
    words.replaceChildren(...said.filter(word => meanings[word]).map(word =>
      h("span", {}, h("b", {}, word), `: ${meanings[word]}`)));
  }

  function markRows() {
    const at = selected >= 0 ? cellOf[selected] : null;
    for (const cell of cells) {
      const isSelected = cell === at;
      cell.element.classList.toggle("tiles-selected", isSelected);
      cell.element.setAttribute("aria-selected", isSelected);
      cell.element.classList.toggle("tiles-pinned", pinned >= 0 && cellOf[pinned] === cell);
      cell.element.tabIndex = isSelected || !at && cell === cells[0] ? 0 : -1;
    }
    for (const mark of root.querySelectorAll("[data-row]")) {
      mark.classList.toggle("tiles-selected", +mark.dataset.row === selected);
      mark.classList.toggle("tiles-pinned", +mark.dataset.row === pinned);
    }
    chosen.textContent = at ? describeShortly(selected) : "";
    drawLegend();
    drawWords();
  }

  function moveSelection(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !cells.length) return false;
    const from = cellOf[selected] ?? cells[0];
    let [x, y] = [from.x, from.y], next = null;
    while (!next) {
      [x, y] = [x + step[0], y + step[1]];
      if (x < 0 || y < 0 || x >= columns.length || y >= lines.length) return true;
      next = cells.find(cell => cell.x === x && cell.y === y);
    }
    select(next.rows[0]);
    next.element.focus({ preventScroll: true });
    next.element.scrollIntoView({ block: "nearest", inline: "nearest" });
    return true;
  }

  map.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moveSelection(event)) event.preventDefault();
    if (event.key === "Enter") { // the details, then the next configuration of the cell
      event.preventDefault();
      const inside = cellOf[selected]?.rows ?? [];
      const again = upper.current === "details" && inside.length > 1;
      upper.show("details");
      if (inside.length) select(again ? inside[(inside.indexOf(selected) + 1) % inside.length] : selected);
    }
  });

  // ---- selection

  function describeShortly(index) {
    const row = rows()[index], value = getValue(row, "ms");
    const time = value === null ? row.reason || row.word || "built" : `${formatNumber(value)} ms`;
    const ratio = getValue(row, "ratio") ? `${formatNumber(row.ratio, "ratio")} × ${data.choice.peer}, ` : "";
    return `${row.kernel}: ${ratio}${time}`;
  }

  function select(index, focused = false) {
    selected = index;
    if (focused && cellOf[index]) cellOf[index].element.focus({ preventScroll: true });
    markRows();
    drawDetail();
    drawCompared();
    drawButtons();
    writeAddress();
  }

  function hover(index, near = null) {
    hovered = index;
    for (const cell of cells) cell.element.classList.toggle("tiles-hovered", index >= 0 && cellOf[index] === cell);
    for (const mark of root.querySelectorAll("[data-row]")) mark.classList.toggle("tiles-hovered",
      +mark.dataset.row === index);
    tip.hidden = index < 0 || !near;
    if (tip.hidden) return;
    tip.textContent = describeShortly(index);
    const [box, place] = [root.getBoundingClientRect(), near.getBoundingClientRect()];
    const below = place.bottom - box.top + 4, high = tip.offsetHeight;
    tip.style.left = `${Math.max(4, Math.min(place.left - box.left, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${below + high > box.height ? place.top - box.top - high - 4 : below}px`;
  }

  function pinSelected() {
    pinned = pinned === selected ? -1 : selected;
    markRows();
    drawCompared();
    drawButtons();
  }

  // ---- details and comparison

  const explainName = index => data.choice.reprs[index] ? `In Python: ${data.choice.reprs[index]}` : "";

  function describeBuild(row, compilers) {
    if (!row.registers) return row.reason ?? row.word;
    return `${row.registers} registers per thread, ${row.spills ?? 0} bytes spilled, ` +
      `${(row.smem ?? 0).toLocaleString("en-US")} bytes of shared memory` +
      (row.programs_per_sm ? `, ${row.programs_per_sm} per SM` : "") + (compilers ? ` (${compilers})` : "");
  }

  function drawDetail() {
    if (selected < 0) {
      detail.replaceChildren(h("p", {}, "Select a cell, a point or a row for its figures."),
        ...data.state.winner.slice(1).map(said => h("p", {}, said)));
      return;
    }
    const row = rows()[selected], facts = [], peer = data.choice.peer;
    if (row.ms && getValue(row, "ms") !== null) {
      let text = describeShortly(selected).slice(row.kernel.length + 2) + (row.again ? ", timed again" : "");
      if (row.error !== undefined) {
        text += `; largest error ${row.error.toExponential(1)}`;
        if (row.peer_error !== undefined) text += ` (${peer}'s ${row.peer_error.toExponential(1)})`;
      }
      facts.push(["measured", text + (row.from_record ? `; ${data.choice.source}` : "")]);
    }
    if (row.note) facts.push(["note", row.note]);
    if (row.predicted_ms) facts.push(["predicted", `${formatNumber(row.predicted_ms)} ms`]);
    const { record, here } = data.choice.compilers ?? {};
    if (row.registers) {
      facts.push([row.from_record ? "recorded build" : "build", describeBuild(row, row.from_record ? record : here)]);
    }
    if (row.built) facts.push(["built here", describeBuild(row.built, here)]);
    const counts = Object.entries(row.counts ?? row.built?.counts ?? {});
    if (counts.length) facts.push([row.counts ? "instructions" : "instructions here", counts.map(([name, count]) => `${count} ${name}`).join(", ")]);
    const others = (cellOf[selected]?.rows ?? []).filter(index => index !== selected);
    const name = explainName(selected);
    detail.replaceChildren(h("h3", { title: name }, row.kernel, selected === data.state.best ? " ★ fastest" : ""),
      ...(facts.length && row.status === "ok" ? [] : [h("p", {}, (row.word ?? "built") + (row.reason ? `: ${row.reason}` : ""))]),
      h("dl", {}, ...facts.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
      ...(others.length ? [h("p", { class: "tiles-others" }, "also in this cell: ", ...others.map(index =>
        h("button", { type: "button", class: "tiles-other", title: rows()[index].kernel, "data-row": index,
          onclick: () => select(index) }, nameParts.short[index])))] : []), h("p", {}, name));
  }

  function drawCompared() {
    if (pinned < 0 || selected < 0 || pinned === selected) {
      compared.replaceChildren(h("p", {}, pinned < 0 ? "Pin a configuration (P), then select another one." :
        `Pinned: ${rows()[pinned].kernel}. Select another configuration.`));
      return;
    }
    const [left, right] = [rows()[pinned], rows()[selected]];
    const lines = [["status", describeStatus], ...["ratio", "ms", "predicted_ms", "tflops", "gbps", "registers",
      "spills", "smem", "programs_per_sm", "threads"].map(name => [name, row => getValue(row, name)])];
    const names = new Set([left, right].flatMap(row => Object.keys(row.counts ?? {})));
    lines.push(...[...names].map(name => [`${name} instructions`,
      row => row.counts ? row.counts[name] ?? 0 : null]));
    const ranked = [left, right].every(row => getValue(row, "ratio")), label = name =>
      (COLUMNS[name] ?? name).replace("{}", data.choice.peer);
    const body = lines.map(([name, read]) => [name, read(left), read(right)])
      .filter(([, a, b]) => a !== null || b !== null).map(([name, a, b]) => {
        const number = typeof a === "number" && typeof b === "number", differs = a !== b;
        const field = name.endsWith(" instructions") ? "registers" : name;
        const counted = COUNTS.includes(field);
        const change = !number || ranked && ["ms", "tflops", "gbps"].includes(name) ? "" : !differs ? "same" : counted || !a
          ? `${b > a ? "+" : "−"}${formatNumber(Math.abs(b - a), field)}` :
          `${b > a ? "+" : "−"}${(100 * Math.abs(b / a - 1)).toFixed(Math.abs(b / a - 1) < 0.1 ? 1 : 0)} %`;
        const show = value => typeof value === "string" ? value : formatNumber(value, field);
        const cell = value => h("td", { class: typeof value === "string" && "tiles-text" }, show(value));
        return h("tr", { class: differs && "tiles-differs" }, h("th", { scope: "row" }, label(name)), cell(a), cell(b),
          h("td", {}, change));
      });
    const head = (kind, row, index) => h("th", { scope: "col", title: row.kernel }, kind, h("br"),
      breakable(nameParts.short[index]));
    compared.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, h("td"), head("pinned", left, pinned),
      head("selected", right, selected), h("th", { scope: "col" }, "change"))), h("tbody", {}, ...body)),
    ranked ? h("p", { class: "tiles-note" }, `The speed ranks: ${data.choice.peer} ran beside each. ` +
      "Times of two moments do not compare, because the clock changes.") : "");
  }

  // ---- the roofline

  function drawRoofline() {
    const roof = data.choice.roofline;
    if (roof.problem) {
      roofline.replaceChildren(h("p", {}, roof.problem));
      return;
    }
    if (!roofline.clientWidth) return; // not on the page yet: the observer of its size calls again
    const em = parseFloat(getComputedStyle(roofline).fontSize);
    const width = Math.max(roofline.clientWidth, 16 * em), height = Math.max(roofline.clientHeight - 4, 12 * em);
    const middle = roof.label.indexOf(" ", roof.label.length / 2); // where a label that is too wide breaks
    const label = 0.55 * em * roof.label.length < width || middle < 0 ? [roof.label]
      : [roof.label.slice(0, middle), roof.label.slice(middle + 1)];
    const [L, R, T, B] = [3.6 * em, 0.8 * em, 1.9 * em, (2 + 1.2 * label.length) * em];
    const points = rows().map((row, index) => [roof.intensity[index], getValue(row, roof.field),
      index]).filter(point => point[1]);
    const speeds = points.map(point => point[1]), flat = Object.values(roof.flat), slopes = Object.entries(roof.slopes);
    const left = Math.min(...roof.intensity) / 1.35, right = Math.max(...roof.intensity) * 1.35;
    const ceiling = Math.max(...(flat.length ? flat : speeds.length ? speeds : slopes.length
      ? slopes.map(([, s]) => s * right) : [1]));
    const high = 2 * Math.max(ceiling, ...speeds), low = Math.min(high / 14, ...speeds.map(value => 0.6 * value));
    const x = value => L + (width - L - R) * Math.log(value / left) / Math.log(right / left);
    const y = value => height - B - (height - B - T) * Math.log(value / low) / Math.log(high / low);
    const text = (at, up, words, anchor = "start") => h("svg:text", { x: at, y: up, "text-anchor": anchor }, words);
    const path = (kind, d) => h("svg:path", { class: kind, d });
    const number = value => +value.toPrecision(3) >= 1000 ? Math.round(value).toLocaleString("en-US")
      : `${+value.toPrecision(3)}`;
    const centre = (L + width - R) / 2, isWide = centre + 0.3 * em * label[0].length > width; // no room in the middle
    const parts = [text(0, em, roof.unit), ...label.map((words, line) => text(isWide ? width - 2 : centre,
      height - (0.5 + 1.2 * (label.length - 1 - line)) * em, words, isWide ? "end" : "middle"))];
    for (const tick of chooseTicks(left, right)) {
      parts.push(path("tick", `M${x(tick)} ${T}V${height - B}`),
        text(x(tick), height - B + 1.2 * em, number(tick), "middle"));
    }
    for (const tick of chooseTicks(low, high)) {
      parts.push(path("tick", `M${L} ${y(tick)}H${width - R}`),
        text(L - 0.3 * em, y(tick) + 0.35 * em, number(tick), "end"));
    }
    for (const [label, speed] of Object.entries(roof.flat)) {
      parts.push(path("roof", `M${L} ${y(speed)}H${width - R}`),
        text(L + 0.3 * em, y(speed) - 0.4 * em, `${label}, ${number(speed)}`));
    }
    slopes.forEach(([label, slope], index) => {
      const [start, end] = [Math.max(left, low / slope), Math.min(right, ceiling / slope)];
      if (start >= end) return;
      parts.push(path("roof", `M${x(start)} ${y(slope * start)}L${x(end)} ${y(slope * end)}`));
      parts.push(text(width - R, height - B - 0.4 * em - 1.2 * em * index, `slope: ${label}`, "end"));
    });
    const last = index => index === selected ? 2 : index === data.state.best ? 1 : 0;
    points.sort((a, b) => last(a[2]) - last(b[2]));
    for (const [intensity, speed, index] of points) {
      const best = index === data.state.best;
      const point = h("svg:g", { "data-row": index,
        class: `tiles-point${rows()[index].from_record ? " hollow" : ""}${best ? " best" : ""}`,
        transform: `translate(${x(intensity)} ${y(speed)})`, onclick: () => select(index, true) },
      h("svg:circle", { class: "ring", r: 0.62 * em }),
        h("svg:circle", { class: "dot", r: (best ? 0.42 : 0.28) * em }));
      point.addEventListener("pointerenter", () => hover(index, point));
      point.addEventListener("pointerleave", () => hover(-1));
      parts.push(point);
    }
    if (!points.length) parts.push(text((L + width) / 2, height / 2, "nothing is timed", "middle"));
    roofline.replaceChildren(h("svg:svg", { width, height, role: "img",
      "aria-label": `roofline: ${points.length} timed configurations; ${roof.unit} over ${roof.label}` }, ...parts));
  }

  // ---- the table

  // Return [name of a field, comparison, number] of a word such as "registers<200", or null.
  function parseRule(word) {
    const rule = word.match(/^(\w+)(<=|>=|<|>|=)([\d.]+)$/);
    if (!rule) return null;
    const column = Object.keys(COLUMNS).find(name => [name, COLUMNS[name].toLowerCase()].some(text =>
      text.startsWith(rule[1])));
    return [column ?? rule[1], rule[2], +rule[3]];
  }

  function keepsRow(row, words) {
    const text = `${row.kernel} ${row.status} ${describeStatus(row)} ${row.reason ?? ""} ${row.note ?? ""}`.toLowerCase();
    return words.every(word => {
      const rule = parseRule(word);
      if (!rule) return text.includes(word);
      const [name, comparison, limit] = rule, value = getValue(row, name);
      return typeof value === "number" && { "<": value < limit, ">": value > limit, "=": value === limit,
        "<=": value <= limit, ">=": value >= limit }[comparison];
    });
  }

  function tableColumns() {
    return Object.keys(COLUMNS).filter(name => rows().some(row => getValue(row, name) !== null));
  }

  const readFilter = () => filter.value.toLowerCase().replace(/\s*([<>]=?|=)\s*/g, "$1").split(/\s+/).filter(Boolean);

  // Return a sentence for a filter that compares a column which no row has, or "".
  function describeUnknownColumn() {
    const isNumber = name => rows().some(row => typeof getValue(row, name) === "number");
    const unknown = readFilter().map(parseRule).find(rule => rule && !isNumber(rule[0]));
    return !unknown ? "" : `There is no column of numbers named ${unknown[0]}; there ${
      tableColumns().filter(isNumber).length ? `are ${tableColumns().filter(isNumber).map(name =>
        COLUMNS[name].split(/[, ]/)[0]).join(", ")}` : "is none yet"}.`;
  }

  function listRows() {
    const words = readFilter(), found = data.state.order.filter(index => keepsRow(rows()[index], words));
    if (!sort.column) return found;
    const value = index => getValue(rows()[index], sort.column), sign = sort.down ? -1 : 1;
    return found.sort((a, b) => {
      const [left, right] = [value(a), value(b)];
      if (left === null || right === null) return (left === null) - (right === null);
      return sign * (typeof left === "number" ? left - right : left.localeCompare(right, "en", { numeric: true }));
    });
  }

  function describeStatus(row) {
    const timed = row.ms ? (row.again ? "timed twice" : "timed") : "built";
    const said = row.status === "ok" ? timed : row.word ?? row.status;
    const mixed = rows().some(one => one.ms && !one.from_record); // the map's head says it where all are recorded
    return (row.from_record && mixed ? `${said}, recorded` : said) + (row.built ? "; built here" : "");
  }

  function drawTable() {
    const shown = listRows(), names = tableColumns(), hadFocus = tableBody.contains(document.activeElement);
    const label = name => COLUMNS[name].replace("{}", data.choice.peer);
    tableHead.replaceChildren(...names.map(name => h("th", { scope: "col",
      "aria-sort": sort.column === name ? (sort.down ? "descending" : "ascending") : "none" },
    h("button", { type: "button", class: "tiles-sort", onclick: () => sortBy(name), "data-column": name,
      title: name === "kernel" && explainName(data.state.best ?? 0) },
      label(name), sort.column === name ? (sort.down ? " ▼" : " ▲") : ""))));
    const stop = shown.includes(selected) ? selected : shown[0];
    tableBody.replaceChildren(...shown.map(index => {
      const row = rows()[index];
      const line = h("tr", { "data-row": index, tabindex: index === stop ? 0 : -1, onclick: () => select(index),
        title: row.reason ?? row.kernel }, ...names.map(name => {
        const value = getValue(row, name);
        const text = name === "kernel" ? `${index === data.state.best ? "★ " : ""}${nameParts.short[index]}` :
          name === "status" ? describeStatus(row) : formatNumber(value, name);
        return name === "kernel" ? h("th", { scope: "row", title: row.kernel }, text)
          : h("td", { "data-field": name }, text);
      }));
      line.addEventListener("pointerenter", () => hover(index));
      line.addEventListener("pointerleave", () => hover(-1));
      return line;
    }));
    const again = rows().filter(row => row.again).length, first = again ? `; the ${again} timed twice come first` : "";
    const knows = name => rows().some(row => getValue(row, name));
    const ranked = knows("ratio") ?
      `fastest first by speed beside ${data.choice.peer}, not by time, because the clock changes during a sweep${first}` :
      knows("ms") ? `fastest first by time${first}` :
        rows().some(row => row.predicted_ms) ? "ranked by predicted time" : "not ranked: nothing is timed or predicted";
    const order = sort.column ? `sorted by ${label(sort.column)}` : ranked;
    tableNote.textContent = describeUnknownColumn() || `${shown.length} of ${rows().length}, ${order}` +
      (nameParts.common ? `; all have ${nameParts.common}` : "");
    markRows();
    if (hadFocus) tableBody.querySelector("tr[tabindex='0']")?.focus({ preventScroll: true });
  }

  function sortBy(name) { // ascending, descending, then as ranked
    sort = sort.column !== name ? { column: name, down: false } : sort.down ? { column: null, down: false }
      : { column: name, down: true };
    drawTable();
    tableHead.querySelector(`[data-column="${name}"]`).focus();
  }

  tableBody.addEventListener("keydown", event => {
    const line = event.target.closest("tr"), next = { ArrowDown: line?.nextElementSibling,
      ArrowUp: line?.previousElementSibling }[event.key];
    if (["ArrowDown", "ArrowUp", "Enter"].includes(event.key)) event.preventDefault();
    if (line && event.key === "Enter") select(+line.dataset.row);
    if (!next) return;
    line.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    select(+next.dataset.row);
  });

  // ---- export

  function exportTable() {
    const names = [...Object.keys(COLUMNS), "reason", "note"];
    const counts = [...new Set(rows().flatMap(row => Object.keys(row.counts ?? {})))];
    const quote = value => value === null || value === undefined ? "" : `"${String(value).replace(/"/g, '""')}"`;
    const lines = listRows().map(index => {
      const row = rows()[index];
      return [...names.map(name => name === "reason" || name === "note" ? row[name] : getValue(row, name)),
        ...counts.map(name => row.counts?.[name])].map(value => typeof value === "number" ? value
          : quote(value)).join(",");
    });
    const head = [...names.map(name => name === "smem" ? "smem_kib" : name), ...counts].join(",");
    download(fileName(".csv"), new Blob([[head, ...lines].join("\n") + "\n"], { type: "text/csv" }));
  }

  function exportPicture() {
    const em = 16, cell = [5.5 * em, 2 * em], canvas = document.createElement("canvas"),
      paint = canvas.getContext("2d");
    const font = size => `${size}px Arial, "DejaVu Sans", sans-serif`;
    paint.font = font(em);
    const label = Math.max(...lines.map(line => paint.measureText(line).width)) + em;
    for (const column of columns) cell[0] = Math.max(cell[0], paint.measureText(column).width + em);
    const top = 4 * em, width = Math.max(label + columns.length * cell[0] + em, 40 * em),
      height = top + (lines.length + 1) * cell[1] + em;
    [canvas.width, canvas.height] = [2 * width, 2 * height];
    paint.scale(2, 2);
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, width, height);
    paint.fillStyle = "#000";
    paint.font = `bold ${font(em)}`;
    paint.fillText(data.choice.name, 0.5 * em, 1.4 * em, width - em);
    paint.font = font(em);
    const origin = source.textContent || "this session";
    paint.fillText(`${menus.show.selectedOptions[0].text}; ${values.y} over ${values.x}; ${origin}`,
      0.5 * em, 2.9 * em, width - em);
    paint.textBaseline = "middle";
    paint.textAlign = "right";
    lines.forEach((line, y) => paint.fillText(line, label - 0.5 * em, top + (y + 0.5) * cell[1]));
    paint.textAlign = "center";
    columns.forEach((column, x) => paint.fillText(column, label + (x + 0.5) * cell[0],
      top + (lines.length + 0.5) * cell[1]));
    for (const { x, y, element } of cells) {
      paint.fillStyle = element.style.background || "#d4d4d4";
      paint.fillRect(label + x * cell[0] + 1, top + y * cell[1] + 1, cell[0] - 2, cell[1] - 2);
      paint.fillStyle = element.style.color || "#000";
      paint.fillText(element.textContent || element.dataset.cause, label + (x + 0.5) * cell[0], top + (y + 0.5) * cell[1], cell[0] - 4);
    }
    canvas.toBlob(blob => download(fileName(".png"), blob));
  }

  function copyPython() {
    copyText(`${data.choice.imports}\n\nconfig = ${data.choice.reprs[selected]}\n`, buttons.copy, root);
  }

  // ---- code

  function askForCode() {
    const keys = [pinned, selected].filter(index => index >= 0).map(index => data.choice.keys[index]);
    code.replaceChildren(h("p", {}, "compiling"));
    if (!code.open) code.showModal();
    send("code", { keys: [...new Set(keys)] });
  }

  function showCode(message) {
    const close = h("button", { type: "button", class: "tiles-button", onclick: () => code.close() }, "Close");
    const body = h("div", { class: "tiles-view tiles-code" }), [left, right = null] = message.sides ?? [];
    endCode();
    endCode = () => {};
    code.replaceChildren(close, body);
    if (message.problem) body.append(h("p", {}, message.problem));
    else endCode = renderCode(body, left, right);
  }

  // ---- everything

  function drawButtons() {
    const { running } = data.state, none = selected < 0;
    const disabled = { run: running, cancel: !running, again: running, pin: none, listing: none, copy: none };
    for (const [name, value] of Object.entries(disabled)) if (buttons[name]) buttons[name].disabled = value;
    buttons.pin.textContent = !none && pinned === selected ? "Unpin" : "Pin";
  }

  function drawStatus() {
    const { problem, status: said, winner, cause, done, total } = data.state;
    status.replaceChildren(...(problem ? [h("p", { class: "tiles-problem" }, problem)] : []),
      ...(said && live ? [h("p", { class: "tiles-count" }, said)] : []));
    answer.replaceChildren(...(winner.length ? [h("p", { class: "tiles-winner" }, winner[0])] : []),
      ...(cause ? [h("p", { class: "tiles-cause" }, cause)] : []));
    progress.max = Math.max(total, 1);
    progress.value = done;
    mapPane.classList.toggle("tiles-stale", Boolean(problem));
  }

  function drawPanes() {
    if (!data.choice) return;
    if (lower.current === "table") drawTable();
    else drawRoofline();
    markRows();
  }

  function drawAll() {
    drawMenus();
    drawStatus();
    if (data.choice) {
      drawMap();
      drawDetail();
      drawCompared();
      drawPanes();
    }
    drawButtons();
    writeAddress();
  }

  function switchTheme() {
    const dark = getComputedStyle(root).colorScheme === "dark";
    root.classList.toggle("tiles-dark", !dark);
    root.classList.toggle("tiles-light", dark);
  }

  function setFull(on) {
    root.classList.toggle("tiles-full", on);
    if (on) root.requestFullscreen?.().catch(() => {});
    else if (document.fullscreenElement) document.exitFullscreen();
  }

  function press(event) {
    tip.hidden = true;
    if (event.ctrlKey || event.metaKey || event.altKey || code.open) return;
    if (event.key === "Escape") {
      if (root.classList.contains("tiles-full")) setFull(false);
      else if (data.state.running) send("cancel");
      return;
    }
    if (event.target.closest?.("input, select, textarea")) return;
    const action = { r: () => data.state.running || send("run"), p: () => selected < 0 || pinSelected(),
      c: () => { upper.show(upper.current === "compare" ? "details" : "compare"); drawPanes(); },
      f: () => setFull(!root.classList.contains("tiles-full")) }[event.key.toLowerCase()];
    if (action && !event.repeat) {
      event.preventDefault();
      action();
    }
  }

  root.addEventListener("keydown", press);
  if (stage) listen(document, "keydown", press); // the page is the panel's: its keys need no focus
  listen(document, "fullscreenchange", () => document.fullscreenElement || root.classList.remove("tiles-full"));
  const resized = new ResizeObserver(() => data.choice && lower.current === "roofline" && (drawRoofline(), markRows()));
  resized.observe(roofline);
  onPage.push(() => resized.disconnect());

  const address = stage ? readAddress() : {};
  wanted = stage ? new URLSearchParams(location.hash.slice(1)).get("config") : null;
  nameRows();
  findWanted();
  drawAll();
  const takeChange = () => takeData(model.get("data"));
  model.on("msg:custom", receive);
  model.on("change:data", takeChange);
  onPage.push(() => { model.off("msg:custom", receive); model.off("change:data", takeChange); });
  if (Object.keys(address).length) send("choose", { values: address });
  else send("open");
  return () => onPage.forEach(undo => undo());
}

export default { render };
