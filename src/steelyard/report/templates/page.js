
"use strict";
// Opens what a link points at, and adds the button that opens and closes all. The page needs neither to be read.
(() => {
  const reveal = () => {
    let id = "";
    try { id = decodeURIComponent(location.hash.slice(1)); } catch { return; }
    const target = id && document.getElementById(id);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  const button = document.getElementById("open-all");
  if (!button) return;
  button.hidden = false;
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-pressed") !== "true";
    for (const one of document.querySelectorAll("details")) one.open = open;
    button.setAttribute("aria-pressed", String(open));
    button.textContent = open ? button.dataset.close : button.dataset.open;
  });
})();
