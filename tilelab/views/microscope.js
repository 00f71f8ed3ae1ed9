// The microscope of a TMA box: its rules, its bytes, the place of each unit of 16 bytes in shared memory, and the
// wavefronts of one read. Where data.kind is "scales" it shows the layout of scale factors in tiles of 128 × 4.
// Everything is computed here, so the view also works on a static page.
//
// The first part computes and the second part draws. The first part repeats functions of tilelab.runtime.tensor_map,
// ch10.tile_pipeline (map_report, explorer, banks) and ch14.mx_formats.packing in JavaScript. A test compares both
// languages on random cases.

const UNIT = 16, LINE = 128, BANKS = 32, WORD = 4;  // bytes, bytes, banks, bytes of a word

// ---- rules of maps and loads. Extents, strides and boxes are in elements, innermost last, as in torch.

const comma = number => number.toLocaleString("en-US");
const tuple = values => values.length === 1 ? `(${values[0]},)` : `(${values.join(", ")})`;

// Return the first rule of a tiled tensor map that does not hold, as a sentence, or null.
function checkDescribable(map) {
  const { shape, strides, itemsize, address, box, swizzle = 0, swizzleName = "none", fill = "zero",
    floating = true } = map;
  if (shape.length < 1 || shape.length > 5)
    return `a tensor map has 1 to 5 dimensions; this tensor has ${shape.length}.`;
  if (box.length !== shape.length)
    return `box must have ${shape.length} extents, as many as the tensor; it is ${tuple(box)}.`;
  const last = shape.length - 1, innerBytes = box[last] * itemsize;
  const outerBytes = strides.slice(0, -1).filter((_, i) => shape[i] > 1).map(stride => stride * itemsize);
  const wrongBytes = outerBytes.find(size => size % 16 !== 0 || !(size > 0 && size < 2 ** 40));
  const rules = [
    [fill === "zero" || floating, "fill must be zero for a tensor of integers; it is nan."],
    [box.every(extent => Number.isInteger(extent) && extent >= 1 && extent <= 256),
     `each extent of a box must be 1 to 256 elements; the box is ${tuple(box)}.`],
    [shape.every(extent => extent >= 1 && extent <= 2 ** 32),
     `each extent of the tensor must be 1 to 2^32; the shape is ${tuple(shape)}.`],
    [address % 16 === 0,
     `a tensor map starts at a multiple of 16 bytes; the tensor starts ${address % 16} past one: copy it first.`],
    [strides[last] === 1 || shape[last] === 1,
     `the last dimension must be contiguous (stride 1); the strides are ${tuple(strides)}.`],
    [wrongBytes === undefined,
     `outer strides are positive multiples of 16 bytes (${Math.max(1, Math.floor(16 / itemsize))} elements) below `
     + `2^40; one is ${comma(wrongBytes ?? 0)} bytes: make it contiguous, or pad its rows.`],
    [innerBytes % 16 === 0,
     `the innermost extent of a box takes a multiple of 16 bytes; ${box[last]} elements take ${innerBytes}.`],
    [innerBytes <= (swizzle || innerBytes),
     `with the swizzle ${swizzleName} the innermost extent of a box takes at most as many bytes; it takes `
     + `${innerBytes}.`]];
  const broken = rules.find(([holds]) => !holds);
  return broken ? broken[1] : null;
}

// Return a sentence for each rule of the map that does not hold. The driver refuses every such map.
function brokenMapRules({ shape, strides, box, start, itemsize, floating, swizzle, swizzleName, fill }) {
  const rank = shape.length;
  const good = { shape: Array(rank).fill(64), strides: Array.from({ length: rank }, (_, i) => 64 ** (rank - 1 - i)),
    address: 0, box: [...Array(rank - 1).fill(1), Math.max(1, Math.floor(16 / itemsize))], itemsize };
  const row = [...Array(rank - 1).fill(1), box[box.length - 1]];
  // One rule at a time, because the check stops at the first. A dimension of one element has a stride, too.
  const found = [{ shape }, { address: start }, { shape: shape.map(extent => Math.max(2, extent)), strides }, { box },
    { box: row[rank - 1] <= 256 ? row : box, swizzle, swizzleName }, { fill, floating }]
    .map(mine => checkDescribable({ ...good, ...mine })).filter(Boolean);
  return [...new Set(found)];
}

// Return a sentence for each rule of the load that does not hold on a target. Only a run shows these.
function brokenLoadRules({ box, corner, itemsize, extra = 0 }, target, smemPerBlock, alignment) {
  const found = [], first = corner[corner.length - 1], column = first * itemsize;
  const bytes = box.reduce((product, extent) => product * extent, itemsize), needed = bytes + alignment + 8;
  if (column % 16 !== 0)
    found.push("the innermost coordinate of a box must be a multiple of 16 bytes, or the load is an illegal "
      + `instruction; ${first} elements are ${column} bytes.`);
  if (extra)
    found.push(`the barrier must expect the ${comma(bytes)} bytes of the whole box, fill included, or the wait ends `
      + `too early or never; it expects ${comma(bytes + extra)}.`);
  if (needed > smemPerBlock)
    found.push(`the box, its alignment and its barrier must fit in shared memory; they take ${comma(needed)} bytes and `
      + `a block on ${target} has ${comma(smemPerBlock)}.`);
  return found;
}

// ---- places in shared memory, and the cost of a read. A layout is { rows, columns, itemsize, swizzle in bytes }.

// The swizzle XORs bits 4 to 6 of an offset with bits 7 to 9: three bits for 128 bytes, two for 64, one for 32.
const swizzleOffset = (offset, width) => width ? offset ^ (((offset >> 7) & (width / 16 - 1)) << 4) : offset;

// Rows that are narrower than the swizzle begin a swizzle apart.
const pitchOf = layout => Math.max(layout.columns * layout.itemsize, layout.swizzle);

const addressOf = (layout, row, column) =>
  swizzleOffset(row * pitchOf(layout) + column * layout.itemsize, layout.swizzle);

// Return the element at which each lane starts to read, and how many elements a lane reads. No lane leaves the box.
function elementsRead(layout, access, laneBytes = 0, first = [0, 0]) {
  const count = Math.max(1, Math.floor((access === "matrix" ? UNIT : laneBytes) / layout.itemsize));
  const [row, column] = first;
  if (access === "row") {
    const lanes = Math.max(0, Math.min(32, Math.floor((layout.columns - column) / count)));
    return { lanes: Array.from({ length: lanes }, (_, lane) => [row, column + lane * count]), count };
  }
  const room = column + count <= layout.columns ? layout.rows - row : 0;
  const lanes = Math.max(0, Math.min(access === "matrix" ? 8 : 32, room));
  return { lanes: Array.from({ length: lanes }, (_, lane) => [row + lane, column]), count };
}

// Return the words that each group of lanes reads: as many lanes at a time as 128 bytes hold.
function wordsRead(addresses, size) {
  const together = BANKS * WORD / Math.max(WORD, size), groups = [];
  for (let lane = 0; lane < addresses.length; lane += together) {
    const words = new Set();
    for (const address of addresses.slice(lane, lane + together))
      for (let byte = 0; byte < size; byte += Math.min(WORD, size)) words.add(Math.floor((address + byte) / WORD));
    groups.push(words);
  }
  return groups;
}

// Return what one read costs: its groups of lanes, each with the count of different words in every bank.
function costOfRead(layout, access, laneBytes = 0, first = [0, 0]) {
  const { lanes, count } = elementsRead(layout, access, laneBytes, first), size = count * layout.itemsize;
  const addresses = lanes.map(([row, column]) => addressOf(layout, row, column));
  const groups = wordsRead(addresses, size).map(words => {
    const banks = Array(BANKS).fill(0);
    for (const word of words) banks[word % BANKS] += 1;
    return { banks, wavefronts: Math.max(...banks) };
  });
  const ways = Math.max(0, ...groups.map(group => group.wavefronts));
  const wavefronts = groups.reduce((sum, group) => sum + group.wavefronts, 0);
  const all = Array.from({ length: BANKS }, (_, bank) => bank);
  const used = all.filter(bank => groups.some(group => group.banks[bank])).length;
  const sentence = `${access} of ${lanes.length} × ${size} bytes: ${lanes.length} lanes touch ${used} of ${BANKS} `
    + "banks, " + (ways > 1 ? `${ways}-way conflict` : "no conflict")
    + (groups.length > 1 ? ` in each of ${groups.length} ${size === 8 ? "half" : "quarter"} warps` : "");
  return { lanes, count, size, addresses, groups, ways, wavefronts, sentence,
    together: BANKS * WORD / Math.max(WORD, size) };
}

// Return the number of bytes in a box, and how many lie outside of the tensor. All are (rows, columns) in elements.
function bytesOutside([rows, columns], [y, x], [high, wide], itemsize) {
  const inside = Math.max(0, Math.min(rows, y + high) - Math.max(0, y))
    * Math.max(0, Math.min(columns, x + wide) - Math.max(0, x));
  return { total: high * wide * itemsize, outside: (high * wide - inside) * itemsize };
}

// ---- scales in tiles of 128 × 4, one byte each. `columns` counts the scales of a row.

const TILE_ROWS = 128, TILE_COLUMNS = 4, TILE_BYTES = 512;

function byteOfScale(row, column, columns) {
  const tile = Math.floor(row / TILE_ROWS) * Math.ceil(columns / TILE_COLUMNS) + Math.floor(column / TILE_COLUMNS);
  return tile * TILE_BYTES + row % 32 * 16 + Math.floor(row % TILE_ROWS / 32) * 4 + column % TILE_COLUMNS;
}

// Return the [row, column] of the scale that lies at a byte. In the padding of the last tiles it is outside the matrix.
function scaleAtByte(byte, columns) {
  const across = Math.ceil(columns / TILE_COLUMNS), tile = Math.floor(byte / TILE_BYTES), within = byte % TILE_BYTES;
  return [Math.floor(tile / across) * TILE_ROWS + Math.floor(within % 16 / 4) * 32 + Math.floor(within / 16),
    tile % across * TILE_COLUMNS + within % 4];
}

// ---- the view

// A colour for each place of a unit in its line of 128 bytes, which is a group of four banks. Black text is legible on
// each colour.
const PLACES = ["#8ecae6", "#ffd48a", "#a3dfc0", "#f3b4d6", "#fff1a3", "#c8bdf2", "#f4aa9c", "#cdd5dd"];
const HIGH = 20;  // pixels of a cell


// A canvas of cells in a box that scrolls. Only the cells in sight are drawn, so a large box costs no more than a small
// one. `paint(context, row, column, x, y)` draws a cell, and `over(row, column)` and `choose` report the pointer.
function makeGrid(label, { paint, over, choose, keys, across }) {
  const canvas = h("canvas", { class: "cells" }), spacer = h("div", { class: "spacer" });
  const scroller = h("div", { class: "scroller", tabindex: "0", role: "application", "aria-label": label },
    canvas, spacer);
  const grid = { element: scroller, rows: 0, columns: 0, label: 34, wide: 40 };
  const find = event => {
    const box = scroller.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - scroller.clientTop + scroller.scrollTop) / HIGH);
    const column = Math.floor((event.clientX - box.left - scroller.clientLeft
      + scroller.scrollLeft - grid.label) / grid.wide);
    return row >= 0 && row < grid.rows && column >= 0 && column < grid.columns ? [row, column] : null;
  };
  scroller.addEventListener("pointermove", event => over(find(event)));
  scroller.addEventListener("pointerleave", () => over(null));
  scroller.addEventListener("click", event => { const at = find(event); if (at) choose(at); });
  scroller.addEventListener("keydown", keys);
  scroller.addEventListener("scroll", () => grid.draw());
  grid.resize = (rows, columns) => {
    Object.assign(grid, { rows, columns });
    grid.fit();
    spacer.style.height = `${rows * HIGH}px`;
  };
  // A line of few cells takes the width that there is.
  grid.fit = () => {
    const room = Math.floor((scroller.clientWidth - grid.label) / grid.columns);
    grid.wide = grid.columns <= 16 ? Math.min(Math.max(room, grid.columns <= 8 ? 30 : 34), 52) : 40;
    spacer.style.width = `${grid.label + grid.columns * grid.wide}px`;
  };
  grid.draw = () => {
    const wide = scroller.clientWidth, high = scroller.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!wide || !high) return;
    grid.fit();
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.width = `${wide}px`;
      canvas.style.height = `${high}px`;
    }
    const context = canvas.getContext("2d"), left = scroller.scrollLeft, top = scroller.scrollTop;
    const style = getComputedStyle(scroller);
    grid.ink = style.getPropertyValue("--ink");
    grid.fade = parseInt(grid.ink.trim().slice(1, 3), 16) > 128 ? 0.28 : 0.45;  // light text needs darker cells
    grid.quiet = style.getPropertyValue("--quiet");
    grid.focus = style.getPropertyValue("--focus");
    grid.paper = style.getPropertyValue("--paper");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.textBaseline = "middle";
    const firstRow = Math.floor(top / HIGH), lastRow = Math.min(grid.rows, Math.ceil((top + high) / HIGH));
    const firstColumn = Math.max(0, Math.floor((left - grid.label) / grid.wide));
    const lastColumn = Math.min(grid.columns, Math.ceil((left + wide - grid.label) / grid.wide));
    for (let pass = 0; pass < 2; ++pass)  // outlines lie over the neighbours, so they come last
      for (let row = firstRow; row < lastRow; ++row)
        for (let column = firstColumn; column < lastColumn; ++column)
          paint(context, row, column, grid.label + column * grid.wide - left, row * HIGH - top, pass);
    context.fillStyle = grid.paper;
    context.fillRect(0, 0, Math.max(0, grid.label - left), high);
    context.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
    context.textAlign = "right";
    context.fillStyle = grid.quiet;
    for (let row = firstRow; row < lastRow; ++row)
      context.fillText(String(row * across()), grid.label - 5 - left, row * HIGH - top + HIGH / 2);
  };
  // Bring a cell into sight.
  grid.show = (row, column) => {
    const x = grid.label + column * grid.wide, y = row * HIGH;
    if (y < scroller.scrollTop) scroller.scrollTop = y;
    if (y + HIGH > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = y + HIGH - scroller.clientHeight;
    if (x - grid.label < scroller.scrollLeft) scroller.scrollLeft = x - grid.label;
    if (x + grid.wide > scroller.scrollLeft + scroller.clientWidth)
      scroller.scrollLeft = x + grid.wide - scroller.clientWidth;
  };
  return grid;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
  PageUp: [-8, 0], PageDown: [8, 0] };

const group = (title, ...parts) => h("fieldset", {}, h("legend", {}, title), parts);

const makePanel = (title, text, ...parts) =>
  h("section", {}, h("h3", {}, title), h("p", { class: "hint" }, text), parts);

// Write a cell's text in its colour. A cell that is not `strong` is pale.
function paintCell(grid, context, x, y, colour, text, strong) {
  context.globalAlpha = strong ? 1 : grid.fade;
  context.fillStyle = colour;
  context.fillRect(x, y, grid.wide - 1, HIGH - 1);
  context.globalAlpha = 1;
  context.fillStyle = strong ? "#000000" : grid.ink;
  context.font = `${strong ? "bold " : ""}${text.length > 4 ? 10 : 11}px ui-monospace, 'DejaVu Sans Mono', monospace`;
  context.textAlign = "center";
  context.fillText(text, x + grid.wide / 2 - 0.5, y + HIGH / 2 + 0.5);
}

function outlineCell(grid, context, x, y, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(x + 1, y + 1, grid.wide - 3, HIGH - 3);
}

function renderBox({ model, el }) {
  const { dtypes, swizzles, targets, alignment, start } = model.get("data");
  const state = { dtype: start.dtype, rows: start.shape[0], columns: start.shape[1], stride: "", start: 0,
    boxRows: start.box[0], boxColumns: start.box[1], y: start.corner[0], x: start.corner[1], swizzle: start.swizzle,
    fill: "zero", extra: 0, target: Object.keys(targets)[0], access: start.access, laneBytes: start.laneBytes,
    readRow: 0, readColumn: 0 };
  let unit = null, bank = null, found = null, frame = null;  // the unit and the bank that are pointed at

  // ---- controls

  const { id, controls, select, number } = makeFields(state, () => update());
  const more = h("details", {}, h("summary", {}, "More fields"), h("div", { class: "fields" },
    number("stride", "row stride", 1, 1e12, true), number("start", "starts past 16 B", 0, 1e6),
    select("fill", "fill", [["zero"], ["nan"]]), number("extra", "bytes expected beyond the box", -1e6, 1e6),
    select("target", "GPU", Object.entries(targets).map(([target, { gpu }]) => [target, `${target} (${gpu})`]))));
  const form = h("div", { class: "controls" },
    group("Tensor", select("dtype", "elements", Object.keys(dtypes).map(name => [name])),
      number("rows", "rows", 1, 2 ** 33),
      number("columns", "columns", 1, 2 ** 33)),
    group("Box", number("boxRows", "rows", 1, 999), number("boxColumns", "columns", 1, 999),
      select("swizzle", "swizzle", Object.keys(swizzles).map(name => [name]))),
    group("Its corner", number("y", "row", -2147483647, 2147483647), number("x", "column", -2147483647, 2147483647)),
    group("One warp reads", select("access", "pattern", [["row"], ["column"], ["matrix", "matrix (ldmatrix)"]]),
      select("laneBytes", "bytes per lane", [["0", "one element"], ["4"], ["8"], ["16"]]),
      number("readRow", "from row", 0, 255), number("readColumn", "from column", 0, 255)),
    group("Map and barrier", more));

  // ---- the parts that answer

  const rules = h("div", { class: "rules", role: "status", "aria-live": "polite" });
  const facts = h("p", { class: "facts" });
  const tensor = h("svg:svg", { class: "tensor", tabindex: "0", role: "application" });
  const cost = h("p", { class: "cost" });
  const bankHint = h("p", { class: "hint" },
    "Different words that each bank must deliver, for each group of lanes that "
    + "shared memory serves together. A group takes as many wavefronts as its busiest bank has words.");
  const banks = h("div", { class: "banks", tabindex: "0", role: "region",
    "aria-label": "Banks, which scroll sideways" });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const pictures = h("div", { class: "pictures" });

  const unitsPerRow = () => found.layout.columns * found.layout.itemsize / UNIT;
  const placeOf = ([row, column]) => swizzleOffset(row * pitchOf(found.layout) + column * UNIT, found.layout.swizzle);
  const laneAt = (row, column) => found.read.get(row * 4096 + column);

  function paintUnit(grid, context, row, column, x, y, pass, text, place, lanes, source) {
    if (pass === 0) return paintCell(grid, context, x, y, PLACES[place], text, Boolean(lanes));
    const here = unit && unit[0] === source[0] && unit[1] === source[1];
    const inBank = bank !== null && lanes && Math.floor(bank / 4) === place;
    if (lanes || here) outlineCell(grid, context, x, y, here ? grid.focus : grid.ink, here || inBank ? 4 : 2);
  }

  const point = at => {
    if (String(at) === String(unit)) return;
    unit = at;
    schedule();
  };
  // Start the read at a unit.
  const choose = ([row, column]) => {
    state.readRow = row;
    state.readColumn = column * UNIT / found.layout.itemsize;
    unit = [row, column];
    controls.readRow.value = state.readRow;
    controls.readColumn.value = state.readColumn;
    update();
  };
  const keysOf = (toGrid, toUnit) => event => {
    if (event.key === "Enter" || event.key === " ") {
      if (unit) choose(unit);
    } else if (STEPS[event.key]) {
      const grid = toGrid === null ? box : memory;
      const [down, right] = STEPS[event.key];
      // The first key shows the first unit.
      const [row, column] = unit ? (toGrid ? toGrid(unit) : unit) : [-down, -right];
      const next = [Math.min(Math.max(row + down, 0), grid.rows - 1),
        Math.min(Math.max(column + right, 0), grid.columns - 1)];
      unit = toUnit(next) ?? unit;
      showUnit();
      schedule();
    } else return;
    event.preventDefault();
  };
  const showUnit = () => {
    if (!unit) return;
    box.show(...unit);
    const place = placeOf(unit);
    memory.show(Math.floor(place / LINE), place % LINE / UNIT);
  };
  // The swizzle undoes itself, so it also leads from a place back to its unit. A gap has none.
  const sourceAt = ([line, place]) => {
    const offset = swizzleOffset(line * LINE + place * UNIT, found.layout.swizzle), pitch = pitchOf(found.layout);
    const row = Math.floor(offset / pitch), column = offset % pitch / UNIT;
    return row < found.layout.rows && column < unitsPerRow() ? [row, column] : null;
  };

  const box = makeGrid("Units of the box: arrow keys point at a unit, Enter starts the read there", {
    across: () => 1, over: point, choose, keys: keysOf(null, at => at),
    paint: (context, row, column, x, y, pass) => {
      const place = placeOf([row, column]) % LINE / UNIT;
      paintUnit(box, context, row, column, x, y, pass, String(place), place, laneAt(row, column), [row, column]);
    } });
  const memory = makeGrid("Shared memory in lines of 128 bytes: arrow keys point at a unit", {
    across: () => LINE, over: at => point(at && sourceAt(at)),
    choose: at => { const source = sourceAt(at); if (source) choose(source); },
    keys: keysOf(at => { const place = placeOf(at); return [Math.floor(place / LINE), place % LINE / UNIT]; },
      sourceAt),
    paint: (context, line, place, x, y, pass) => {
      const source = sourceAt([line, place]);
      if (source) return paintUnit(memory, context, line, place, x, y, pass, `${source[0]}·${source[1]}`, place,
        laneAt(...source), source);
      if (pass) return;  // a gap, where rows are narrower than the swizzle
      context.strokeStyle = memory.quiet;
      context.lineWidth = 1;
      context.strokeRect(x + 4.5, y + 4.5, memory.wide - 10, HIGH - 10);
    } });
  memory.label = 52;
  const bankHeads = h("div", { class: "heads", "aria-hidden": "true" },
    PLACES.map((colour, place) => h("span", { style: `background: ${colour}` }, `${4 * place}–${4 * place + 3}`)));
  const widenHeads = () => { bankHeads.style.setProperty("--cell", `${memory.wide - 1}px`); };
  const headsBox = h("div", { class: "heads-box" }, bankHeads);
  memory.element.addEventListener("scroll", () => { headsBox.scrollLeft = memory.element.scrollLeft; });
  pictures.append(
    makePanel("The box, row by row",
      "A cell is a unit of 16 bytes. Its number and colour: its place in a line of 128 bytes. "
      + "Outlined: what the warp reads.", box.element),
    makePanel("Shared memory, 128 bytes per line",
      "Row · unit of the box that lies there. The columns are groups of four "
      + "banks.", headsBox, memory.element));

  // ---- drag the box

  let drag = null, view = null;  // view: pixels per element, and the element in the upper left corner
  const snap = () => Math.max(1, Math.floor(UNIT / dtypes[state.dtype].bytes));
  const moveTo = (y, x) => {
    const limit = value => Math.min(Math.max(value, -2147483647), 2147483647);
    state.y = limit(y);
    state.x = limit(x);
    controls.y.value = state.y;
    controls.x.value = state.x;
    update();
  };
  tensor.addEventListener("pointerdown", event => {
    const shown = tensor.getScreenCTM().a;  // the drawing may be shown larger or smaller
    drag = { x: event.clientX, y: event.clientY, from: [state.y, state.x], scale: view.scale * shown };
    tensor.setPointerCapture(event.pointerId);
    tensor.focus({ preventScroll: true });
    event.preventDefault();
  });
  tensor.addEventListener("pointermove", event => {
    if (!drag) return;
    const columns = Math.round((event.clientX - drag.x) / drag.scale / snap()) * snap();
    const rows = Math.round((event.clientY - drag.y) / drag.scale);
    const [y, x] = [drag.from[0] + rows, drag.from[1] + columns];
    if (y !== state.y || x !== state.x) moveTo(y, x);
  });
  for (const end of ["pointerup", "pointercancel"]) tensor.addEventListener(end, () => { drag = null; update(); });
  tensor.addEventListener("keydown", event => {
    const step = STEPS[event.key];
    if (!step || event.key.startsWith("Page")) return;
    const far = event.shiftKey ? [state.boxRows, Math.max(1, Math.floor(state.boxColumns / snap())) * snap()]
      : [1, snap()];
    moveTo(state.y + step[0] * far[0], state.x + step[1] * far[1]);
    event.preventDefault();
  });

  function drawTensor() {
    const { rows, columns, y, x, boxRows, boxColumns } = state;
    const wide = 360, high = 230, margin = 8;
    if (!drag) {  // the picture keeps its scale while the box is dragged
      const left = Math.min(0, x), top = Math.min(0, y);
      const right = Math.max(columns, x + boxColumns), bottom = Math.max(rows, y + boxRows);
      const scale = Math.min((wide - 2 * margin) / (right - left), (high - 2 * margin) / (bottom - top));
      view = { scale, left: (left + right - wide / scale) / 2, top: (top + bottom - high / scale) / 2 };
    }
    const at = (row, column) => [(column - view.left) * view.scale, (row - view.top) * view.scale];
    const rectangle = (row, column, tall, across, least, rest) => {
      const [left, top] = at(row, column);
      return h("svg:rect", { x: left, y: top, width: Math.max(least, across * view.scale),
        height: Math.max(least, tall * view.scale), ...rest });
    };
    const innerY = Math.max(0, y), innerX = Math.max(0, x);
    const innerHigh = Math.min(rows, y + boxRows) - innerY, innerWide = Math.min(columns, x + boxColumns) - innerX;
    const parts = [
      h("svg:defs", {}, h("svg:pattern", { id: `${id}-hatch`, width: 6, height: 6, patternUnits: "userSpaceOnUse",
        patternTransform: "rotate(45)" }, h("svg:line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch" }))),
      rectangle(0, 0, rows, columns, 1, { class: "whole" }),
      rectangle(y, x, boxRows, boxColumns, 4, { class: "fill", fill: `url(#${id}-hatch)` })];
    if (innerHigh > 0 && innerWide > 0) parts.push(rectangle(innerY, innerX, innerHigh, innerWide, 2,
      { class: "inside" }));
    parts.push(rectangle(y, x, boxRows, boxColumns, 4, { class: "box" }));
    const perUnit = UNIT / found.layout.itemsize;
    if (unit) parts.push(rectangle(y + unit[0], x + unit[1] * perUnit, 1, perUnit, 5, { class: "unit" }));
    tensor.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    tensor.setAttribute("aria-label",
      `A tensor of ${rows} × ${columns}. The box of ${boxRows} × ${boxColumns} starts at row `
      + `${y}, column ${x}. Arrow keys move it by a row or by 16 bytes, with Shift by a whole box.`);
    tensor.replaceChildren(...parts);
  }

  function drawBanks() {
    const { groups, together, lanes } = found.cost;
    const most = Math.max(1, ...groups.map(group => group.wavefronts));
    const head = h("tr", {}, h("th", { scope: "col" }, "lanes"),
      Array.from({ length: BANKS }, (_, each) => h("th", { scope: "col", "data-bank": each,
        style: `background: ${PLACES[Math.floor(each / 4)]}`, class: each === bank ? "here" : false }, each)),
      h("th", { scope: "col" }, "wavefronts"));
    const body = groups.map((group, index) => h("tr", {},
      h("th", { scope: "row" }, `${index * together}–${Math.min(lanes.length, (index + 1) * together) - 1}`),
      group.banks.map((count, each) => h("td", { "data-bank": each, style: count ? `--share: ${count / most}` : false,
        class: count === 0 ? "none" : count > 1 && count === group.wavefronts ? "most" : false }, count || "·")),
      h("td", { class: "sum" }, group.wavefronts)));
    banks.replaceChildren(h("table", { "aria-label": "Words per bank" }, head, body));
  }

  function describeUnit() {
    if (!unit || !found.drawable) {
      readout.textContent = "Point at a unit, or reach it with the arrow keys: its elements of the tensor, its place "
        + "in shared memory and its banks are shown here. A click or Enter starts the read there.";
      return;
    }
    const [row, column] = unit, per = UNIT / found.layout.itemsize, place = placeOf(unit), tall = state.y + row;
    const from = state.x + column * per, bankFrom = place % LINE / WORD;
    const inside = tall >= 0 && tall < state.rows && from + per > 0 && from < state.columns;
    const whole = inside && from >= 0 && from + per <= state.columns;
    const lanes = laneAt(row, column);
    const readers = !lanes ? "not read" : lanes.length === 1 ? `read by lane ${lanes[0]}`
      : `read by lanes ${lanes[0]} to ${lanes[lanes.length - 1]}`;
    const fill = whole ? "" : inside ? " (partly outside)" : ` (outside: ${state.fill === "nan" ? "NaN" : "zero"})`;
    const text = `Unit ${column} of box row ${row}: tensor row ${tall}, columns ${from} to ${from + per - 1}${fill} `
      + `→ bytes ${comma(place)} to ${comma(place + UNIT - 1)} of shared memory, line ${Math.floor(place / LINE)}, `
      + `place ${place % LINE / UNIT}, banks ${bankFrom} to ${bankFrom + 3}; ${readers}.`;
    readout.textContent = text;
  }

  function drawAll() {
    frame = null;
    drawTensor();
    describeUnit();
    if (!found.drawable) return;
    box.draw();
    memory.draw();
    widenHeads();
    for (const cell of banks.querySelectorAll("th[data-bank]")) {
      const each = Number(cell.dataset.bank);
      cell.classList.toggle("here", each === bank || (unit !== null
        && Math.floor(each / 4) === placeOf(unit) % LINE / UNIT));
    }
  }
  // Pointing changes no setting, so it is drawn with the next frame.
  const schedule = () => { frame ??= requestAnimationFrame(drawAll); };

  function update() {
    const kind = dtypes[state.dtype], itemsize = kind.bytes;
    const box2 = [state.boxRows, state.boxColumns];
    const load = { shape: [state.rows, state.columns], strides: [state.stride === "" ? state.columns : state.stride, 1],
      box: box2, corner: [state.y, state.x], start: state.start, itemsize, floating: kind.floating,
      swizzle: swizzles[state.swizzle], swizzleName: state.swizzle, fill: state.fill, extra: state.extra };
    const brokenMap = brokenMapRules(load);
    const brokenLoad = brokenLoadRules(load, state.target, targets[state.target].smem, alignment);
    const layout = { rows: state.boxRows, columns: state.boxColumns, itemsize, swizzle: swizzles[state.swizzle] };
    const drawable = box2.every(extent => extent <= 256) && layout.columns * itemsize % UNIT === 0;
    found = { layout, drawable, read: new Map() };
    state.readRow = Math.min(state.readRow, state.boxRows - 1);
    if (drawable) {
      const count = elementsRead(layout, state.access, Number(state.laneBytes)).count;
      state.readColumn = Math.min(Math.floor(state.readColumn / count) * count, layout.columns - count);
      state.readColumn = Math.max(0, state.readColumn);
      const first = [state.readRow, state.readColumn];
      found.cost = costOfRead(layout, state.access, Number(state.laneBytes), first);
      found.cost.lanes.forEach(([row, column], lane) => {
        const key = row * 4096 + Math.floor(column * itemsize / UNIT);
        if (!found.read.has(key)) found.read.set(key, []);
        found.read.get(key).push(lane);
      });
      if (unit && (unit[0] >= layout.rows || unit[1] >= unitsPerRow())) unit = null;
      box.resize(layout.rows, unitsPerRow());
      memory.resize(Math.ceil(layout.rows * pitchOf(layout) / LINE), 8);
    } else unit = null;
    for (const name of ["readRow", "readColumn"])
      if (document.activeElement !== controls[name]) controls[name].value = state[name];
    controls.laneBytes.disabled = state.access === "matrix";
    controls.stride.placeholder = String(state.columns);

    const items = [...brokenMap.map(text => ["map", text]), ...brokenLoad.map(text => ["load", text])];
    root.classList.toggle("broken", items.length > 0);
    rules.replaceChildren(items.length
      ? h("ul", {}, items.map(([what, text]) => h("li", {}, h("b", {}, `✗ ${what}: `), text)))
      : h("p", { class: "fine" }, "✓ The map and the load keep every rule."));
    const { total, outside } = bytesOutside(load.shape, load.corner, box2, itemsize);
    facts.replaceChildren("The barrier expects ", h("b", {}, `${comma(total)} bytes`), ", the whole box. ",
      outside === 0 ? "All of it lies on the tensor."
        : h("b", {}, outside === total ? "All of it lies" : `${comma(outside)} bytes lie`),
      outside === 0 ? "" : ` outside of the tensor and ${outside === total ? "arrives" : "arrive"} as `
        + `${state.fill === "nan" ? "NaN" : "zero"}.`);
    for (const part of [pictures, bankHint, banks, cost]) part.hidden = !drawable;
    if (drawable) {
      const { sentence, wavefronts, lanes } = found.cost;
      cost.replaceChildren("A ", lanes.length ? sentence : `${state.access} from here has no lane that fits`, ": ",
        h("b", {}, `${wavefronts} wavefront${wavefronts === 1 ? "" : "s"}`), ".");
      drawBanks();
    }
    if (frame !== null) cancelAnimationFrame(frame);
    drawAll();
  }

  banks.addEventListener("pointerover", event => {
    const cell = event.target.closest("[data-bank]");
    bank = cell ? Number(cell.dataset.bank) : null;
    schedule();
  });
  banks.addEventListener("pointerleave", () => { bank = null; schedule(); });

  const root = h("div", { class: "tiles-view tiles-microscope", role: "group",
    "aria-label": "Microscope of a TMA box" },
    form, rules,
    h("div", { class: "stage" },
      h("section", { class: "where" }, h("h3", {}, "The box on the tensor"),
        h("p", { class: "hint" }, "Drag the box, or move it with the arrow keys (with Shift by a whole box). Hatched: "
          + "outside."), tensor, facts),
      pictures),
    readout, cost, bankHint, banks);
  keepKeys(root);
  el.append(root);
  const observer = new ResizeObserver(() => { if (found) schedule(); });
  observer.observe(root);
  update();
  return () => { observer.disconnect(); if (frame !== null) cancelAnimationFrame(frame); };
}

const QUARTERS = ["#8ecae6", "#a3dfc0", "#fff1a3", "#f4aa9c"];  // the rows of a tile, 32 per colour

function renderScales({ model, el }) {
  const { formats, start } = model.get("data");
  const state = { format: start.format, rows: start.rows, columns: start.columns };
  let at = start.scale, scales = 1, frame = null;
  const { select, number } = makeFields(state, () => update());
  const readout = h("p", { class: "readout", "aria-live": "polite" }), facts = h("p", { class: "facts" });
  const strip = h("svg:svg", { class: "strip", viewBox: "0 0 1000 30", preserveAspectRatio: "none",
    "aria-hidden": "true" });
  const point = to => {
    if (!to || String(to) === String(at)) return;
    at = to;
    schedule();
  };
  const choose = to => { point(to); show(); };
  const inside = ([row, column]) => row < state.rows && column < scales;
  const sourceAt = ([line, byte]) => [scaleAtByte(16 * line + byte, scales)].find(inside);
  const keysOf = inTiles => event => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    let next;
    if (inTiles) next = scaleAtByte(Math.max(0, byteOfScale(...at, scales) + 16 * step[0] + step[1]), scales);
    else next = [Math.min(Math.max(at[0] + step[0], 0), state.rows - 1),
      Math.min(Math.max(at[1] + step[1], 0), scales - 1)];
    if (inside(next)) choose(next);
  };
  const show = () => {
    const byte = byteOfScale(...at, scales);
    matrix.show(...at);
    tiles.show(Math.floor(byte / 16), byte % 16);
  };
  const paint = (grid, context, source, x, y, pass, text) => {
    const line = source[0] % 32 === at[0] % 32 && Math.floor(source[0] / 128) === Math.floor(at[0] / 128)
      && Math.floor(source[1] / 4) === Math.floor(at[1] / 4);
    const here = source[0] === at[0] && source[1] === at[1];
    if (pass === 0) paintCell(grid, context, x, y, QUARTERS[Math.floor(source[0] % 128 / 32)], text, line);
    else if (line || here) outlineCell(grid, context, x, y, here ? grid.focus : grid.ink, here ? 4 : 1);
  };
  const matrix = makeGrid("Scales, row by row: arrow keys point at a scale", {
    across: () => 1, over: point, choose, keys: keysOf(false),
    paint: (context, row, column, x, y, pass) =>
      paint(matrix, context, [row, column], x, y, pass, String(byteOfScale(row, column, scales))) });
  const tiles = makeGrid("Tiles in memory, 16 bytes per line: arrow keys point at a byte", {
    across: () => 16,
    over: to => { const source = to && sourceAt(to); if (source) point(source); },
    choose: to => { const source = sourceAt(to); if (source) choose(source); },
    keys: keysOf(true),
    paint: (context, line, byte, x, y, pass) => {
      const source = scaleAtByte(16 * line + byte, scales);
      if (inside(source)) return paint(tiles, context, source, x, y, pass, `${source[0]}·${source[1]}`);
      if (pass) return;
      context.fillStyle = tiles.quiet;
      context.textAlign = "center";
      context.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
      context.fillText("0", x + tiles.wide / 2, y + HIGH / 2);
    } });
  tiles.label = 52;

  function drawAll() {
    frame = null;
    const { block } = formats[state.format], [row, column] = at, byte = byteOfScale(row, column, scales);
    const first = column * block, last = Math.min(state.columns, first + block) - 1, within = byte % TILE_BYTES;
    const others = [0, 1, 2, 3].map(quarter => Math.floor(row / 128) * 128 + row % 32 + 32 * quarter)
      .filter(other => other !== row && other < state.rows);
    readout.textContent = `Scale ${column} of row ${row} belongs to the block of elements ${first} to ${last} of row `
      + `${row}. It lies at byte ${comma(byte)}: tile ${Math.floor(byte / TILE_BYTES)}, line `
      + `${Math.floor(within / 16)}, byte ${within % 16} of the line = ${Math.floor(row % 128 / 32)} · 4 + `
      + `${column % 4}.`
      + (others.length ? ` Its line also holds row${others.length > 1 ? "s" : ""} ${others.join(", ")}.` : "");
    const wide = 1000 / state.columns;
    strip.replaceChildren(...Array.from({ length: scales }, (_, index) => h("svg:rect", { x: index * block * wide, y: 4,
      width: Math.max(1, (Math.min(state.columns, (index + 1) * block) - index * block) * wide - 1), height: 22,
      class: index === column ? "chosen" : "other" })));
    matrix.draw();
    tiles.draw();
  }
  const schedule = () => { frame ??= requestAnimationFrame(drawAll); };

  function update() {
    scales = Math.ceil(state.columns / formats[state.format].block);
    at = [Math.min(at[0], state.rows - 1), Math.min(at[1], scales - 1)];
    const bytes = Math.ceil(state.rows / TILE_ROWS) * Math.ceil(scales / TILE_COLUMNS) * TILE_BYTES;
    const padding = bytes - state.rows * scales;
    matrix.resize(state.rows, scales);
    tiles.resize(bytes / 16, 16);
    const each = scales === 1 ? "1 scale" : `${scales} scales`;
    facts.textContent = `${comma(state.rows)} rows of ${each} take ${comma(bytes)} bytes in tiles of 128 × 4`
      + (padding ? `; ${comma(padding)} of them are padding, and zero.` : ".");
    if (frame !== null) cancelAnimationFrame(frame);
    drawAll();
  }

  const root = h("div", { class: "tiles-view tiles-microscope tiles-scales", role: "group",
    "aria-label": "Layout of scale factors" },
    h("div", { class: "controls" }, group("Matrix of elements",
      select("format", "format", Object.entries(formats).map(([name, { label }]) => [name, label])),
      number("rows", "rows", 1, 1024), number("columns", "columns", 1, 8192))),
    facts,
    h("div", { class: "pictures" },
      makePanel("Scales, row by row",
        "A cell is the scale of one block; its number is the byte where it lies. At the left: the row. Colours: "
        + "the four quarters of 128 rows. Outlined: the 16 bytes of one line.", matrix.element),
      makePanel("Tiles in memory, 16 bytes per line",
        "A cell names the row · scale that lies there. At the left: the first byte of the line. A tile has 32 "
        + "lines; tiles of the same rows follow each other.", tiles.element)),
    readout,
    h("p", { class: "hint" }, "The row of elements, one box per block; the block of the scale is outlined."), strip);
  keepKeys(root);
  el.append(root);
  const observer = new ResizeObserver(() => schedule());
  observer.observe(root);
  update();
  show();
  return () => { observer.disconnect(); if (frame !== null) cancelAnimationFrame(frame); };
}

function render(context) {
  return context.model.get("data").kind === "scales" ? renderScales(context) : renderBox(context);
}

export default { render };
