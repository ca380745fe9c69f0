"use strict";
(() => {
  for (const select of document.querySelectorAll("select[data-chooses]")) {
    const choices = document.querySelectorAll(`[data-choice="${select.dataset.chooses}"]`);
    const show = () => choices.forEach((choice, index) => { choice.hidden = index !== Number(select.value); });
    select.addEventListener("change", show);
    show();
  }
  const tip = document.getElementById("tip");
  const point = (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = target === null;
    if (target === null) return;
    tip.textContent = target.dataset.tip;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, room))}px`;
    const above = event.clientY - tip.offsetHeight - 12;
    tip.style.top = `${above > 4 ? above : event.clientY + 16}px`;
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
