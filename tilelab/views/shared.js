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

// Keep keys that the view handles from the notebook behind it, where "b" inserts a cell and "x" cuts one.
function keepKeys(element) {
  for (const type of ["keydown", "keypress", "keyup"]) element.addEventListener(type, event => event.stopPropagation());
  // JupyterLab reads this attribute: the keys of an element that has it are not its commands.
  element.setAttribute("data-lm-suppress-shortcuts", "true");
}
