// A line over the last two minutes, with its range as text.

const SHOWN = 120_000; // milliseconds
const GAP = 3000; // milliseconds between two points that are not joined
const WIDTH = 240;
const HEIGHT = 60;
const DESCRIBED = 5000; // milliseconds between two texts for those who do not see the chart

const format = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });

export class Chart {
  #points = [];
  #described = -Infinity;

  /** svg: with a path.area and a path.line. range: the element for the text of the range. name: of the values. */
  constructor(svg, range, name) {
    this.svg = svg;
    this.range = range;
    this.name = name;
  }

  /** Add a value at a time in milliseconds; null for none, which leaves a gap. */
  add(now, value) {
    this.#points.push({ now, value });
    while (this.#points[0].now < now - SHOWN) this.#points.shift();
    const values = this.#points.map((point) => point.value).filter((each) => each !== null);
    const most = Math.max(...values, 0);
    this.#draw(now, most || 1);
    const text = values.length ? `now ${value === null ? "none" : format(value)}, most ${format(most)}` : "none yet";
    this.range.textContent = text;
    if (now - this.#described >= DESCRIBED) {
      this.svg.setAttribute("aria-label", `${this.name} over the last two minutes: ${text}`);
      this.#described = now;
    }
  }

  #draw(now, most) {
    let [line, area, last] = ["", "", null];
    for (const point of this.#points) {
      if (point.value === null) {
        area += close(last);
        last = null;
        continue;
      }
      const x = (WIDTH * (1 - (now - point.now) / SHOWN)).toFixed(1);
      const y = (HEIGHT - 2 - (HEIGHT - 6) * (point.value / most)).toFixed(1);
      const joined = last !== null && point.now - last.now < GAP;
      if (!joined) area += `${close(last)}M${x} ${HEIGHT}L${x} ${y}`;
      else area += `L${x} ${y}`;
      line += `${joined ? "L" : "M"}${x} ${y}`;
      last = { now: point.now, x };
    }
    this.svg.querySelector(".line").setAttribute("d", line);
    this.svg.querySelector(".area").setAttribute("d", area + close(last));
  }
}

const close = (last) => (last === null ? "" : `L${last.x} ${HEIGHT}Z`);
