// Who does what in one CTA, and when: a row per warp role, the ring of stages at the cursor, two recordings on one clock.
// tilelab/records/timeline.py describes the data.

const [LANE, KIND, BEGIN, END, STEP, TILE, STAGE] = [0, 1, 2, 3, 4, 5, 6];
const NAMES = { load: "TMA issue", wait: "barrier wait", product: "product", store: "epilogue" };
const LETTERS = { load: "L", wait: "W", product: "P", store: "E" };
// Heights in pixels: what the warps do, products in flight, the space between lanes. A wide page has larger type.
const SIZES = { own: 24, flying: 18, gap: 10, label: 128, slot: 70 };

const number = value => Math.round(value).toLocaleString("en-US");
const percent = share => typeof share === "number" ? `${(100 * share).toFixed(1)} %` : null;
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);

// Give each event a line of its lane: 0 for what the warps do, 1 and more for products that are in flight.
function assignLines(events) {
  const ends = {};
  return events.map(event => {
    if (event[KIND] !== "product") return 0;
    const mine = ends[event[LANE]] ??= [];
    let line = mine.findIndex(end => end <= event[BEGIN]);
    if (line < 0) line = mine.length;
    mine[line] = event[END];
    return line + 1;
  });
}

// Return a recording with what its drawing needs: rows with their heights, and the events of each lane.
function prepareRecording(recording) {
  const lines = assignLines(recording.events);
  const lanes = recording.lanes.map((name, index) => ({
    name, index, events: recording.events.map((event, at) => ({ event, line: lines[at] })).filter(one => one.event[LANE] === index),
  }));
  for (const lane of lanes) lane.lines = Math.max(0, ...lane.events.map(one => one.line));
  lanes.push({ name: "tensor core", index: -1, lines: 0, events: describeTensor(recording) });
  return { ...recording, rows: lanes };
}

// The tensor core's row: busy and idle in turn.
function describeTensor(recording) {
  const found = [];
  let last = 0;
  for (const [begin, end] of [...recording.tensor, [recording.length, recording.length]]) {
    if (begin > last) found.push({ event: [-1, "idle", last, begin], line: 0 });
    if (end > begin) found.push({ event: [-1, "busy", begin, end], line: 0 });
    last = end;
  }
  return found;
}

// The state of each stage at a time: {stage, state, level, step, tile, full, empty}. `full` and `empty` are the phases
// that the two barriers are in: the parity of how often each has completed.
function findRing(recording, time) {
  return Array.from({ length: recording.stages }, (_, stage) => {
    const mine = recording.fills.filter(fill => fill[0] === stage);
    const current = mine.filter(fill => fill[4] <= time).at(-1);
    const count = at => mine.filter(fill => fill[at] !== null && fill[at] <= time).length;
    const found = { stage, state: "empty", level: 0, step: null, tile: null, full: count(5) % 2, empty: count(7) % 2 };
    if (!current || (current[7] !== null && current[7] <= time)) return found;
    const [, , step, tile, issued, landed, seen] = current;
    Object.assign(found, { step, tile, state: "loading", level: 1 });
    if (time < landed) found.level = (time - issued) / Math.max(landed - issued, 1);
    else found.state = seen !== null && time >= seen ? "in use" : "full";
    return found;
  });
}

const countColumns = stages => Math.min(stages, stages % 5 === 0 || stages > 8 ? 5 : 4);

function idleShare(recording) {
  const busy = recording.tensor.reduce((sum, [begin, end]) => sum + end - begin, 0);
  return 1 - busy / Math.max(recording.length, 1);
}

const nameStage = (recording, stage) => recording.stage_names ? recording.stage_names[stage] : `stage ${stage}`;
const nameStep = (recording, step) => `${recording.step_name || "step"} ${step}`;

// One sentence about an event.
function describeEvent(recording, lane, event) {
  const [, kind, begin, end, step, tile, stage, phase, barrier] = event;
  const length = end - begin;
  const time = recording.ghz ? ` (${number(length / recording.ghz)} ns)` : "";
  const span = `${number(length)} cycles${time}, from ${number(begin)} to ${number(end)}`;
  const what = step === null || step === undefined ? `tile ${tile}` : `${nameStep(recording, step)} of tile ${tile}`;
  const place = nameStage(recording, stage);
  const who = capital(lane.name === "loads and multiplies" ? "the warp group" : lane.name.startsWith("consumer") ? lane.name
    : `the ${lane.name}`);
  if (kind === "idle" || kind === "busy") return `The tensor core ${kind === "idle" ? "is idle" : "works"} for ${span}.`;
  if (kind === "load") return `${who} issues the loads of ${what} into ${place} by TMA: ${span}.`;
  if (kind === "wait") {
    const why = barrier === "empty" ? "may be filled again" : "has been filled";
    return `${who} waits until ${place} ${why}, for phase ${phase} of its ${barrier} barrier, for ${what}: ${span}.`;
  }
  if (kind === "product") return `Products of ${what} from ${place}, issued by ${who.toLowerCase()}, are in flight for ${span}.`;
  return `${who} rounds and stores ${what} in its epilogue: ${span}.`;
}

let instances = 0;

function render({ model, el }) {
  const prefix = `tiles-timeline-${Date.now().toString(36)}-${instances++}`;
  let recordings = [], shown = [];  // shown: one or two recordings
  let view = { begin: 0, end: 1 }, cursor = 0, playing = null;
  let selected = { shown: 0, lane: 0, at: -1 };  // `at` counts the events of the lane
  let pending = false, panels = [];

  const root = h("div", { class: "tiles-view tiles-timeline" });
  const above = h("select", { "aria-label": "upper recording", onchange: () => choose() });
  const below = h("select", { "aria-label": "lower recording", onchange: () => choose() });
  const button = (label, title, onclick) => h("button", { type: "button", title, "aria-label": title, onclick }, label);
  const play = button("Play", "Move the cursor through the time that is shown (Space)", () => togglePlay());
  const buttons = [
    button("‹ Event", "Previous event of this row (P)", () => step(-1)), button("Event ›", "Next event of this row (N)", () => step(1)),
    button("+", "Zoom in (+)", () => zoom(0.5)), button("−", "Zoom out (−)", () => zoom(2)),
    button("All", "Show the whole time (0)", () => showAll()), play,
  ];
  const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Timeline" },
    h("label", {}, "Above ", above), h("label", {}, "Below ", below), buttons);
  const legend = h("p", { class: "legend" });
  const plots = h("div", { class: "plots", tabindex: 0, role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline of warp roles. Left and right move along the time, up and down change the row, N and P step through its events, plus and minus zoom." });
  const sentence = h("p", { class: "sentence", "aria-live": "polite" });
  const keys = h("p", { class: "keys" }, "Drag or ← → to move, wheel (after a click) or + − to zoom, ↑ ↓ to change the row, N and P to step from event to event, 0 for all, Space to play. The ring shows the stages at the cursor.");
  root.append(tools, legend, plots, sentence, keys);
  el.append(root);
  keepKeys(root);
  moveWithArrows(tools, buttons);

  // The patterns tell kinds apart without colour: stripes for loads, hatching for waits, dots for stores.
  const pattern = kind => `${prefix}-${kind}`;
  const paint = kind => ({ busy: "var(--product)", product: "var(--product)" }[kind] || `url(#${pattern(kind)})`);
  function makePatterns() {
    const make = (kind, size, ...marks) => h("svg:pattern", { id: pattern(kind), width: size, height: size, patternUnits: "userSpaceOnUse" },
      h("svg:rect", { width: size, height: size, fill: kind === "idle" ? "var(--paper)" : `var(--${kind})` }), marks);
    const mark = (d, opacity = 0.35, colour = "#000") => h("svg:path", { d, stroke: colour, "stroke-opacity": opacity, fill: "none", "stroke-width": 1.2 });
    return h("svg:defs", {}, make("load", 6, mark("M3 0V6", 0.22)), make("wait", 7, mark("M-1 8L8 -1", 0.75, "var(--quiet)")),
      make("store", 6, h("svg:circle", { cx: 3, cy: 3, r: 1.1, fill: "#000", "fill-opacity": 0.35 })),
      make("idle", 8, mark("M-1 -1L9 9", 0.8, "var(--line)")));
  }

  function load() {
    const data = model.get("data") || { recordings: [], shown: [] };
    recordings = data.recordings.map(prepareRecording);
    const options = (select, wanted, none) => {
      select.replaceChildren(...recordings.map((one, at) => h("option", { value: at, selected: one.name === wanted }, one.name)),
        ...(none ? [h("option", { value: "", selected: !wanted }, "nothing")] : []));
    };
    options(above, data.shown[0]);
    options(below, data.shown[1], true);
    choose();
  }

  function swatch(kind) {
    return h("svg:svg", { width: 22, height: 14, "aria-hidden": true },
      h("svg:rect", { x: 0.5, y: 0.5, width: 21, height: 13, fill: paint(kind === "odd" ? "product" : kind), stroke: kind === "odd" ? "var(--ink)" : "var(--line)" }));
  }

  function choose() {
    shown = [above, below].map(select => recordings[select.value === "" ? -1 : Number(select.value)]).filter(Boolean);
    selected = { shown: 0, lane: 0, at: -1 };
    const entries = [...Object.keys(NAMES).map(kind => [kind, `${LETTERS[kind]} ${NAMES[kind]}`]), ["idle", "tensor core idle"]];
    if (shown.some(one => one.events.some(event => event[TILE] % 2))) entries.push(["odd", "outlined: every other tile"]);
    legend.replaceChildren(...entries.map(([kind, text]) => h("span", {}, swatch(kind), text)));
    plots.replaceChildren(h("svg:svg", { class: "defs", width: 0, height: 0, "aria-hidden": true }, makePatterns()));
    panels = shown.map((recording, at) => {
      const marks = h("svg:g"), line = h("svg:line", { class: "cursor", y1: 0 });
      const choice = h("svg:rect", { class: "choice", fill: "none" });
      const plot = h("svg:svg", { class: "plot", role: "img", "aria-label": describeRecording(recording) }, marks, choice, line);
      const ring = h("div", { class: "ring", role: "img" });
      const clock = recording.ghz ? `, ${recording.ghz} GHz` : "";
      const head = h("p", { class: "head" }, h("strong", {}, recording.name), ` · ${recording.config} · ${recording.gpu}, ${recording.date}${clock} · tensor core idle `,
        h("strong", {}, `${Math.round(100 * idleShare(recording))} %`), ` of ${number(recording.length)} cycles`,
        percent(recording.idle_profiler) && ` (the profiler counts ${percent(recording.idle_profiler)} over the whole kernel)`,
        percent(recording.overhead) && ` · recording costs ${percent(recording.overhead)} of the time`);
      plots.append(h("section", { "data-recording": recording.name }, head, h("div", { class: "pair" }, h("div", { class: "frame" }, plot), ring)));
      const panel = { recording, plot, marks, line, choice, ring, at };
      plot.addEventListener("pointermove", event => move(event, panel));
      plot.addEventListener("pointerdown", event => grab(event, panel));
      plot.addEventListener("pointerup", () => { dragging = null; });
      plot.addEventListener("pointercancel", () => { dragging = null; });
      return panel;
    });
    const longest = total();
    // Begin with the part in which the events can be told apart; "All" shows the whole time.
    view = { begin: 0, end: Math.min(longest, Math.max(...shown.map(one => firstSteps(one, 12)), 1)) };
    cursor = Math.min(view.end, ...shown.map(recording => recording.length)) / 2;
    select(0, 0, -1);
    draw();
  }

  const total = () => Math.max(1, ...shown.map(recording => recording.length));

  function firstSteps(recording, count) {
    const ends = recording.events.filter(event => event[KIND] === "product").map(event => event[END]);
    return ends[Math.min(count * Math.max(1, recording.lanes.length - 1), ends.length) - 1] || recording.length;
  }

  function describeRecording(recording) {
    return `${recording.name}: ${recording.lanes.join(", ")} and the tensor core, over ${number(recording.length)} cycles. The tensor core is idle for ${Math.round(100 * idleShare(recording))} % of them.`;
  }

  // ---- drawing

  let type = 1, size = SIZES;  // how much larger than on a page of 1,280 pixels
  function measure() {
    type = Math.min(1.6, Math.max(1, root.clientWidth / 1230));
    size = Object.fromEntries(Object.entries(SIZES).map(([name, value]) => [name, value * type]));
    const columns = Math.max(...shown.map(recording => countColumns(recording.stages)));
    root.style.setProperty("--type", type);
    root.style.setProperty("--ring", `${Math.max(columns * SIZES.slot + 4, 150) * type}px`);
    for (const panel of panels) panel.width = panel.plot.parentElement.clientWidth;  // read once: reading costs a layout
  }

  const place = panel => {
    const width = panel.width || 600, left = width < 560 ? 4 : size.label;
    const scale = (width - left - 6) / (view.end - view.begin);
    return { width, left, scale, x: time => left + (time - view.begin) * scale, time: x => view.begin + (x - left) / scale };
  };

  function draw() {
    pending = false;
    measure();
    for (const panel of panels) drawPanel(panel);
    drawCursor();
  }

  function ask() {
    if (!pending) { pending = true; requestAnimationFrame(draw); }
  }

  function drawPanel(panel) {
    const { recording, marks, plot } = panel, at = place(panel), narrow = at.left < 100;
    const last = panel === panels.at(-1), extra = narrow ? 16 : 0;
    let height = 2 + extra;
    for (const lane of recording.rows) {
      lane.top = height;
      lane.height = size.own + lane.lines * size.flying;
      height += lane.height + size.gap + extra;
    }
    const axis = height - size.gap - extra, whole = axis + (last ? 24 * type : 4);
    plot.setAttribute("width", at.width);
    plot.setAttribute("height", whole);
    plot.setAttribute("viewBox", `0 0 ${at.width} ${whole}`);
    const parts = [];
    for (const tick of ticks(view.begin, view.end, Math.max(3, at.width / 110))) {
      const half = 3.6 * type * number(tick).length;  // a label stays beside the word "cycles", and within the plot
      parts.push(h("svg:line", { class: "grid", x1: at.x(tick), x2: at.x(tick), y1: 0, y2: axis }));
      if (last) parts.push(h("svg:text", { class: "tick", x: Math.max(at.left + half, Math.min(at.x(tick), at.width - half)), y: axis + 16 * type, "text-anchor": "middle" }, number(tick)));
    }
    if (last && !narrow) parts.push(h("svg:text", { class: "tick", x: at.left - 8, y: axis + 16 * type, "text-anchor": "end" }, "cycles"));
    for (const lane of recording.rows) {
      const label = h("svg:text", { class: "lane", x: narrow ? 4 : at.left - 8, y: narrow ? lane.top - 4 : lane.top + size.own * 0.68, "text-anchor": narrow ? "start" : "end" },
        lane.name === "loads and multiplies" ? "one warp group" : lane.name);
      parts.push(label);
      const end = Math.min(at.x(recording.length), at.width);
      if (end > at.left) parts.push(h("svg:rect", { class: "track", x: at.left, y: lane.top, width: Math.max(0, end - at.left), height: lane.height }));
      for (let line = 0; line <= lane.lines; line++) drawLine(parts, recording, lane, line, at);
    }
    marks.replaceChildren(...parts);
    panel.line.setAttribute("y2", axis);
    drawChoice(panel, at);
  }

  // Draw the events of one line. Events that are narrower than a pixel and touch become one mark.
  function drawLine(parts, recording, lane, line, at) {
    const y = lane.top + (line ? size.own + (line - 1) * size.flying : 0), height = (line ? size.flying : size.own) - 2;
    let dense = null;
    const flush = () => {
      if (dense) parts.push(h("svg:rect", { class: "event", x: dense.x, y, width: Math.max(1, dense.end - dense.x), height, fill: paint(dense.kind) }));
      dense = null;
    };
    for (const { event, line: own } of lane.events) {
      if (own !== line || event[END] < view.begin || event[BEGIN] > view.end) continue;
      const x = Math.max(at.x(event[BEGIN]), at.left), end = Math.min(at.x(event[END]), at.width - 2), width = end - x;
      if (width < 1.5) {
        if (dense && dense.kind === event[KIND] && x - dense.end < 1) dense.end = end;
        else { flush(); dense = { x, end, kind: event[KIND] }; }
        continue;
      }
      flush();
      parts.push(h("svg:rect", { class: `event ${event[KIND]}${event[TILE] % 2 ? " odd" : ""}`, x, y, width: Math.max(width - 0.5, 0.5), height, fill: paint(event[KIND]) }));
      const tile = recording.stage_names?.[event[STAGE]]?.charAt(0) ?? "";  // K, V or Q
      const text = LETTERS[event[KIND]] ? LETTERS[event[KIND]] + tile + (event[STEP] ?? "") : event[KIND];
      const half = (3.8 * text.length + 2) * type;
      if (width > 2 * half + 2) {
        parts.push(h("svg:rect", { class: `plate ${event[KIND]}`, x: x + width / 2 - half, y: y + height / 2 - 7 * type, width: 2 * half, height: 14 * type }),
          h("svg:text", { class: `inside ${event[KIND]}`, x: x + width / 2, y: y + height / 2 + 4.2 * type, "text-anchor": "middle" }, text));
      }
    }
    flush();
  }

  function drawChoice(panel, at = place(panel)) {
    const lane = panel.recording.rows[selected.lane], one = selected.shown === panel.at && lane ? lane.events[selected.at] : null;
    const visible = selected.shown === panel.at && lane && lane.top !== undefined;
    panel.choice.style.display = visible ? "" : "none";
    if (!visible) return;
    const y = one && one.line ? lane.top + size.own + (one.line - 1) * size.flying : lane.top;
    const begin = one ? Math.max(at.x(one.event[BEGIN]), at.left) : at.left, end = one ? Math.min(at.x(one.event[END]), at.width) : at.width - 3;
    const off = one && (one.event[END] < view.begin || one.event[BEGIN] > view.end);
    panel.choice.style.display = off ? "none" : "";
    for (const [name, value] of Object.entries({ x: begin - 1, y: y - 1, width: Math.max(end - begin, 2) + 2, height: one ? (one.line ? size.flying : size.own) : lane.height + 1 })) panel.choice.setAttribute(name, value);
    panel.choice.classList.toggle("row", !one);
  }

  function ticks(begin, end, count) {
    const rough = (end - begin) / count, power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    const size = [1, 2, 5, 10].map(one => one * power).find(one => one >= rough) || power * 10, found = [];
    for (let tick = Math.ceil(begin / size) * size; tick <= end; tick += size) found.push(tick);
    return found;
  }

  function drawCursor() {
    for (const panel of panels) {
      const x = place(panel).x(cursor), inside = cursor >= view.begin && cursor <= view.end;
      panel.line.style.display = inside ? "" : "none";
      panel.line.setAttribute("x1", x);
      panel.line.setAttribute("x2", x);
      drawRing(panel);
    }
    root.dataset.cursor = Math.round(cursor);
    root.dataset.begin = Math.round(view.begin);
    root.dataset.end = Math.round(view.end);
  }

  function drawRing(panel) {
    const { recording, ring } = panel, ended = cursor > recording.length;
    const slots = findRing(recording, cursor), columns = countColumns(slots.length);
    const two = recording.barriers.includes("empty"), high = two ? 104 : 88, wide = SIZES.slot, rows = Math.ceil(slots.length / columns);
    const kinds = { loading: "load", full: "load", "in use": "product" };
    const parts = slots.flatMap((slot, at) => {
      const x = at % columns * wide + 3, y = Math.floor(at / columns) * high + 14, level = 46 * slot.level;
      return [
        h("svg:text", { class: "slot-name", x: x + 32, y: y - 3, "text-anchor": "middle" }, nameStage(recording, slot.stage)),
        h("svg:rect", { class: "slot", x, y, width: 64, height: 46 }),
        slot.level > 0 && h("svg:rect", { x, y: y + 46 - level, width: 64, height: level, fill: slot.state === "in use" ? paint("product") : paint("load") }),
        h("svg:rect", { class: "slot-edge", x, y, width: 64, height: 46, fill: "none" }),
        h("svg:text", { class: "slot-state", x: x + 32, y: y + (slot.step === null ? 28 : 21), "text-anchor": "middle" }, slot.state),
        slot.step !== null && h("svg:text", { class: "slot-step", x: x + 32, y: y + 36, "text-anchor": "middle" }, nameStep(recording, slot.step)),
        ...bit(x, y + 59, "full", slot.full), ...(two ? bit(x, y + 75, "empty", slot.empty) : []),
      ];
    });
    function bit(x, y, name, phase) {
      return [h("svg:text", { class: "bit-name", x: x + 42, y: y + 3.5, "text-anchor": "end" }, name),
        h("svg:circle", { class: phase ? "bit on" : "bit", cx: x + 53, cy: y - 0.5, r: 7.5 }),
        h("svg:text", { class: phase ? "bit-value on" : "bit-value", x: x + 53, y: y + 3.5, "text-anchor": "middle" }, phase)];
    }
    const width = columns * wide + 2, height = rows * high + 2;
    const text = slots.map(slot => `${nameStage(recording, slot.stage)} ${slot.state}${slot.step === null ? "" : `, ${nameStep(recording, slot.step)}`}, full barrier in phase ${slot.full}${two ? `, empty barrier in phase ${slot.empty}` : ""}`).join("; ");
    ring.setAttribute("aria-label", `Ring at cycle ${number(cursor)}: ${text}.`);
    ring.dataset.slots = JSON.stringify(slots);
    ring.replaceChildren(h("p", {}, ended ? `This recording has ended (cycle ${number(recording.length)}).` : `Ring and phases at cycle ${number(cursor)}`),
      h("svg:svg", { viewBox: `0 0 ${width} ${height}`, width: width * type, height: height * type, "aria-hidden": true }, parts));
  }

  // ---- selection and moving

  function select(at, lane, event) {
    selected = { shown: at, lane, at: event };
    const recording = shown[at], row = recording?.rows[lane], one = row?.events[event];
    root.dataset.lane = row?.name || "";
    root.dataset.event = event;
    sentence.textContent = one ? `${shown.length > 1 ? `${capital(recording.name)}. ` : ""}${describeEvent(recording, row, one.event)}`
      : "Point at an event, or press N, and read here what it is.";
    for (const panel of panels) drawChoice(panel);
  }

  function setView(begin, end) {
    const longest = total() * 1.02, length = Math.min(Math.max(end - begin, 40), longest);
    begin = Math.min(Math.max(begin, 0), longest - length);
    view = { begin, end: begin + length };
    ask();
  }

  function zoom(factor, about = cursor >= view.begin && cursor <= view.end ? cursor : (view.begin + view.end) / 2) {
    setView(about - (about - view.begin) * factor, about + (view.end - about) * factor);
  }

  const showAll = () => setView(0, total() * 1.02);
  const pan = share => setView(view.begin + share * (view.end - view.begin), view.end + share * (view.end - view.begin));

  function setCursor(time) {
    cursor = Math.min(Math.max(time, 0), total());
    const length = view.end - view.begin;
    if (cursor < view.begin || cursor > view.end) setView(cursor - length / 3, cursor + length * 2 / 3);
    else drawCursor();
  }

  function step(direction) {
    const events = shown[selected.shown]?.rows[selected.lane]?.events || [];
    if (!events.length) return;
    let at = selected.at + direction;
    if (selected.at < 0) {  // begin at the cursor
      at = events.findIndex(one => one.event[BEGIN] >= cursor);
      at = direction > 0 ? (at < 0 ? events.length - 1 : at) : (at < 0 ? events.length : at) - 1;
    }
    at = Math.min(Math.max(at, 0), events.length - 1);
    select(selected.shown, selected.lane, at);
    setCursor(events[at].event[BEGIN]);
  }

  function changeLane(direction) {
    const all = shown.flatMap((recording, at) => recording.rows.map((_, lane) => [at, lane]));
    const now = all.findIndex(([at, lane]) => at === selected.shown && lane === selected.lane);
    const [at, lane] = all[Math.min(Math.max(now + direction, 0), all.length - 1)];
    const events = shown[at].rows[lane].events;
    select(at, lane, events.findIndex(one => one.event[BEGIN] <= cursor && one.event[END] > cursor));
  }

  function togglePlay() {
    if (playing) { cancelAnimationFrame(playing); playing = null; }
    else {
      if (cursor >= view.end - 1 || cursor < view.begin) cursor = view.begin;
      const calm = matchMedia("(prefers-reduced-motion: reduce)").matches, seconds = 20, rate = (view.end - view.begin) / seconds;
      let last = performance.now(), held = 0;
      const move = now => {
        held += now - last;
        last = now;
        if (held > (calm ? 1000 : 30)) {  // with reduced motion, one jump per second
          cursor += rate * held / 1000;
          held = 0;
          if (cursor >= view.end || !root.isConnected) { cursor = Math.min(cursor, view.end); togglePlay(); }
          drawCursor();
        }
        if (playing) playing = requestAnimationFrame(move);
      };
      playing = requestAnimationFrame(move);
    }
    play.textContent = playing ? "Pause" : "Play";
  }

  // ---- pointer and keys

  let dragging = null;

  function find(event, panel) {
    const box = panel.plot.getBoundingClientRect(), at = place(panel);
    const x = (event.clientX - box.left) * at.width / box.width, y = (event.clientY - box.top) * at.width / box.width, time = at.time(x);
    const lane = panel.recording.rows.findIndex(row => y >= row.top && y < row.top + row.height + size.gap);
    if (x < at.left || lane < 0) return { time, lane: -1, found: -1 };
    const row = panel.recording.rows[lane], below = y - row.top - size.own, line = below < 0 || !row.lines ? 0 : Math.min(row.lines, 1 + Math.floor(below / size.flying));
    const slack = 3 / at.scale;
    let found = row.events.findIndex(one => one.line === line && one.event[BEGIN] <= time && one.event[END] > time);
    if (found < 0) found = row.events.findIndex(one => one.line === line && one.event[BEGIN] - slack <= time && one.event[END] + slack > time);
    return { time, lane, found };
  }

  // A pointer reports more moves than there are frames: only the last one before a frame counts.
  let moved = null;
  function move(event, panel) {
    if (!moved) requestAnimationFrame(() => { const last = moved; moved = null; point(...last); });
    moved = [event, panel];
  }

  function point(event, panel) {
    if (dragging) {
      const shift = event.clientX - dragging.x, at = place(panel);
      if (Math.abs(shift) > 3) dragging.moved = true;
      const scale = (dragging.end - dragging.begin) / Math.max(at.width - at.left, 1);
      if (dragging.moved) setView(dragging.begin - shift * scale, dragging.end - shift * scale);
      return;
    }
    if (playing) return;
    const { time, lane, found } = find(event, panel);
    if (time >= view.begin && time <= view.end) { cursor = Math.min(Math.max(time, 0), total()); drawCursor(); }
    if (lane >= 0) select(panel.at, lane, found);
  }

  function grab(event, panel) {
    if (event.button) return;
    plots.focus({ preventScroll: true });
    point(event, panel);
    dragging = { x: event.clientX, begin: view.begin, end: view.end };
    panel.plot.setPointerCapture(event.pointerId);
  }

  plots.addEventListener("wheel", event => {
    // Without the focus the wheel scrolls the page, as everywhere in a notebook.
    if (!plots.contains(document.activeElement) && !event.ctrlKey) return;
    const panel = panels.find(one => one.plot.contains(event.target)) || panels[0];
    if (!panel) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) pan(Math.sign(event.deltaX || event.deltaY) * 0.08);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, place(panel).time(event.clientX - panel.plot.getBoundingClientRect().left)));
  }, { passive: false });

  plots.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "−": () => zoom(2), 0: showAll, n: () => step(1), p: () => step(-1),
      N: () => step(1), P: () => step(-1), " ": togglePlay,
      Home: () => setCursor(0), End: () => setCursor(total()),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });

  const observer = new ResizeObserver(() => ask());
  observer.observe(plots);
  model.on("change:data", load);
  load();
  return () => { observer.disconnect(); if (playing) cancelAnimationFrame(playing); };
}

export default { render };
