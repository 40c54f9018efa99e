// One tooltip for all help: shown under the pointer's or the keyboard's button, outside of what scrolls.

export function followTips(tip, host) {
  const show = ({ target }) => {
    const button = target.closest?.("[data-tip]");
    if (!button) return;
    tip.textContent = button.dataset.tip;
    tip.hidden = false;
    button.setAttribute("aria-describedby", tip.id);
    const place = button.getBoundingClientRect();
    const below = place.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, place.left - 12))}px`;
    tip.style.top = `${below ? place.bottom + 6 : place.top - tip.offsetHeight - 6}px`;
  };
  const hide = () => (tip.hidden = true);
  for (const event of ["pointerover", "focusin", "click"]) host.addEventListener(event, show);
  for (const event of ["pointerout", "focusout"]) host.addEventListener(event, hide);
  addEventListener("scroll", hide, { capture: true, passive: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
}
