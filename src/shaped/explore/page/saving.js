// A picture as a file of its own, and texts for the clipboard. Both stay on this machine.

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "paint-order",
];
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** Colours as every program reads them: CSS mixes come as oklab. */
function plainColour(value) {
  if (!/^(oklab|oklch|color|lab|lch)\(/.test(value)) return value;
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = value;
  pixel.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pixel.getImageData(0, 0, 1, 1).data;
  return `rgb(${red}, ${green}, ${blue})`;
}

/** The picture in the light colours, with its styles written into it. */
export function writeSvg(svg, title) {
  const stage = document.createElement("div");
  stage.className = "for-saving";
  const copy = svg.cloneNode(true);
  copy.querySelector(".crosshair")?.remove();
  stage.append(copy);
  document.body.append(stage);
  for (const element of [copy, ...copy.querySelectorAll("*")]) {
    const styles = getComputedStyle(element);
    for (const name of STYLES) element.setAttribute(name, plainColour(styles.getPropertyValue(name)));
  }
  for (const element of [copy, ...copy.querySelectorAll("*")]) {
    element.removeAttribute("class");
    element.removeAttribute("style");
  }
  stage.remove();
  const [, , width, height] = copy.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("viewBox", `-8 -8 ${width + 16} ${height + 16}`);
  copy.setAttribute("width", width + 16);
  copy.setAttribute("height", height + 16);
  const ground = document.createElementNS(copy.namespaceURI, "rect");
  for (const [name, value] of Object.entries({ x: -8, y: -8, width: width + 16, height: height + 16, fill: "#fff" })) ground.setAttribute(name, value);
  const heading = document.createElementNS(copy.namespaceURI, "title");
  heading.textContent = title;
  copy.prepend(heading, ground);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(copy)}\n`;
}

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Copies a text, and says so on the button for a while. */
export async function copyFrom(button, text) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed by the browser";
  }
  setTimeout(() => (button.textContent = label), 1600);
}
