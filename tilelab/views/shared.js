// What every view uses. This file stands before the view's own in one module: top-level names here are common to both.

const SVG = "http://www.w3.org/2000/svg";

// Make an element: h("button", { class: "run", onclick: start, title: "R" }, "Run", icon).
// The names of SVG elements start with "svg:". A property that is false or null is left out.
function h(tag, properties = {}, ...children) {
  const svg = tag.startsWith("svg:");
  const element = svg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

// Keep keys that the view handles from the notebook behind it, where "b" inserts a cell and "x" cuts one. Combinations
// with ctrl or cmd, such as ctrl+S, go on to the notebook; those with alt as well are letters of some keyboards.
function keepKeys(element) {
  const isCommand = event => (event.ctrlKey || event.metaKey) && !event.altKey;
  for (const type of ["keydown", "keypress", "keyup"]) {
    element.addEventListener(type, event => isCommand(event) || event.stopPropagation());
  }
  // JupyterLab reads this attribute: the keys of an element that has it are not its commands. It looks when an event
  // comes down to the document, and only the window hears of the event before; one listener there serves all views.
  const attribute = "data-lm-suppress-shortcuts";
  element.setAttribute(attribute, "true");
  element.classList.add("tiles-keeps-keys");
  if (window.tilesKeepKeys) return;
  window.tilesKeepKeys = event => {
    const views = document.querySelectorAll(".tiles-keeps-keys");
    for (const view of views) view.toggleAttribute(attribute, !isCommand(event));
  };
  window.addEventListener("keydown", window.tilesKeepKeys, true);
}

// Make a toolbar one Tab stop: arrows move between its buttons.
function moveWithArrows(tools, buttons) {
  buttons.forEach((one, at) => { one.tabIndex = at ? -1 : 0; });
  tools.addEventListener("keydown", event => {
    const at = buttons.indexOf(event.target), move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (at < 0 || !move) return;
    event.preventDefault();
    const next = buttons[(at + move + buttons.length) % buttons.length];
    buttons.forEach(one => { one.tabIndex = one === next ? 0 : -1; });
    next.focus();
  });
}

// Return functions that make labelled fields of `state`; select and number call `update(name)` after a change.
function makeFields(state, update) {
  const controls = {}, id = `tiles-field-${Math.random().toString(36).slice(2)}`; // a page may have several views
  const change = (name, value) => { state[name] = value; update(name); };
  const label = (name, text, control) => {
    control.id = `${id}-${name}`;
    controls[name] = control;
    return h("label", { for: control.id }, h("span", {}, text), control);
  };
  const select = (name, text, options) => {
    const menu = h("select", { onchange: () => change(name, menu.value) },
      options.map(([value, shown = value]) => h("option", { value }, shown)));
    menu.value = String(state[name]);
    return label(name, text, menu);
  };
  const number = (name, text, min, max, optional = false) => {
    const input = h("input", { type: "number", min, max, value: state[name] });
    input.addEventListener("input", () => {
      const value = input.valueAsNumber;
      if (Number.isInteger(value) && value >= min && value <= max) change(name, value);
      else if (optional && input.value === "") change(name, "");
    });
    input.addEventListener("change", () => { input.value = state[name]; });
    return label(name, text, input);
  };
  return { id, controls, label, select, number };
}

// Copy a text, and say so on the button for a moment.
async function copyText(text, button, root) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page without a secure address has no clipboard of its own
    const area = h("textarea", { style: "position: fixed; opacity: 0" });
    area.value = text;
    root.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.dataset.label ??= button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}
