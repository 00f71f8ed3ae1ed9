// The PTX or the SASS of one or two configurations, side by side, with the lines marked that move tiles.
// Each side is what tilelab.views.listing.load_code returns.

const KINDS = { tma: ["T", "TMA"], barrier: ["B", "barrier"], mma: ["M", "MMA"], load: ["L", "load"],
                store: ["S", "store"] };
const JUMPS = ["tma", "barrier", "mma"]; // the kinds that the keys n and p visit at first
const OVERSCAN = 8; // rows that are drawn above and below what can be seen

// Return a line without the numbers of registers and labels, which change with every other allocation.
function normalise(text) {
  return text.trim().replace(/%([a-z]+)\d+/g, "%$1").replace(/\b(U?[RP])\d+\b/g, "$1")
    .replace(/(\$L__BB|\.L|SB)[\d_]+/g, "$1").replace(/, \.\.\. \d+ in all \.\.\.,/, ",").replace(/\.reuse\b/g, "");
}

// Return the pairs [i, j] of a longest common subsequence of two lists of strings, in their order.
// Each row of the table of lengths is a vector of bits (Hyyrö 2004): bit j is 0 where b[j] makes the sequence longer.
// That takes 5,000 × 5,000 / 32 steps for two listings of 5,000 lines, whatever they hold.
function matchLines(a, b) {
  let begin = 0, end = 0;
  while (begin < Math.min(a.length, b.length) && a[begin] === b[begin]) begin++;
  while (end < Math.min(a.length, b.length) - begin && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const height = a.length - end - begin, width = b.length - end - begin, words = (width + 31) >> 5;
  const places = new Map();
  for (let j = 0; j < width; j++) {
    const text = b[begin + j];
    if (!places.has(text)) places.set(text, new Int32Array(words));
    places.get(text)[j >> 5] |= 1 << (j & 31);
  }
  const table = new Int32Array((height + 1) * words).fill(-1);
  for (let i = 0; i < height; i++) {
    const above = i * words, row = above + words, match = places.get(a[begin + i]);
    if (!match) { table.copyWithin(row, above, row); continue; }
    let carry = 0;
    for (let word = 0; word < words; word++) {
      const before = table[above + word], hit = before & match[word];
      const sum = (before >>> 0) + (hit >>> 0) + carry;
      carry = sum > 0xffffffff ? 1 : 0;
      table[row + word] = (sum | 0) | (before & ~match[word]);
    }
  }
  const pairs = [];
  for (let i = height, j = width; i > 0 && j > 0;) {
    if (a[begin + i - 1] === b[begin + j - 1]) pairs.push([begin + --i, begin + --j]);
    else if (table[i * words + ((j - 1) >> 5)] & (1 << ((j - 1) & 31))) j--;
    else i--;
  }
  pairs.reverse();
  const head = Array.from({ length: begin }, (_, k) => [k, k]);
  const tail = Array.from({ length: end }, (_, k) => [a.length - end + k, b.length - end + k]);
  return [...head, ...pairs, ...tail];
}

// Return the rows of the drawing: { left, right, same } with an index of a line or -1 on each side.
function alignLines(a, b) {
  const rows = [];
  let i = 0, j = 0;
  for (const [x, y] of [...matchLines(a, b), [a.length, b.length]]) {
    while (i < x || j < y) rows.push({ left: i < x ? i++ : -1, right: j < y ? j++ : -1, same: false });
    if (x < a.length) rows.push({ left: i++, right: j++, same: true });
  }
  return rows;
}

// Draw the listings into `el`, which becomes the root of the view. `right` may be null. Returns a function that ends it.
function renderCode(el, left, right) {
  el.classList.add("tiles-code");
  el.replaceChildren();
  const sides = [left, right].filter(Boolean), names = sides.length > 1 ? ["left", "right"] : ["left"];
  let language = sides.some(side => side.ptx.length) ? "ptx" : "sass";
  let exact = false, rows = [], current = -1, rowHeight = 20, drawn = [-1, -1], begun = false;
  const active = new Set(JUMPS);
  if (!sides.length) {
    el.append(h("p", { class: "tiles-code-reason" }, "No configuration is chosen."));
    return () => {};
  }

  const languages = ["ptx", "sass"].map(name =>
    h("button", { type: "button", class: "tiles-code-switch", "data-language": name,
                  title: name === "ptx" ? "the compiler's portable instructions" : "the instructions that the GPU runs",
                  onclick: () => { language = name; prepare(); begin(); } }, name.toUpperCase()));
  const chips = [...Object.entries(KINDS), ["difference", ["≠", "differences"]]]
    .filter(([kind]) => kind !== "difference" || right)
    .map(([kind, [letter, label]]) =>
      h("button", { type: "button", class: `tiles-code-chip tiles-code-${kind}`, "data-kind": kind,
                    title: `stop at these lines: ${label}`,
                    onclick: () => { active.has(kind) ? active.delete(kind) : active.add(kind); showState(); } },
        h("b", {}, letter), ` ${label}`));
  const previous = h("button", { type: "button", title: "previous marked line (p)", onclick: () => jump(-1) }, "↑ p");
  const next = h("button", { type: "button", title: "next marked line (n)", onclick: () => jump(1) }, "↓ n");
  const exactly = right ? h("button", { type: "button", title: "count other register numbers as a difference",
                                        onclick: () => { exact = !exact; prepare(); } }, "register numbers") : null;
  const buttons = [...languages, previous, next, ...chips, exactly].filter(Boolean);
  const toolbar = h("div", { class: "tiles-code-tools", role: "toolbar", "aria-label": "listing" }, ...buttons);
  moveWithArrows(toolbar, buttons);
  const status = h("p", { class: "tiles-code-status", role: "status" });
  const panes = sides.map((side, index) => {
    const spacer = h("div", { class: "tiles-code-spacer" });
    const scroller = h("div", { class: "tiles-code-lines", tabindex: "-1" }, spacer);
    const counts = h("span", { class: "tiles-code-counts" });
    const copy = h("button", { type: "button", title: "copy this listing", onclick: () => copyText(side[language].map(([, line]) => line).join("\n"), copy, root) }, "Copy");
    const title = h("h4", {}, side.name, " ", h("small", {}, side.target));
    const reason = h("p", { class: "tiles-code-reason", hidden: !side.reason }, side.reason);
    const pane = h("section", { class: "tiles-code-side", "aria-label": `${side.name}, ${side.target}` },
                   h("header", {}, title, copy), reason, counts, scroller);
    scroller.addEventListener("scroll", () => follow(index));
    return { side, name: names[index], pane, scroller, spacer, counts };
  });
  const body = h("div", { class: `tiles-code-body tiles-code-${sides.length}`, tabindex: "0", role: "group",
                          "aria-label": "instructions; n and p go to the next and the previous marked line" },
                 ...panes.map(({ pane }) => pane));
  const note = h("p", { class: "tiles-code-note" });
  const root = h("div", { class: "tiles-code-root", onkeydown: press }, toolbar, body, status, note);
  keepKeys(root);
  el.append(root);

  function prepare() {
    const texts = sides.map(side => side[language].map(([, text]) => exact ? text.trim() : normalise(text)));
    rows = right ? alignLines(...texts) : texts[0].map((_, index) => ({ left: index, right: -1, same: true }));
    for (const row of rows) row.kinds = new Set(panes.map(({ side, name }) => side[language][row[name]]?.[0]));
    current = -1;
    for (const { side, counts, spacer, scroller } of panes) {
      const number = kind => side[language].filter(line => line[0] === kind).length;
      counts.textContent = side[language].length
        ? `${side[language].length.toLocaleString("en")} lines: ` + Object.entries(KINDS)
          .map(([kind, [letter, label]]) => `${number(kind)} ${label} (${letter})`).join(", ")
        : `There is no ${language.toUpperCase()} of it.`;
      spacer.style.width = `${Math.max(10, ...side[language].map(([, text]) => text.length)) + 12}ch`;
      scroller.scrollLeft = 0;
    }
    const differing = rows.filter(row => !row.same).length;
    status.textContent = !right ? "" : differing ? `${differing.toLocaleString("en")} lines differ.`
      : "The listings are the same.";
    note.textContent = (sides[0].notes?.[language] ?? "")
      + (right && !exact ? " Numbers of registers and labels do not count as differences." : "");
    measure();
    showState();
  }

  // The listing opens at the kernel's signature; what stands above it names versions and declares arrays.
  function begin() {
    const signature = rows.findIndex(row => /\.entry\b/.test(sides[0][language][row.left]?.[1]));
    for (const { scroller } of panes) scroller.scrollTop = Math.max(signature, 0) * rowHeight;
    draw(true);
    begun = panes[0].scroller.clientHeight > 0; // else the listing is not on the page yet
  }

  function measure() {
    const probe = h("div", { class: "tiles-code-row" }, "M");
    panes[0].spacer.append(probe);
    rowHeight = probe.getBoundingClientRect().height || rowHeight;
    probe.remove();
    for (const { spacer } of panes) spacer.style.height = `${rows.length * rowHeight}px`;
    draw(true);
  }

  // Only the rows that can be seen are elements.
  function draw(always = false) {
    panes.forEach((pane, index) => {
      const { side, name, scroller, spacer } = pane;
      const first = Math.max(0, Math.floor(scroller.scrollTop / rowHeight) - OVERSCAN);
      const last = Math.min(rows.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / rowHeight) + OVERSCAN);
      if (!always && drawn[index] === first) return;
      drawn[index] = first;
      spacer.replaceChildren(...rows.slice(first, last).map((row, offset) => {
        const number = row[name], [kind, text] = side[language][number] ?? ["", ""];
        const mark = row.same ? "" : number < 0 ? " " : row.left < 0 || row.right < 0 ? "+" : "≠";
        const classes = ["tiles-code-row", kind && `tiles-code-${kind}`, !row.same && "tiles-code-differs",
                         number < 0 && "tiles-code-absent", first + offset === current && "tiles-code-current"];
        return h("div", { class: classes.filter(Boolean).join(" "), "data-row": first + offset,
                          style: `top:${(first + offset) * rowHeight}px`, onclick: () => select(first + offset) },
                 h("span", { class: "tiles-code-number" }, number < 0 ? "" : String(number + 1)),
                 h("span", { class: "tiles-code-letter" }, kind ? KINDS[kind][0] : " "),
                 h("span", { class: "tiles-code-mark" }, mark || " "), h("code", {}, text));
      }));
    });
  }

  function follow(index) {
    const from = panes[index].scroller;
    for (const { scroller } of panes) {
      if (scroller.scrollTop !== from.scrollTop) scroller.scrollTop = from.scrollTop;
      if (scroller.scrollLeft !== from.scrollLeft) scroller.scrollLeft = from.scrollLeft;
    }
    draw();
  }

  function select(row) {
    current = row;
    const { scroller } = panes[0];
    const top = row * rowHeight;
    if (top < scroller.scrollTop || top + rowHeight > scroller.scrollTop + scroller.clientHeight - rowHeight)
      for (const pane of panes) pane.scroller.scrollTop = Math.max(0, top - scroller.clientHeight / 3);
    draw(true);
    const said = panes.map(({ side, name }) => {
      const line = side[language][rows[row][name]];
      const kind = line && KINDS[line[0]]?.[1];
      return line ? `${right ? `${name} ` : ""}line ${rows[row][name] + 1}${kind ? ` (${kind})` : ""}` : `nothing ${name}`;
    });
    const [a, b] = panes.map(({ side, name }) => side[language][rows[row][name]]?.[1]);
    const verdict = !right ? "" : !rows[row].same ? ": they differ" : a === b ? ": the same"
      : ": the same but for register numbers or labels";
    status.textContent = said.join(", ") + verdict;
  }

  const isMarked = row => [...row.kinds].some(kind => active.has(kind)) || active.has("difference") && !row.same;

  function jump(step) {
    if (!active.size) { status.textContent = "Choose which lines to visit."; return; }
    for (let row = current < 0 ? (step > 0 ? 0 : rows.length - 1) : current + step; rows[row]; row += step) {
      // Differing lines in a row are one stop.
      const block = active.has("difference") && !rows[row].same && rows[row - 1]?.same === false
        && ![...rows[row].kinds].some(kind => active.has(kind));
      if (isMarked(rows[row]) && !block) { select(row); return; }
    }
    status.textContent = step > 0 ? "There is no marked line below." : "There is no marked line above.";
  }

  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const scroller = panes[0].scroller, page = scroller.clientHeight - 2 * rowHeight;
    const moves = { ArrowDown: rowHeight, ArrowUp: -rowHeight, PageDown: page, PageUp: -page, " ": page,
                    Home: -Infinity, End: Infinity };
    if (event.key === "n" || event.key === "p") jump(event.key === "n" ? 1 : -1);
    else if (event.target.closest("button")) return;
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft")
      scroller.scrollLeft += event.key === "ArrowRight" ? 60 : -60;
    else if (event.key in moves)
      scroller.scrollTop = Math.max(0, Math.min(scroller.scrollHeight, scroller.scrollTop + moves[event.key]));
    else return;
    event.preventDefault();
  }

  function showState() {
    for (const button of languages) button.setAttribute("aria-pressed", String(button.dataset.language === language));
    for (const chip of chips) chip.setAttribute("aria-pressed", String(active.has(chip.dataset.kind)));
    exactly?.setAttribute("aria-pressed", String(exact));
  }

  prepare();
  begin();
  const resized = new ResizeObserver(() => { measure(); if (!begun) begin(); });
  resized.observe(body);
  return () => resized.disconnect();
}

function render({ model, el }) {
  const root = h("div", { class: "tiles-view tiles-code" });
  el.append(root);
  let end = () => {};
  const show = () => { end(); const { left = null, right = null } = model.get("data") ?? {}; end = renderCode(root, left, right); };
  model.on("change:data", show);
  show();
  return () => end();
}

export default { render };
