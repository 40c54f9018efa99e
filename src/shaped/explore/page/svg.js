// Elements of a picture. Text is set as text, never as markup.

const SPACE = "http://www.w3.org/2000/svg";
const ROLES = new Set(["sde", "network", "shaped", "unshaped", "preln", "postln", "tokens", "query", "value", "bound", "here"]);

export function add(parent, name, attributes = {}, text = null) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, typeof value === "number" ? Math.round(value * 100) / 100 : value);
  if (text !== null) element.textContent = text;
  parent?.append(element);
  return element;
}

/** The class that gives a series its colour and dash. */
export function nameRole(role) {
  return ROLES.has(role) ? `role-${role}` : "role-other";
}
