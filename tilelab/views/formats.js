// Small floats: the bits of a code, its value and its neighbours, and what a typed number rounds to. Where data.kind is
// "block" the view shows a block of numbers under its scale instead.
//
// The first part computes what ch14.mx_formats.number_formats computes, and a test compares the two.

// ---- elements: { name, exponentBits, mantissaBits, specials: "", "nan" or "ieee" }

const bitsOf = element => 1 + element.exponentBits + element.mantissaBits;
const biasOf = element => 2 ** (element.exponentBits - 1) - 1;

// Return the number of finite magnitudes. Their codes, without the sign, count up from 0.
const countOf = element => 2 ** (bitsOf(element) - 1)
  - { "": 0, nan: 1, ieee: 2 ** element.mantissaBits }[element.specials];

// Return the value of a code without its sign, as if every code were a number.
function magnitudeOf(element, code) {
  const exponent = code >> element.mantissaBits, mantissa = code & (2 ** element.mantissaBits - 1);
  return (mantissa + (exponent > 0 ? 2 ** element.mantissaBits : 0))
    * 2 ** (Math.max(exponent, 1) - biasOf(element) - element.mantissaBits);
}

function decode(element, code) {
  const half = 2 ** (bitsOf(element) - 1), magnitude = code % half, count = countOf(element);
  const sign = code >= half ? -1 : 1;
  if (magnitude < count) return sign * magnitudeOf(element, magnitude);
  return element.specials === "ieee" && magnitude === count ? sign * Infinity : NaN;
}

// Return the code that a number rounds to, to nearest even. Beyond the largest number it saturates. Null stands for NaN
// in a format that has none.
function encode(element, number) {
  const value = Math.fround(number), count = countOf(element), magnitude = Math.abs(value);
  const sign = value < 0 || Object.is(value, -0) ? 2 ** (bitsOf(element) - 1) : 0;
  if (Number.isNaN(value)) return element.specials ? { nan: 0x7f, ieee: 0x7e }[element.specials] : null;
  let low = 0, high = count - 1;  // the last code whose number is not above the magnitude
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (magnitudeOf(element, middle) <= magnitude) low = middle; else high = middle - 1;
  }
  if (low === count - 1) return low + sign;
  const midpoint = (magnitudeOf(element, low) + magnitudeOf(element, low + 1)) / 2;
  const up = magnitude > midpoint || (magnitude === midpoint && low % 2 === 1);
  return low + (up ? 1 : 0) + sign;
}

// Write a number as Python's "g" does, with six significant digits.
function formatG(number) {
  if (Number.isNaN(number)) return "nan";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (number === 0) return Object.is(number, -0) ? "-0" : "0";
  // toExponential(5) would round a tie away from zero, and Python rounds it to even.
  const [long, exponent] = Math.abs(number).toExponential(60).split("e"), digits = long.replace(".", "");
  const rest = digits.slice(6), tie = /^50*$/.test(rest);
  const rounded = Number(digits.slice(0, 6)) + ((tie ? Number(digits[5]) % 2 === 1 : rest >= "5") ? 1 : 0);
  const power = Number(exponent) + (rounded === 1e6 ? 1 : 0), six = String(rounded).slice(0, 6);
  const sign = number < 0 ? "-" : "";
  const strip = text => text.includes(".") ? text.replace(/\.?0*$/, "") : text;
  if (power < -4 || power >= 6) {
    const last = String(Math.abs(power)).padStart(2, "0");
    return `${sign}${strip(`${six[0]}.${six.slice(1)}`)}e${power < 0 ? "-" : "+"}${last}`;
  }
  return sign + strip(power < 0 ? `0.${"0".repeat(-power - 1)}${six}`
    : `${six.slice(0, power + 1)}.${six.slice(power + 1)}`);
}

const binary = (code, bits) => code.toString(2).padStart(bits, "0");

// Return a sentence about a code: its bits, value, neighbours and spacing.
function describeCode(element, code) {
  const text = binary(code, bitsOf(element)), value = decode(element, code), count = countOf(element);
  const fields = `${text[0]} ${text.slice(1, 1 + element.exponentBits)} ${text.slice(1 + element.exponentBits)}`;
  const magnitude = code % 2 ** (bitsOf(element) - 1), head = `code ${code} of ${element.name}, ${fields}, is `;
  if (magnitude >= count) return head + formatG(value);
  const exponent = magnitude >> element.mantissaBits, power = Math.max(exponent, 1) - biasOf(element);
  const kind = magnitude === 0 ? "zero" : exponent === 0 ? "subnormal" : "normal";
  const below = magnitude ? formatG(magnitudeOf(element, magnitude - 1)) : "nothing";
  const above = magnitude + 1 < count ? formatG(magnitudeOf(element, magnitude + 1)) : "nothing";
  return `${head}${formatG(value)} (${kind}, exponent ${power}); magnitudes beside it: ${below} and ${above}, `
    + `step ${formatG(2 ** (power - element.mantissaBits))}`;
}

// ---- scales and blocks

const decodeE8m0 = code => code === 255 ? NaN : 2 ** (code - 127);
const maxOf = element => magnitudeOf(element, countOf(element) - 1);
const exponentOf = number => {  // of a float32 number above 0
  let exponent = Math.floor(Math.log2(number));
  if (2 ** exponent > number) exponent -= 1;  // log2 may round up
  if (2 ** (exponent + 1) <= number) exponent += 1;
  return exponent;
};

// Return the E8M0 code of a block with this largest magnitude, by the rule floor or ceil.
function e8m0Scale(amax, element, rule) {
  if (!Number.isFinite(amax)) return 255;
  if (amax === 0) return 0;
  const largest = maxOf(element), power = exponentOf(amax);
  let exponent = power - exponentOf(largest);
  if (rule === "ceil" && amax / 2 ** power > largest / 2 ** exponentOf(largest)) exponent += 1;
  return Math.min(Math.max(exponent, -127), 127) + 127;
}

// Return { scaleCode, scale, codes, back } of a block of finite numbers, with one float32 operation at a time.
function quantiseBlock(numbers, format, elements, rule) {
  const f = Math.fround, element = elements[format.element];
  const amax = Math.max(...numbers.map(Math.abs));
  let scaleCode = null, scale, multiplier;
  if (format.scale === "e8m0") {
    scaleCode = e8m0Scale(amax, element, rule);
    scale = decodeE8m0(scaleCode);
    multiplier = f(1 / scale);
  } else if (format.scale === "fp32") {
    const least = Math.max(amax, f(1e-4));
    scale = f(least / f(maxOf(element)));
    multiplier = f(f(maxOf(element)) / least);
  } else {  // an e4m3 scale, and one float32 scale of the tensor, which is this block alone
    const tensor = amax > 0 ? Math.max(f(amax / f(448 * 6)), 2 ** -126) : 1, reciprocal = f(1 / tensor);
    scaleCode = encode(elements.e4m3, f(f(amax * f(1 / 6)) * reciprocal));
    const block = decode(elements.e4m3, scaleCode);
    multiplier = block === 0 ? 0 : Math.min(f(reciprocal / block), f(3.4028234663852886e38));
    scale = f(block * tensor);
  }
  const codes = numbers.map(number => encode(element, f(number * multiplier)));
  return { scaleCode, scale, codes, back: codes.map(code => f(decode(element, code) * scale)), amax };
}

// ---- the view

const TONES = { sign: "sign", exponent: "exponent", mantissa: "mantissa" };
const KIND = (element, index) => index === 0 ? "sign" : index <= element.exponentBits ? "exponent" : "mantissa";
// The drawing is as wide as the page allows, so that its text keeps its size.
const widthOf = drawing => Math.max(320, Math.round(drawing.getBoundingClientRect().width) || 900);

function redrawWhenResized(root, draw) {
  const observer = new ResizeObserver(draw);
  observer.observe(root);
  return () => observer.disconnect();
}

function renderCode({ model, el }) {
  const { elements, start } = model.get("data");
  // E8M0 is a scale: eight exponent bits, no sign and no zero.
  const state = { element: start.element, typed: start.value, code: 0, axis: "" };
  const isScale = () => state.element === "e8m0";
  const bits = () => isScale() ? 8 : bitsOf(elements[state.element]);
  const valueOf = code => isScale() ? decodeE8m0(code) : decode(elements[state.element], code);
  const round = number => {
    if (!isScale()) return encode(elements[state.element], number);
    if (!(number > 0)) return null;
    return Math.min(Math.max(exponentOf(number), -127), 127) + 127;  // the rule floor
  };

  const typed = h("input", { type: "number", step: "any", value: state.typed });
  const codeField = h("input", { type: "number", min: 0 });
  const buttons = h("div", { class: "bits", role: "group", "aria-label": "Bits of the code" });
  const sentence = h("p", { class: "sentence", role: "status", "aria-live": "polite" });
  const formula = h("p", { class: "formula" });
  const rounding = h("p", { class: "rounding" });
  const line = h("svg:svg", { class: "line", tabindex: "0", role: "slider" });

  typed.addEventListener("input", () => {
    if (Number.isNaN(typed.valueAsNumber)) return;
    state.typed = typed.valueAsNumber;
    state.code = round(state.typed) ?? state.code;
    update();
  });
  codeField.addEventListener("input", () => {
    const code = codeField.valueAsNumber;
    if (Number.isInteger(code) && code >= 0 && code < 2 ** bits()) setCode(code);
  });
  codeField.addEventListener("change", () => { codeField.value = state.code; });
  // A code that the reader chose stands for its own value.
  const setCode = code => {
    state.code = code;
    const value = valueOf(code);
    state.typed = Number.isFinite(value) ? value : null;
    typed.value = Number.isFinite(value) ? String(value) : "";
    update();
  };

  // The codes of finite numbers, from the smallest number to the largest.
  const orderedCodes = () => {
    if (isScale()) return Array.from({ length: 255 }, (_, code) => code);
    const count = countOf(elements[state.element]), half = 2 ** (bits() - 1);
    return [...Array.from({ length: count }, (_, i) => half + count - 1 - i),
      ...Array.from({ length: count }, (_, i) => i)];
  };
  const isLinear = () => !isScale() && bits() <= 6;
  let place = () => 0, marks = [];

  function drawLine() {
    const wide = widthOf(line), element = elements[state.element], left = 22, right = wide - 22, y = 78, parts = [];
    line.setAttribute("viewBox", `0 0 ${wide} 172`);
    const codes = orderedCodes();
    if (isLinear()) {
      const largest = maxOf(element);
      const end = 1.08 * largest;
      place = value => left + (Math.min(Math.max(value, -end), end) / end + 1) / 2 * (right - left);
      marks = codes.map(code => ({ code, value: valueOf(code), x: place(valueOf(code)) }));
    } else {
      // Powers of two: the numbers of the sign of the code, with zero at the left end.
      const negative = !isScale() && state.code >= 2 ** (bits() - 1);
      const shown = codes.filter(code => isScale() || (code >= 2 ** (bits() - 1)) === negative);
      const positive = shown.map(valueOf).map(Math.abs).filter(value => value > 0);
      const low = Math.log2(Math.min(...positive)) - 1.5, high = Math.log2(Math.max(...positive)) + 0.5;
      place = value => {
        const power = value ? Math.log2(Math.abs(value)) : low;
        return left + (Math.min(Math.max(power, low), high) - low) / (high - low) * (right - left);
      };
      marks = shown.map(code => ({ code, value: valueOf(code), x: place(valueOf(code)) }));
      const step = Math.max(4, Math.ceil((high - low) * 60 / (right - left) / 4) * 4);
      for (let power = Math.ceil(low / step) * step; power <= high; power += step)
        parts.push(h("svg:line", { x1: place(2 ** power), x2: place(2 ** power), y1: 108, y2: 114, class: "tick" }),
          h("svg:text", { x: place(2 ** power), y: 134, class: "label" },
            `${negative ? "−" : ""}2^${power < 0 ? "−" : ""}${Math.abs(power)}`));
      if (!isScale()) parts.push(h("svg:text", { x: left, y: 134, class: "label" }, "0"));
    }
    parts.push(h("svg:text", { x: wide / 2, y: 162, class: "label title" },
      `value of the code${isLinear() ? "" : ", on a logarithmic axis"}`));
    parts.push(h("svg:line", { x1: left, x2: right, y1: y, y2: y, class: "axis" }));
    const least = isScale() ? 0 : 2 ** (1 - biasOf(element));  // below it numbers are subnormal
    for (const mark of marks) {
      const kind = mark.code === state.code ? " chosen" : Math.abs(mark.value) < least ? " subnormal" : "";
      parts.push(h("svg:line", { x1: mark.x, x2: mark.x, y1: y - 16, y2: y + 16, class: `mark${kind}` }));
    }
    if (isLinear()) {  // in two lines, where there is room
      const ends = [-Infinity, -Infinity];
      for (const [index, mark] of marks.entries()) {
        const at = index % 2;
        if (mark.code === 2 ** (bits() - 1) || mark.x - ends[at] < 42) continue;
        parts.push(h("svg:text", { x: mark.x, y: y + (at ? 36 : 54), class: "label" }, formatG(mark.value)));
        ends[at] = mark.x;
      }
    }
    const value = valueOf(state.code);
    if (Number.isFinite(value)) {
      const x = place(value);
      parts.push(h("svg:line", { x1: x, x2: x, y1: y - 26, y2: y + 18, class: "chosen mark" }));
      if (state.typed !== null && state.typed !== value) {
        const from = place(state.typed);
        parts.push(h("svg:path", { d: `M ${from - 7} 18 h 14 l -7 14 z`, class: "typed" }),
          h("svg:line", { x1: from, x2: x, y1: 34, y2: y - 28, class: "arrow" }));
      }
    }
    line.classList.toggle("dense", marks.length * 5 > right - left);
    line.replaceChildren(...parts);
    line.setAttribute("aria-label", `Numbers of ${state.element}; arrow keys go to the next number`);
    line.setAttribute("aria-valuemin", 0);
    line.setAttribute("aria-valuemax", codes.length - 1);
    line.setAttribute("aria-valuenow", Math.max(0, codes.indexOf(state.code)));
    line.setAttribute("aria-valuetext", formatG(value));
  }
  line.addEventListener("click", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(line.getScreenCTM().inverse()).x;
    const best = marks.reduce((near, mark) => Math.abs(mark.x - at) < Math.abs(near.x - at) ? mark : near);
    setCode(best.code);
  });
  line.addEventListener("keydown", event => {
    const codes = orderedCodes(), now = codes.indexOf(state.code);
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!step && event.key !== "Home" && event.key !== "End") return;
    const next = event.key === "Home" ? 0 : event.key === "End" ? codes.length - 1 : now < 0 ? 0 : now + step;
    event.preventDefault();
    setCode(codes[Math.min(Math.max(next, 0), codes.length - 1)]);
  });

  function writeFormula() {
    const code = state.code;
    if (isScale()) return code === 255 ? "Code 255 is NaN." : `2^(${code} − 127) = 2^${code - 127}`;
    const element = elements[state.element], half = 2 ** (bits() - 1), magnitude = code % half;
    if (magnitude >= countOf(element)) return "The highest codes are not numbers in this format.";
    const exponent = magnitude >> element.mantissaBits, mantissa = magnitude & (2 ** element.mantissaBits - 1);
    const share = `${mantissa}/${2 ** element.mantissaBits}`, sign = code >= half ? "−" : "";
    return exponent ? `${sign}2^(${exponent} − ${biasOf(element)}) × (1 + ${share})`
      : `${sign}2^(1 − ${biasOf(element)}) × ${share}, because exponent 0 has no leading one`;
  }

  function update() {
    const element = elements[state.element], text = binary(state.code, bits());
    if (buttons.children.length !== bits() || buttons.dataset.element !== state.element) {
      buttons.dataset.element = state.element;
      buttons.replaceChildren(...Array.from({ length: bits() }, (_, index) => {
        const kind = isScale() ? "exponent" : KIND(element, index), name = `${kind}, bit ${bits() - 1 - index}`;
        return h("button", { type: "button", class: `bit ${TONES[kind]}`, title: name,
          onclick: () => setCode(state.code ^ 2 ** (bits() - 1 - index)) }, h("b", {}),
            h("span", {}, kind === "sign" ? "sign" : kind === "exponent" ? "exp" : "mant"));
      }));
    }
    [...buttons.children].forEach((button, index) => {
      button.firstChild.textContent = text[index];
      button.setAttribute("aria-pressed", text[index] === "1");
      button.setAttribute("aria-label", `${button.title}: ${text[index]}`);
    });
    codeField.max = 2 ** bits() - 1;
    if (document.activeElement !== codeField) codeField.value = state.code;
    const value = valueOf(state.code);
    sentence.textContent = (isScale() ? `code ${state.code} of e8m0, ${text}, is ${formatG(value)}`
      : describeCode(element, state.code)) + ".";
    formula.textContent = writeFormula();
    rounding.textContent = state.typed === null || round(state.typed) === null ? ""
      : state.typed === value ? `${formatG(value)} is a number of ${state.element}.`
      : isScale() ? `The rule floor takes the power of two at or below ${formatG(state.typed)}: ${formatG(value)}.`
        : `${formatG(state.typed)} rounds to ${formatG(value)}: ${explainRounding(element, state.typed, state.code)}`;
    drawLine();
  }

  function explainRounding(element, number, code) {
    const size = Math.abs(Math.fround(number)), magnitude = code % 2 ** (bits() - 1),
      here = magnitudeOf(element, magnitude);
    if (size > maxOf(element)) return "it is beyond the largest number, so it saturates.";
    const other = magnitudeOf(element, magnitude + (size > here ? 1 : -1)), middle = (here + other) / 2;
    const between = `it lies between ${formatG(Math.min(here, other))} and ${formatG(Math.max(here, other))}`;
    return size === middle ? `${between}, exactly in the middle, and the even code wins.`
      : `${between}, nearer to ${formatG(here)}.`;
  }

  const { label, select } = makeFields(state, () => {
    const number = state.typed ?? 1;
    state.typed = number;
    typed.value = String(number);
    state.code = round(number) ?? 127;
    update();
  });
  state.code = round(state.typed) ?? 0;
  const root = h("div", { class: "tiles-view tiles-formats", role: "group",
    "aria-label": "Number line of small floats" },
    h("div", { class: "controls" }, select("element", "format", [...Object.keys(elements), "e8m0"].map(name => [name])),
      label("typed", "type a number", typed), label("code", "code", codeField), buttons),
    sentence, formula, rounding, h("div", { class: "line-box" }, line),
    h("p", { class: "hint" }, "Click a bit to turn it over, or click the line to take the nearest number; arrow keys "
      + "go to the next number. The triangle is the typed number. Dashed marks: subnormal numbers. Formats of eight "
      + "bits are drawn by powers of two."));
  keepKeys(root);
  el.append(root);
  update();
  return redrawWhenResized(root, drawLine);
}

function renderBlock({ model, el }) {
  const { elements, formats, blocks, start } = model.get("data");
  const state = { format: start.format, rule: start.rule, data: start.data, at: 0 };
  let numbers = [], made = null;
  const load = () => {
    numbers = blocks[state.data].slice(0, formats[state.format].block);
    state.at = Math.min(state.at, numbers.length - 1);
  };
  const value = h("input", { type: "number", step: "any" });
  const sentence = h("p", { class: "sentence", role: "status", "aria-live": "polite" });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const bars = h("svg:svg", { class: "bars", tabindex: "0", role: "slider" });
  value.addEventListener("input", () => {
    if (Number.isNaN(value.valueAsNumber)) return;
    numbers[state.at] = Math.fround(value.valueAsNumber);
    update();
  });
  const pick = index => { state.at = Math.min(Math.max(index, 0), numbers.length - 1); update(); };
  const LEFT = 58, RIGHT = 12;  // the margins of the drawing; the left one holds the labels of values
  const across = () => (widthOf(bars) - LEFT - RIGHT) / numbers.length;
  const toDrawing = event => new DOMPoint(event.clientX, event.clientY).matrixTransform(bars.getScreenCTM().inverse());
  bars.addEventListener("pointermove", event => {
    const index = Math.floor((toDrawing(event).x - LEFT) / across());
    if (index !== state.at && index >= 0 && index < numbers.length) pick(index);
  });
  bars.addEventListener("keydown", event => {
    const next = { ArrowLeft: state.at - 1, ArrowRight: state.at + 1, Home: 0, End: numbers.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    pick(next);
  });

  // Label the levels from the outermost to zero, where there is room, and every so many elements.
  function labelAxes(levels, top, x, y, end) {
    const parts = [];
    const say = (at, up, text, kind = "") => parts.push(h("svg:text", { x: at, y: up, class: `label ${kind}` }, text));
    const shown = levels.filter(level => level < top && level > 0);
    const outer = shown.length ? shown : [10 ** Math.floor(Math.log10(top / 1.06))];  // no level is within the drawing
    let last = Infinity;
    for (const level of outer.sort((a, b) => b - a)) {
      const height = y(0) - y(level);
      if (last - height < 16 || height < 16) continue;
      last = height;
      for (const number of [level, -level]) say(LEFT - 6, y(number) + 4,
        formatG(Number(number.toPrecision(3))), "value");
    }
    say(LEFT - 6, y(0) + 4, "0", "value");
    const every = [1, 2, 4, 8, 16, 32].find(count => count * across() >= 28) ?? 32;
    for (let index = 0; index < numbers.length; index += every) say(x(index), 274, String(index));
    say((LEFT + end) / 2, 294, "element of the block; upwards its value", "title");
    return parts;
  }

  function update() {
    const format = formats[state.format], element = elements[format.element];
    const ruleFits = format.scale === "e8m0";
    controls.rule.disabled = !ruleFits;
    made = quantiseBlock(numbers, format, elements, ruleFits ? state.rule : "floor");
    const { scale, scaleCode, codes, back, amax } = made, limit = maxOf(element) * scale;
    const top = Math.max(amax, Math.min(limit, 2 * amax), 1e-30) * 1.06;
    const end = widthOf(bars) - RIGHT, step = across();
    bars.setAttribute("viewBox", `0 0 ${end + RIGHT} 300`);
    const x = index => LEFT + (index + 0.5) * step, y = number => 130 - number / top * 120;
    const levels = countOf(element) <= 32
      ? Array.from({ length: countOf(element) }, (_, code) => magnitudeOf(element, code) * scale) : [0, limit];
    const parts = [];
    for (const level of levels.filter(level => level < top))
      for (const number of level ? [level, -level] : [0])
        parts.push(h("svg:path", { d: `M${LEFT} ${y(number)}H${end}`, class: number ? "level" : "axis" }));
    parts.push(...labelAxes(levels, top, x, y, end));
    const wide = Math.max(1.5, step * 0.5);
    numbers.forEach((number, index) => {
      parts.push(h("svg:line", { x1: x(index), x2: x(index), y1: 130, y2: y(number), class: "number",
        "stroke-width": wide }),
        h("svg:circle", { cx: x(index), cy: y(back[index]), r: Math.min(6, wide),
          class: index === state.at ? "left here" : "left" }));
    });
    parts.push(h("svg:rect", { x: x(state.at) - step / 2, y: 4, width: step, height: 252, class: "frame" }));
    bars.replaceChildren(...parts);
    const lost = numbers.map((number, index) => number - back[index]);
    const error = Math.hypot(...lost) / Math.max(Math.hypot(...numbers), 1e-30);
    const largest = codes.filter(code => Math.abs(decode(element, code)) === maxOf(element)).length;
    const zeros = numbers.filter((number, index) => number !== 0 && back[index] === 0).length;
    const code = scaleCode === null ? "" : ` (code ${scaleCode})`, share = (100 * error).toFixed(1);
    sentence.textContent = `${state.format}: scale ${formatG(scale)}${code}, error ${share}% of the block's norm; `
      + `${largest} at ±${formatG(maxOf(element))}, ${zeros} became zero.`;
    const at = state.at, number = numbers[at];
    readout.textContent = `Element ${at}: ${formatG(number)} / ${formatG(scale)} = ${formatG(number / scale)} → `
      + `code ${binary(codes[at], bitsOf(element))} (${formatG(decode(element, codes[at]))}) → ${formatG(back[at])}.`;
    if (document.activeElement !== value) value.value = String(Number(number.toPrecision(6)));
    bars.setAttribute("aria-label", "Elements of the block; arrow keys go to the next element");
    bars.setAttribute("aria-valuemin", 0);
    bars.setAttribute("aria-valuemax", numbers.length - 1);
    bars.setAttribute("aria-valuenow", at);
    bars.setAttribute("aria-valuetext", readout.textContent);
  }

  const { controls, label, select } = makeFields(state, name => { if (name !== "rule") load(); update(); });
  const root = h("div", { class: "tiles-view tiles-formats", role: "group",
    "aria-label": "A block of numbers under its scale" },
    h("div", { class: "controls" }, select("format", "format", Object.keys(formats).map(name => [name])),
      select("rule", "rule of the scale", [["floor"], ["ceil"]]),
      select("data", "numbers", Object.keys(blocks).map(name => [name])),
      label("value", "value of the element", value)),
    sentence, h("div", { class: "line-box" }, bars), readout,
    h("p", { class: "hint" }, "Bars: the numbers. Points: what is left. Thin lines: the numbers of the format at this "
      + "scale, or only its largest where there are many. Point at an element or reach it with the arrow keys, and type another number for it."));
  keepKeys(root);
  el.append(root);
  load();
  update();
  return redrawWhenResized(root, update);
}

function render(context) {
  return (context.model.get("data").kind === "block" ? renderBlock : renderCode)(context);
}

export default { render };
