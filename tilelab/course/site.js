// The table of contents: open beside a wide page, folded above a narrow one, with the heading that is being read marked.
(() => {
  const contents = document.querySelector(".toc details");
  const links = [...contents.querySelectorAll("a")];
  let headings = [];
  const wide = matchMedia("(min-width: 70rem)");
  const fold = () => { contents.open = wide.matches; };
  const box = contents.closest(".toc");  // it scrolls where the contents are longer than the window is high
  let current;
  const mark = () => {
    const reading = links[headings.filter(heading => heading.getBoundingClientRect().top < 150).length - 1];
    if (reading === current) return;
    current?.removeAttribute("aria-current");
    reading?.setAttribute("aria-current", "location");
    current = reading;
    if (reading && wide.matches) box.scrollTop = reading.offsetTop - box.clientHeight / 2;
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
