// Step through the states of a mechanism: forwards, backwards, by key, or by play. tilelab/views/mechanisms.py computes
// the states and describes the drawing.

function render({ model, el }) {
  const { title, legend, panels, steps } = model.get("data");
  let at = 0, timer = null;

  const button = (label, name, onclick) => h("button", { type: "button", title: name, "aria-label": name, onclick }, label);
  const play = button("Play", "Play or pause (Space)", () => togglePlay());
  const buttons = [button("‹ Step", "Previous step (← or P)", () => go(at - 1)), button("Step ›", "Next step (→ or N)", () => go(at + 1)),
    button("First", "First step (Home)", () => go(0)), play];
  const count = h("span", { class: "count" }), sentence = h("p", { class: "sentence", "aria-live": "polite" });
  const shapes = panels.map(panel => panel.shapes.map(shape => h(`svg:${shape.tag}`)));
  const pictures = panels.map((panel, p) => h("svg:svg", { role: "img", viewBox: `0 0 ${panel.width} ${panel.height}`,
    style: `--wide: ${panel.width}px` }, shapes[p]));
  const plots = h("div", { class: "plots", tabindex: 0, role: "application", "aria-roledescription": "diagram in steps",
    "aria-label": `${title}. Left and right go from step to step, Home and End to the first and the last, Space plays.` }, pictures);
  const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Steps" }, buttons, count);
  const root = h("div", { class: "tiles-view tiles-stepper", role: "group", "aria-label": title },
    h("p", { class: "head" }, h("strong", {}, title)), tools, sentence, plots,
    h("p", { class: "legend" }, legend.map(([colour, words]) => h("span", {}, h("i", { style: `background: var(--${colour})` }), words))),
    h("p", { class: "keys" }, "← → or P and N go from step to step, Home and End to the first and the last, Space plays. What a step changes is underlined."));
  el.append(root);
  keepKeys(root);
  moveWithArrows(tools, buttons);

  // The attributes of all shapes after the changes of the steps up to this one.
  function collect(step) {
    const all = panels.map(panel => panel.shapes.map(shape => ({ ...shape })));
    for (const { changes } of steps.slice(0, step + 1)) for (const [p, s, values] of changes) Object.assign(all[p][s], values);
    return all;
  }

  function go(step) {
    at = Math.max(0, Math.min(steps.length - 1, step));
    if (at === steps.length - 1) stop();
    collect(at).forEach((panel, p) => {
      panel.forEach(({ tag, text, ...attributes }, s) => {
        const element = shapes[p][s];
        for (const [name, value] of Object.entries(attributes))
          element.setAttribute(name, ["fill", "stroke"].includes(name) && value !== "none" ? `var(--${value})` : value);
        if (tag === "text") element.textContent = text;
        const changed = steps[at].changes.some(([q, r, values]) => q === p && r === s && values.text);
        element.setAttribute("class", changed ? "changed" : "");
      });
      pictures[p].setAttribute("aria-label", `${panels[p].name}: ${panel.map(shape => shape.text).filter(Boolean).join("; ")}`);
    });
    count.textContent = `step ${at} of ${steps.length - 1}`;
    sentence.textContent = steps[at].say;
    root.dataset.step = at;
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  function togglePlay() {
    if (timer) { stop(); return; }
    go(at === steps.length - 1 ? 0 : at + 1);
    timer = setInterval(() => go(at + 1), 1800);
    play.textContent = "Pause";
  }

  plots.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = { ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), p: () => go(at - 1), n: () => go(at + 1),
      Home: () => go(0), End: () => go(steps.length - 1), " ": togglePlay };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });

  go(0);
  return stop;
}

export default { render };
