// Scales, ticks and numbers: all that an axis needs.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const pen = document.createElement("canvas").getContext("2d");

export function measureText(text, size = 11) {
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(text).width;
}

function formatPower(exponent) {
  return `10${exponent < 0 ? "⁻" : ""}${[...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[digit]).join("")}`;
}

export function formatNumber(value, digits = 4) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (size >= 1e5 || size < 1e-3 * (1 - 1e-9)) {
    const [factor, exponent] = size.toExponential(Math.min(digits - 1, 2)).split("e");
    const power = formatPower(Number(exponent));
    return sign + (Number(factor) === 1 ? power : `${Number(factor)}·${power}`);
  }
  return sign + String(Number(size.toPrecision(digits)));
}

function findRange(values, positive) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value) || (positive && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : positive ? [0.1, 1] : [0, 1];
}

/** The values, and those of the others that make their range at most half as long again. */
export function withNear(values, others, axis) {
  const log = axis.scale === "log";
  const place = log ? Math.log : (value) => value;
  const [low, high] = findRange(values, log).map(place);
  const room = 0.5 * (high - low);
  return [...values, ...others.filter((each) => (!log || each > 0) && place(each) >= low - room && place(each) <= high + room)];
}

/** Maps values to pixels from `start` to `end`; ends that the axis does not give follow from the values, with room to spare. */
export function makeScale(axis, values, start, end) {
  const log = axis.scale === "log";
  const given = (value) => Number.isFinite(value) && (!log || value > 0);
  let [low, high] = findRange(values, log);
  const room = log ? Math.max(0.04 * Math.log(high / low), Math.log(2) / 2 - Math.log(high / low) / 2) : 0.05 * (high - low) || 0.05 * Math.abs(high) || 0.5;
  low = given(axis.low) ? axis.low : log ? low / Math.exp(room) : low - room;
  high = given(axis.high) ? axis.high : log ? high * Math.exp(room) : high + room;
  if (!(high > low)) high = log ? low * 2 : low + 1;
  const place = log ? Math.log : (value) => value;
  const [a, b] = [place(low), place(high)];
  const scale = (value) => start + ((place(value) - a) / (b - a)) * (end - start);
  scale.invert = (pixel) => {
    const inside = a + ((pixel - start) / (end - start)) * (b - a);
    return log ? Math.exp(inside) : inside;
  };
  return Object.assign(scale, { log, low, high, start, end, accepts: (value) => value !== null && Number.isFinite(value) && (!log || value > 0) });
}

function makeLinearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) {
    const value = index * step;
    const label = Math.abs(value) >= 1e5 || decimals > 4 ? formatNumber(value, 3) : value.toFixed(decimals).replace(/^-(?=.*[1-9])/, "−").replace("-", "");
    ticks.push({ value, label });
  }
  return ticks;
}

/** 0.01, 0.1, 1 on a short axis; 10⁻⁶, 10⁻³, 1 on a long one. */
function labelOnLog(value, long) {
  const exponent = Math.round(Math.log10(value));
  const isPower = Math.abs(value / 10 ** exponent - 1) < 1e-9;
  return isPower && long && exponent ? formatPower(exponent) : formatNumber(value, 1);
}

function makeLogTicks(low, high, factors, every = 1) {
  const long = low < 1e-3 || high >= 1e5;
  const ticks = [];
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.ceil(Math.log10(high)); exponent += 1) {
    if (exponent % every) continue;
    for (const factor of factors) {
      const value = factor * 10 ** exponent;
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) ticks.push({ value, label: labelOnLog(value, long) });
    }
  }
  return ticks;
}

/** From many ticks to few; the first whose labels do not touch is taken. */
function* listCandidates({ log, low, high }) {
  if (log && Math.log10(high / low) >= 0.7) {
    if (Math.log10(high / low) < 3) for (const factors of [[1, 2, 3, 5], [1, 2, 5], [1, 3]]) yield makeLogTicks(low, high, factors);
    for (const every of [1, 2, 3, 5, 10, 20, 50, 100]) yield makeLogTicks(low, high, [1], every);
  }
  for (let count = 8; count >= 1; count -= 1) yield makeLinearTicks(low, high, count);
}

/** Labelled ticks whose labels do not touch, and the positions of the small ones between them. */
export function makeTicks(scale, takenBy, gap) {
  const touches = (ticks) =>
    ticks.some((tick, index) => {
      if (index === 0) return false;
      const before = ticks[index - 1];
      return Math.abs(scale(tick.value) - scale(before.value)) < (takenBy(tick.label) + takenBy(before.label)) / 2 + gap;
    });
  let ticks = [];
  for (ticks of listCandidates(scale)) if (ticks.length > 1 && !touches(ticks)) break;
  const decades = Math.log10(scale.high / scale.low);
  const small = scale.log && decades >= 0.7 ? makeLogTicks(scale.low, scale.high, decades <= 6 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1]) : [];
  const labelled = new Set(ticks.map((tick) => tick.value));
  return { ticks, minor: small.map((tick) => tick.value).filter((value) => !labelled.has(value)) };
}
