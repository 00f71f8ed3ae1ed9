// The sidebar: the theme, the search, and the heading that is being read. It is open beside a wide page and folded above
// a narrow one.
(() => {
  const box = document.querySelector(".toc"), contents = box.querySelector("details");
  const [input, button] = box.querySelector(".tools").children, found = box.querySelector(".found");
  box.querySelector(".tools").hidden = false;

  const system = matchMedia("(prefers-color-scheme: dark)");
  let theme = "system";
  try { theme = localStorage.getItem("tiles-theme") ?? theme; } catch { /* a page may be kept from storing anything */ }
  const paint = () => {
    const dark = theme === "dark" || (theme === "system" && system.matches);
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
    document.body.dataset.jpThemeLight = String(!dark);  // the views follow this mark of JupyterLab's
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = { system: "light", light: "dark", dark: "system" }[theme];
    try { localStorage.setItem("tiles-theme", theme); } catch { /* it then lasts for this page */ }
    paint();
  });
  system.addEventListener("change", paint);
  paint();

  let sections;  // [page, its title, anchor, heading, text] of all pages
  const load = () => sections ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    Object.assign(script, { src: "search.js", onload: () => resolve(window.tilesSections), onerror: reject });
    document.head.append(script);
  });
  const rank = (heading, text, words) => {  // 0 unless every word occurs; a word in the heading counts as ten
    const counts = words.map(word => 10 * heading.includes(word) + Math.min(text.split(word).length - 1, 9));
    return Math.min(...counts) && counts.reduce((sum, count) => sum + count);
  };
  const show = ([page, title, anchor, heading, text], word) => {
    const at = Math.max(text.toLowerCase().indexOf(word) - 40, 0), item = document.createElement("li");
    const link = Object.assign(document.createElement("a"), { href: `${page}.html#${anchor}`, textContent: heading });
    const note = `${heading === title ? "" : `${title}: `}… ${text.slice(at, at + 110)} …`;
    link.append(Object.assign(document.createElement("small"), { textContent: note }));
    item.append(link);
    return item;
  };
  input.addEventListener("input", async () => {
    const asked = input.value, words = asked.toLowerCase().split(/\s+/).filter(Boolean);
    const said = document.createElement("p"), list = document.createElement("ul");
    try {
      const ranked = (words.length ? await load() : []).map(section =>
        [rank(section[3].toLowerCase(), section[4].toLowerCase(), words), section]).filter(([score]) => score);
      list.append(...ranked.sort((a, b) => b[0] - a[0]).slice(0, 12).map(([, section]) => show(section, words[0])));
      said.textContent = `${ranked.length || "No"} section${ranked.length === 1 ? "" : "s"}${ranked.length > 12 ?
        "; the best 12" : ""}`;
    } catch { said.textContent = "The search needs the file search.js beside this page."; }
    if (asked === input.value) found.replaceChildren(...words.length ? [said, list] : []);
  });

  const links = [...contents.querySelectorAll('ul ul a[href^="#"]')];
  let headings = [];
  const wide = matchMedia("(min-width: 70rem)");
  const fold = () => { contents.open = wide.matches; };
  let current;
  const centre = link => { if (link && wide.matches) box.scrollTop = link.offsetTop - box.clientHeight / 2; };
  const mark = () => {
    const reading = links[headings.filter(heading => heading.getBoundingClientRect().top < 150).length - 1];
    if (reading === current) return;
    current?.removeAttribute("aria-current");
    reading?.setAttribute("aria-current", "location");
    current = reading;
    centre(reading);
  };
  contents.addEventListener("click", event => { if (event.target.closest("a") && !wide.matches) fold(); });
  wide.addEventListener("change", fold);
  addEventListener("scroll", mark, { passive: true });
  fold();
  centre(contents.querySelector('[aria-current="page"]'));
  const fade = box => box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
  const reach = () => {  // a box that scrolls is a stop of the Tab key, and fades out where it goes on
    for (const each of document.querySelectorAll(":is(main pre, .wide, .picture):not(.tiles-view *)")) {
      const image = each.matches(".picture") && each.querySelector("img"), full = each.hasAttribute("data-full");
      const reduced = image && (full || image.clientWidth < (image.getAttribute("width") || image.naturalWidth));
      each.toggleAttribute("data-reduced", Boolean(reduced));
      if (reduced || each.scrollWidth > each.clientWidth) each.tabIndex = 0; else each.removeAttribute("tabindex");
      fade(each);
    }
  };
  const enlarge = event => {
    const picture = event.target.closest?.(".picture[data-reduced]");
    if (!picture || event.type === "keydown" && event.key !== "Enter") return;
    picture.toggleAttribute("data-full");
    reach();
  };
  document.addEventListener("click", enlarge);
  document.addEventListener("keydown", enlarge);
  document.addEventListener("scroll", ({ target }) => target.matches?.(".wide, .picture") && fade(target),
    { capture: true, passive: true });
  addEventListener("resize", reach);
  addEventListener("load", reach);
  addEventListener("DOMContentLoaded", () => {  // this script stands before the headings
    headings = links.map(link => document.getElementById(link.getAttribute("href").slice(1)));
    mark();
  });
})();
