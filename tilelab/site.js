// The table of contents: open beside a wide page, folded above a narrow one, with the heading that is being read marked.
(() => {
  const contents = document.querySelector(".toc details");
  const links = [...contents.querySelectorAll("a")];
  let headings = [];
  const wide = matchMedia("(min-width: 70rem)");
  const fold = () => { contents.open = wide.matches; };
  const mark = () => {
    const passed = headings.filter(heading => heading.getBoundingClientRect().top < 150).length;
    links.forEach((link, place) => {
      if (place === passed - 1) link.setAttribute("aria-current", "location");
      else link.removeAttribute("aria-current");
    });
  };
  contents.addEventListener("click", event => { if (event.target.closest("a") && !wide.matches) fold(); });
  wide.addEventListener("change", fold);
  addEventListener("scroll", mark, { passive: true });
  fold();
  addEventListener("DOMContentLoaded", () => {  // this script stands before the headings
    headings = links.map(link => document.getElementById(link.getAttribute("href").slice(1)));
    mark();
  });
})();
