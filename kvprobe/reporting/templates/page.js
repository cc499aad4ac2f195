// Draws the charts of the page from the JSON beside it, and lets tables be sorted. No library, no network.
//
// kinds of chart (see reporting/charts.py for who makes them):
//   timeline   x: {unit, span, label}, y: {unit, scale, label, max?}, series: [{name, style, t0, dt, hi, lo} |
//              {name, style, t, v, label?}], marks: [{t, label}], spans: [{a, b, label, hot}], levels: [{v, label}]
//   histogram  unit, edges, open: the last bucket has no end, series: [{name, style, counts}], marks: [{v, label}]
//   heat       x: {unit, span}, dt, edges, open, unit, cells: [column, row, count, ...]
//   bars       unit, parts: [names], rows: [{label, values}]
(() => {
  "use strict";
  const NS = "http://www.w3.org/2000/svg";
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
  const clamp = (v, a, b) => Math.min(Math.max(v, a), b);

  function svg(name, attributes = {}, parent = null, text = null) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  function html(name, attributes = {}, parent = null, text = null) {
    const node = document.createElement(name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  // ---- numbers ----
  const group = (v, digits) => v.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  function three(v) {
    const size = Math.abs(v);
    if (size === 0) return "0";
    return group(v, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
  }
  const TIMES = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
  const RATES = [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]];
  function show(unit, v) {
    if (v === null || v === undefined || !isFinite(v)) return "–";
    const scales = { ns: TIMES, bytes: SIZES, rate: RATES }[unit];
    if (!scales) return unit === "share" ? `${three(v * 100)}%` : group(v, Number.isInteger(v) ? 0 : 1);
    const [scale, name] = scales.find(([s]) => Math.abs(v) >= s * 0.9995) || scales[scales.length - 1];
    return `${three(v / scale)}\u00a0${name}`;
  }
  // Ticks of one axis share a unit and a number of decimals, chosen by the step, so that zoomed labels still differ.
  function linearTicks(unit, low, high, wanted) {
    const scales = { ns: TIMES, bytes: SIZES, rate: RATES }[unit];
    const top = Math.max(Math.abs(low), Math.abs(high));
    const [scale, name] = scales ? scales.find(([s]) => top >= s) || scales[scales.length - 1] : [1, ""];
    const raw = (high - low) / Math.max(wanted, 1) / scale;
    const power = 10 ** Math.floor(Math.log10(raw || 1));
    let step = power * ([1, 2, 5, 10].find((m) => m * power >= raw * 0.999) || 10);
    if (unit === "count" && step < 1) step = 1;
    const decimals = clamp(-Math.floor(Math.log10(step) + 1e-9), 0, 9);
    const ticks = [];
    for (let i = Math.ceil(low / scale / step - 1e-9); i * step <= high / scale + step * 1e-6; i++)
      ticks.push([i * step * scale, group(i * step || 0, decimals) + (name ? `\u00a0${name}` : "")]);
    return ticks;
  }
  function logTicks(unit, low, high, room) {
    const ticks = [];
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const decades = Math.log10(high / low);
    const steps = decades < room / 2.5 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / Math.max(room, 1)));
    for (let e = from; e <= to; e++)
      for (const m of steps) {
        const v = m * 10 ** e;
        if (v >= low * 0.999 && v <= high * 1.001) ticks.push([v, m !== 1 || (e - from) % every === 0 ? show(unit, v).replace(/\.0+(?=\D)/, "") : ""]);
      }
    return ticks;
  }

  // Durations of buckets on a logarithmic axis: the bucket of 0 ns stands left of 1 ns.
  const logOf = (v) => Math.log(Math.max(v, 0.5));
  const bucketTicks = (unit, edges, room) =>
    logTicks(unit, Math.max(edges[0], 0.5), edges[edges.length - 1], room).map(([v, text]) => [v, v < 1 ? show(unit, 0) : text]);

  const bucketText = ({ unit, edges, open }, i) =>
    show(unit, edges[i]) + (open && i === edges.length - 2 ? " or longer" : ` to ${show(unit, edges[i + 1])}`);

  const glyphs = [ // a shape a style, drawn around x, y
    (x, y) => `M${x - 2.5} ${y}a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0`,
    (x, y) => `M${x - 2.5} ${y - 2.5}l5 5m0 -5l-5 5`,
    (x, y) => `M${x} ${y - 3}l3 5.2h-6z`,
    (x, y) => `M${x - 2.4} ${y - 2.4}h4.8v4.8h-4.8z`,
    (x, y) => `M${x} ${y - 3.4}l3.4 3.4l-3.4 3.4l-3.4 -3.4z`,
    (x, y) => `M${x - 3} ${y}h6m-3 -3v6`,
  ];
  const fillOf = (style) => (style === 0 ? { class: `f0` } : { fill: `url(#pattern${style % 6})` });

  const PAPER = 680, PHONE = 560; // px: what a sheet of A4 holds between its margins; as wide as page.css says narrow is
  const STYLES = ["f0", "f1", "f2", "f3", "f4", "f5", "range", "idle", "copying", "memory"]; // of a timeline; see reporting/lanes.py
  const linked = new Map(); // group of charts that share one x range
  const all = [];

  class Plot {
    constructor(figure, spec) {
      Object.assign(this, { figure, spec, hidden: new Set(), cursor: null, drag: null, pinch: null, touches: new Map() });
      this.host = $(".plot", figure);
      this.readout = $(".readout", figure);
      this.strip = $(".strip", figure);
      this.zoomable = spec.kind === "timeline" || spec.kind === "heat" || spec.kind === "rows";
      this.full = [0, (spec.x && spec.x.span) || 1];
      if (spec.x && spec.x.from) this.full = [spec.x.from, spec.x.from + spec.x.span];
      this.range = [...this.full];
      if (spec.group) {
        if (!linked.has(spec.group)) linked.set(spec.group, []);
        linked.get(spec.group).push(this);
      }
      this.legend();
      if (this.zoomable) this.tools();
      this.listen();
    }

    // ---- controls ----
    legend() {
      const { spec } = this;
      if (spec.kind === "heat") {
        const box = html("div", { class: "shades" }, this.strip);
        html("span", {}, box, "1 call");
        const bar = svg("svg", { viewBox: "0 0 112 12", "aria-hidden": "true" }, box);
        for (let i = 0; i < 7; i++) svg("rect", { x: i * 16, width: 16, height: 12, class: `h${i}` }, bar);
        html("span", {}, box, `${group(spec.most, 0)} calls in a cell`);
        return;
      }
      const rows = spec.kind === "rows";
      const names = spec.kind === "bars" ? spec.parts.map((name, i) => ({ name, style: i }))
        : rows ? (spec.styles || []).map(([style, name]) => ({ name, style })) : spec.series;
      if (!names || (names.length < 2 && spec.kind !== "timeline")) return;
      const list = html("ul", { class: "legend" }, this.strip);
      names.forEach((series, i) => {
        const item = html("li", {}, list);
        const button = html("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, item), part = rows ? series.style : i;
        const sample = svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, button);
        if (rows) svg("rect", { x: 1, y: 1, width: 28, height: 10, class: STYLES[series.style] }, sample);
        else if (spec.kind === "bars" || spec.kind === "histogram")
          svg("rect", { x: 1, y: 1, width: 28, height: 10, ...fillOf(series.style) }, sample);
        else if (series.t && !series.line) svg("path", { d: glyphs[series.style % 6](15, 6), class: `l p l${series.style % 6}` }, sample);
        else svg("path", { d: "M1 6H29", class: `l l${series.style % 6}` }, sample);
        button.append(series.name);
        button.addEventListener("click", () => {
          this.hidden.has(part) ? this.hidden.delete(part) : this.hidden.add(part);
          button.setAttribute("aria-pressed", String(!this.hidden.has(part)));
          this.draw();
        });
      });
    }
    tools() {
      const bar = html("div", { class: "tools", role: "group", "aria-label": "Zoom" }, this.strip);
      const add = (text, label, act) => {
        const button = html("button", { type: "button", "aria-label": label, title: label }, bar, text);
        button.addEventListener("click", act);
        return button;
      };
      this.outButton = add("−", "Zoom out", () => this.zoom(2));
      add("+", "Zoom in", () => this.zoom(0.5));
      this.resetButton = add("All", "Show everything", () => this.show(this.full));
    }
    listen() {
      const { host } = this;
      host.addEventListener("keydown", (event) => this.key(event));
      host.addEventListener("pointermove", (event) => this.move(event));
      host.addEventListener("pointerleave", () => { if (!this.drag && !this.touches.size) this.point(null); });
      if (!this.zoomable) return;
      host.classList.add("zoomable");
      host.addEventListener("pointerdown", (event) => this.down(event));
      for (const end of ["pointerup", "pointercancel"]) host.addEventListener(end, (event) => this.up(event));
      host.addEventListener("dblclick", () => this.show(this.full));
      host.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // plain scrolling stays the page's
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event));
      }, { passive: false });
    }
    show([a, b]) {
      const [low, high] = this.full;
      const least = Math.max((high - low) / 1e6, this.spec.x.unit === "ns" ? 100 : 2);
      const width = clamp(b - a, Math.min(least, high - low), high - low);
      a = clamp((a + b - width) / 2, low, high - width);
      const peers = (this.spec.group && linked.get(this.spec.group)) || [this];
      for (const plot of peers) { plot.range = [a, a + width]; if (plot.drawn || plot === this) plot.draw(); }
      peers.find((plot) => plot.remember)?.remember();
    }
    zoom(factor, around = null) {
      const [a, b] = this.range;
      const middle = around ?? (this.cursor !== null && this.cursor >= a && this.cursor <= b ? this.cursor : (a + b) / 2);
      this.show([middle - (middle - a) * factor, middle + (b - middle) * factor]);
      this.say();
    }
    pan(share) {
      const [a, b] = this.range, by = (b - a) * share;
      const [low, high] = this.full, move = clamp(by, low - a, high - b);
      this.show([a + move, b + move]);
    }
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const act = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "_": () => this.zoom(2),
        "0": () => this.show(this.full), Escape: () => { this.show(this.full); this.point(null); },
        Home: () => this.step(-Infinity), End: () => this.step(Infinity),
      }[event.key];
      if (steps) event.shiftKey && this.zoomable ? this.pan(steps * 0.25) : this.step(steps);
      else if (act && (this.zoomable || event.key === "Home" || event.key === "End")) act();
      else return;
      event.preventDefault();
    }
    step(by) {
      const [a, b] = this.range, unit = (b - a) / 100;
      const now = this.cursor === null ? (by > 0 ? a : b) : this.cursor;
      this.point(by === -Infinity ? a : by === Infinity ? b : clamp(now + by * unit, a, b));
    }
    at(event) {
      if (!this.drawn) this.draw();
      const box = this.host.querySelector("svg").getBoundingClientRect();
      const x = clamp((event.clientX - box.left - this.left) / this.inner, 0, 1);
      return this.range[0] + x * (this.range[1] - this.range[0]);
    }
    down(event) {
      if (event.pointerType === "mouse" && event.button !== 0) return;
      this.touches.set(event.pointerId, this.at(event));
      if (event.pointerType === "mouse") {
        this.drag = this.at(event);
        this.host.setPointerCapture(event.pointerId);
      } else if (this.touches.size === 2) this.pinch = [...this.touches.values()];
    }
    move(event) {
      if (!this.inner) return;
      const here = this.at(event);
      if (this.pinch && this.touches.has(event.pointerId)) {
        const box = this.host.getBoundingClientRect();
        this.touches.set(event.pointerId, here);
        this.screen = this.screen || new Map();
        this.screen.set(event.pointerId, event.clientX - box.left);
        if (this.screen.size === 2) {
          const [p, q] = [...this.screen.values()], [s, t] = this.pinch;
          const width = Math.abs(t - s) * this.inner / Math.max(Math.abs(q - p), 20);
          const middle = (s + t) / 2, share = clamp(((p + q) / 2 - this.left) / this.inner, 0, 1);
          this.show([middle - width * share, middle + width * (1 - share)]);
        }
        return;
      }
      this.point(here);
      if (this.drag !== null) this.brush(this.drag, here);
    }
    up(event) {
      this.touches.delete(event.pointerId);
      if (this.touches.size < 2) { this.pinch = null; this.screen = null; }
      if (this.drag === null) return;
      const from = this.drag, to = this.at(event);
      this.drag = null;
      this.brush(null);
      if (event.type === "pointerup" && Math.abs(to - from) > (this.range[1] - this.range[0]) * 0.01)
        this.show([Math.min(from, to), Math.max(from, to)]);
    }
    brush(a, b) {
      if (a === null) { this.brushed.removeAttribute("d"); return; }
      const [p, q] = [this.X(Math.min(a, b)), this.X(Math.max(a, b))];
      this.brushed.setAttribute("d", `M${p} ${this.top}H${q}V${this.base}H${p}Z`);
    }
    say() {
      const unit = this.spec.x.unit;
      this.readout.textContent = `${show(unit, this.range[0])} to ${show(unit, this.range[1])}`;
    }

    // ---- drawing ----
    tall(narrow) {
      const { spec } = this;
      return spec.kind === "bars" ? spec.rows.length * 44 + 44 : spec.kind === "rows" ? spec.rows.length * this.row(narrow).pitch + 34 : Math.round((spec.height || 250) * (narrow ? 0.84 : 1));
    }
    reserve() { this.host.style.minHeight = `${this.tall(innerWidth < 520)}px`; } // so that what is below stays where it is
    draw(wide = this.host.clientWidth - 12) {
      const width = Math.max(wide, 240);
      const narrow = width < 480;
      const spec = this.spec;
      const height = this.tall(narrow);
      this.drawn = true;
      this.host.style.minHeight = "";
      const named = (spec.spans || []).some((span) => span.label);
      Object.assign(this, { width, height, narrow, left: narrow ? 50 : 62, top: named ? 38 : 20, base: height - 26 });
      if (spec.kind === "bars") this.left = 4;
      if (spec.kind === "rows") this.left = 8;
      const peers = (spec.group && linked.get(spec.group)) || [this]; // what shares an axis begins at the same place
      this.left = Math.max(this.left, ...peers.map((plot) => plot.column(width, narrow)));
      this.inner = width - this.left - 8;
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
      this.root = root;
      if (this.zoomable) {
        const clip = `clip-${this.figure.dataset.chart}`;
        svg("rect", { x: this.left, y: 0, width: this.inner, height }, svg("clipPath", { id: clip }, svg("defs", {}, root)));
        this.clip = { "clip-path": `url(#${clip})` };
      }
      this[spec.kind](root);
      if (spec.kind !== "bars") {
        this.brushed = svg("path", { class: "brush" }, root);
        this.line = svg("path", { class: "cursor" }, root);
      }
      this.host.replaceChildren(root);
      this.fit();
      if (this.resetButton) {
        const whole = this.range[0] <= this.full[0] && this.range[1] >= this.full[1];
        this.resetButton.disabled = this.outButton.disabled = whole;
      }
      if (this.cursor !== null) this.point(this.cursor);
    }
    // Text stays inside the drawing and off the text of a level: it is moved, and cut (its whole in a tooltip) where it is too long.
    fit() {
      const texts = [...this.root.querySelectorAll("text")].map((node) => ({ node, box: node.getBBox() }));
      const levels = texts.filter(({ node }) => node.matches(".halo:not(.strong)")).map(({ box }) => box);
      for (const { node, box } of texts) {
        if (!box.width) continue; // folded away: drawn again when it opens
        const pair = this.spec.kind === "bars" && texts.find((one) => one.node !== node && Math.abs(one.box.y - box.y) < 4 && one.box.x > box.x);
        const room = (pair ? pair.box.x - 8 - box.x : this.width - 2), whole = node.textContent;
        let long = box.width;
        if (long > room && room > 0) {
          node.textContent = `${whole.slice(0, Math.max(Math.floor((whole.length * room) / long) - 2, 1))}…`;
          svg("title", {}, node, whole);
          long = node.getComputedTextLength();
        }
        const x = Number(node.getAttribute("x")), anchor = node.getAttribute("text-anchor");
        const from = anchor === "end" ? x - long : anchor === "middle" ? x - long / 2 : x;
        const to = clamp(from, 1, Math.max(this.width - 1 - long, 1));
        if (Math.abs(to - from) > 0.5) node.setAttribute("x", x + to - from);
        if (node.matches(".halo.strong") && levels.some((one) => one.x < to + long && one.x + one.width > to && Math.abs(one.y - box.y) < 13))
          node.setAttribute("y", Number(node.getAttribute("y")) + 16);
      }
    }
    X(v) { return this.left + ((v - this.range[0]) / (this.range[1] - this.range[0])) * this.inner; }
    axes(root, yTicks, xTicks, label) {
      for (const [v, text] of yTicks) {
        const y = Math.round(this.Y(v)) + 0.5;
        svg("path", { class: "grid", d: `M${this.left} ${y}H${this.left + this.inner}` }, root);
        if (text) svg("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, root, text);
      }
      svg("path", { class: "axis", d: `M${this.left} ${this.base + 0.5}H${this.left + this.inner}` }, root);
      let last = -Infinity;
      for (const [v, text] of xTicks) {
        const x = this.X(v);
        if (x < this.left - 1 || x > this.left + this.inner + 1 || !text) continue;
        const half = text.length * 3.3;
        if (x - half < last + 8) continue;
        const edge = x + half > this.width ? "end" : x - half < this.left - 30 ? "start" : "middle";
        last = x + half;
        svg("path", { class: "axis", d: `M${x} ${this.base}v4` }, root);
        svg("text", { x: edge === "end" ? this.width : x, y: this.base + 18, "text-anchor": edge }, root, text);
      }
      if (label) svg("text", { x: this.left, y: 11, class: "axislabel" }, root, label);
    }
    yDomain() {
      const { spec } = this;
      let low = Infinity, high = -Infinity;
      const take = (v) => { if (v !== null && v > (spec.y.scale === "log" ? 0 : -Infinity)) { if (v < low) low = v; if (v > high) high = v; } };
      spec.series.forEach((s, i) => {
        if (this.hidden.has(i)) return;
        if (s.t) s.v.forEach(take); else { s.hi.forEach(take); (s.lo || []).forEach(take); }
      });
      for (const level of spec.levels || []) take(level.v);
      if (!isFinite(low)) [low, high] = [1, 10];
      if (spec.y.scale === "log") {
        low = low * 0.7; high = high * 1.5;
        if (high / low < 20) { low = low / 2; high = high * 2; }
        return [low, high];
      }
      return [Math.min(0, low), high <= 0 ? 1 : high * 1.1];
    }
    timeline(root) {
      const { spec, top, base } = this, [low, high] = this.yDomain(), log = spec.y.scale === "log";
      this.Y = log
        ? (v) => base - (Math.log(clamp(v, low, high) / low) / Math.log(high / low)) * (base - top)
        : (v) => base - ((v - low) / (high - low)) * (base - top);
      const [a, b] = this.range;
      for (const span of spec.spans || []) {
        const p = Math.max(this.X(span.a), this.left), q = Math.min(this.X(span.b), this.left + this.inner);
        if (q <= p) continue;
        svg("rect", { class: span.hot ? "span hot" : "span", x: p, y: top, width: Math.max(q - p, 1), height: base - top }, root);
        if (!span.label) continue;
        svg("path", { class: "level solid", d: `M${p + 1} ${top}V${top - 5}H${q - 1}V${top}` }, root);
        if (q - p > span.label.length * 6.5) svg("text", { x: p + 3, y: top - 9 }, root, span.label);
      }
      const yTicks = log ? logTicks(spec.y.unit, low, high, (base - top) / 30) : linearTicks(spec.y.unit, low, high, (base - top) / 42);
      this.axes(root, yTicks, linearTicks(spec.x.unit, a, b, this.inner / 92), this.narrow ? spec.y.short || spec.y.label : spec.y.label);
      if (spec.x.label) {
        const beside = (spec.x.label.length + spec.y.label.length + 12) * 6.2 < this.inner; // else below the other label
        svg("text", { x: this.left + this.inner, y: beside ? 11 : top + 8, class: "axislabel halo", "text-anchor": "end" }, root, `across: ${spec.x.label}`);
      }
      for (const level of spec.levels || []) {
        const y = Math.round(this.Y(level.v)) + 0.5;
        svg("path", { class: "level", d: `M${this.left} ${y}H${this.left + this.inner}` }, root);
      }
      const layer = svg("g", this.clip, root);
      spec.series.forEach((s, i) => { if (!this.hidden.has(i)) s.t ? this.points(layer, s) : this.steps(layer, s); });
      for (const level of spec.levels || []) {
        const y = Math.round(this.Y(level.v));
        svg("text", { x: this.left + this.inner - 4, y: y < top + 14 ? y + 14 : y - 5, "text-anchor": "end", class: "halo" }, root, level.label);
      }
      const seen = [];
      for (const mark of spec.marks || []) {
        const x = this.X(mark.t);
        if (x < this.left - 1 || x > this.left + this.inner + 1) continue;
        svg("path", { class: "markline", d: `M${x} ${top}V${base}` }, root);
        svg("path", { class: "tip", d: `M${x - 5} ${top - 3}h10l-5 7z` }, root);
        const right = x > this.left + this.inner * 0.6;
        const row = seen.filter((other) => Math.abs(other - x) < mark.label.length * 7).length;
        seen.push(x);
        if (row < 5) svg("text", { x: x + (right ? -9 : 9), y: top + 13 + row * 15, "text-anchor": right ? "end" : "start", class: "halo strong" }, root, mark.label);
      }
    }
    // One step a bin; bins narrower than a pixel are merged by their maximum.
    steps(layer, s) {
      const [a, b] = this.range, n = s.hi.length;
      const from = clamp(Math.floor((a - s.t0) / s.dt), 0, n), to = clamp(Math.ceil((b - s.t0) / s.dt), 0, n);
      const merge = Math.max(1, Math.floor((to - from) / (this.inner * 0.75)));
      let line = "", band = "", joined = false, lows = [];
      const close = () => { if (lows.length) band += lows.reverse().join("") + "Z"; lows = []; joined = false; };
      for (let i = from - (from % merge); i < to; i += merge) {
        let hi = null, lo = null;
        for (let j = i; j < Math.min(i + merge, n); j++) {
          if (s.hi[j] === null) continue;
          if (hi === null || s.hi[j] > hi) hi = s.hi[j];
          if (s.lo && (lo === null || s.lo[j] < lo)) lo = s.lo[j];
        }
        if (hi === null) { close(); continue; }
        const x = this.X(s.t0 + i * s.dt), x2 = Math.max(this.X(s.t0 + Math.min(i + merge, n) * s.dt), x + 1.5), y = this.Y(hi);
        line += `${joined ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}H${x2.toFixed(1)}`;
        if (s.lo) {
          const y0 = this.Y(lo).toFixed(1);
          band += `${lows.length ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}H${x2.toFixed(1)}`;
          lows.push(`L${x2.toFixed(1)} ${y0}H${x.toFixed(1)}`);
        }
        joined = true;
      }
      close();
      if (band) svg("path", { class: `b f${s.style % 6}`, d: band }, layer);
      svg("path", { class: `l l${s.style % 6}`, d: line }, layer);
    }
    points(layer, s) {
      const [a, b] = this.range;
      let d = "";
      if (s.line) {
        for (let i = 0; i < s.t.length; i++) d += `${i ? "L" : "M"}${this.X(s.t[i]).toFixed(1)} ${this.Y(s.v[i]).toFixed(1)}`;
        svg("path", { class: `l l${s.style % 6}`, d }, layer);
        d = "";
        if (s.t.length > 60) return;
      }
      if (s.close) { // single calls over millions: only where they can be told apart
        let many = 0;
        for (let i = 0; i < s.t.length; i++) if (s.t[i] >= a && s.t[i] <= b) many++;
        if (many > 160) return;
      }
      for (let i = 0; i < s.t.length; i++)
        if (s.t[i] >= a && s.t[i] <= b) d += glyphs[s.style % 6](this.X(s.t[i]), this.Y(s.v[i]));
      svg("path", { class: `l p l${s.style % 6}`, d }, layer);
    }
    histogram(root) {
      const { spec, base, top } = this, edges = spec.edges;
      const low = logOf(edges[0]), high = logOf(edges[edges.length - 1]);
      this.range = this.full = [0, 1];
      const place = (v) => (logOf(v) - low) / (high - low);
      this.place = place;
      let most = 1;
      spec.series.forEach((s, i) => { if (!this.hidden.has(i)) most = Math.max(most, ...s.counts); });
      const ceiling = Math.log10(most * 1.6) + 0.3;
      this.Y = (count) => base - ((count > 0 ? Math.log10(count) + 0.3 : 0) / ceiling) * (base - top);
      const yTicks = [];
      for (let e = 0; 10 ** e <= most * 1.6; e++) yTicks.push([10 ** e, group(10 ** e, 0)]);
      const xTicks = bucketTicks(spec.unit, edges, this.inner / 80).map(([v, t]) => [place(v), t]);
      this.axes(root, yTicks, xTicks, this.narrow ? "calls, log scale" : "calls in a bucket, log scale");
      spec.series.forEach((s, i) => {
        if (this.hidden.has(i)) return;
        let area = "", outline = "", open = false;
        s.counts.forEach((count, j) => {
          const x = this.X(place(edges[j])).toFixed(1), x2 = this.X(place(edges[j + 1])).toFixed(1), y = this.Y(count).toFixed(1);
          if (!count) { if (open) outline += `V${base}`; open = false; return; }
          area += `M${x} ${base}V${y}H${x2}V${base}Z`;
          outline += open ? `V${y}H${x2}` : `M${x} ${base}V${y}H${x2}`;
          open = true;
        });
        if (open) outline += `V${base}`;
        svg("path", { d: area, opacity: s.style === 0 ? 0.3 : 0.85, ...fillOf(s.style) }, root);
        svg("path", { d: outline, class: `l o l${s.style % 6}` }, root);
      });
      (spec.marks || []).forEach((mark, i) => {
        const x = this.X(place(mark.v)), right = x > this.left + this.inner * 0.7;
        svg("path", { class: "level", d: `M${x} ${top}V${base}` }, root);
        svg("text", { x: x + (right ? -5 : 5), y: top + 13 + (i % 4) * 15, "text-anchor": right ? "end" : "start", class: "halo" }, root, mark.label);
      });
    }
    heat(root) {
      const { spec, base, top } = this, edges = spec.edges, rows = edges.length - 1;
      const low = logOf(edges[0]), high = logOf(edges[rows]);
      this.Y = (v) => base - ((logOf(v) - low) / (high - low)) * (base - top);
      const xTicks = linearTicks(spec.x.unit, ...this.range, this.inner / 92);
      this.axes(root, bucketTicks(spec.unit, edges, (base - top) / 30), xTicks, this.narrow ? "call took, log" : "call took, log scale");
      const paths = Array(7).fill("");
      const scale = 6.999 / Math.log(Math.max(spec.most, 2));
      for (let i = 0; i < spec.cells.length; i += 3) {
        const x = this.X(spec.cells[i] * spec.dt), x2 = this.X((spec.cells[i] + 1) * spec.dt);
        if (x2 < this.left || x > this.left + this.inner) continue;
        const y = this.Y(edges[spec.cells[i + 1] + 1]), y2 = this.Y(edges[spec.cells[i + 1]]);
        paths[Math.floor(Math.log(spec.cells[i + 2]) * scale)] += `M${x.toFixed(1)} ${y.toFixed(1)}H${Math.max(x2, x + 1).toFixed(1)}V${y2.toFixed(1)}H${x.toFixed(1)}Z`;
      }
      const layer = svg("g", this.clip, root);
      paths.forEach((d, i) => { if (d) svg("path", { d, class: `h${i}` }, layer); });
      for (const mark of spec.marks || []) {
        const x = this.X(mark.t);
        if (x >= this.left && x <= this.left + this.inner) svg("path", { class: "markline", d: `M${x} ${top}V${base}` }, root);
      }
    }
    bars(root) {
      const { spec } = this;
      const seen = (value, part) => (this.hidden.has(part) ? 0 : value || 0);
      const totals = spec.rows.map((row) => row.values.reduce((sum, v, part) => sum + seen(v, part), 0));
      const most = Math.max(...totals, 1e-9);
      const scale = this.inner / most;
      spec.rows.forEach((row, i) => {
        const y = i * 44 + 20;
        svg("text", { x: this.left, y: y - 5, class: "strong" }, root, row.label);
        svg("text", { x: this.left + this.inner, y: y - 5, "text-anchor": "end" }, root, `${show(spec.unit, totals[i])}${row.note ? ` · ${row.note}` : ""}`);
        let x = this.left;
        row.values.forEach((value, part) => {
          const w = seen(value, part) * scale;
          if (w <= 0) return;
          const box = svg("rect", { x, y, width: Math.max(w, 0.75), height: 18, ...fillOf(part) }, root);
          svg("title", {}, box, `${spec.parts[part]}: ${show(spec.unit, value)}`);
          svg("rect", { x, y, width: Math.max(w, 0.75), height: 18, class: `l o l${part % 6}`, "stroke-width": 1 }, root);
          x += w;
        });
      });
      const ticks = linearTicks(spec.unit, 0, most, this.inner / 92);
      this.range = [0, most];
      const end = spec.rows.length * 44 + 6;
      let last = -Infinity;
      for (const [v, text] of ticks) {
        const px = this.left + v * scale, half = text.length * 3.3;
        if (px - half < last + 8 && v) continue;
        last = px + half;
        svg("path", { class: "axis", d: `M${px} ${end}v4` }, root);
        svg("text", { x: clamp(px, v ? half : 0, this.width), y: end + 18, "text-anchor": v === 0 ? "start" : px + half > this.width ? "end" : "middle" }, root, text);
      }
      svg("path", { class: "axis", d: `M${this.left} ${end + 0.5}H${this.left + this.inner}` }, root);
    }

    // ---- reading a value ----
    point(x) {
      this.cursor = x;
      if (!this.line || this.spec.kind === "bars") return;
      if (x === null) { this.line.removeAttribute("d"); this.readout.textContent = ""; return; }
      const px = Math.round(this.X(x)) + 0.5;
      this.line.setAttribute("d", `M${px} ${this.top}V${this.base}`);
      this.readout.replaceChildren(...this.describe(x));
    }
    describe(x) {
      const { spec } = this, bold = (text) => html("b", {}, null, text);
      if (spec.kind === "rows") return this.under(x);
      if (spec.kind === "histogram") {
        const last = spec.edges.length - 2, above = spec.edges.findIndex((e) => this.place(e) > x);
        const j = above < 0 ? last : Math.max(above - 1, 0); // beyond the last edge there is no other
        const out = [bucketText(spec, j)];
        spec.series.forEach((s) => out.push(` · ${s.name} `, bold(group(s.counts[j], 0))));
        return out;
      }
      if (spec.kind === "heat") {
        const column = Math.min(Math.floor(x / spec.dt), Math.round(spec.x.span / spec.dt) - 1);
        let calls = 0, top = -1;
        for (let i = 0; i < spec.cells.length; i += 3)
          if (spec.cells[i] === column) { calls += spec.cells[i + 2]; top = Math.max(top, spec.cells[i + 1]); }
        return top < 0 ? [`${show("ns", x)} · no calls`]
          : [`${show("ns", x)} · `, bold(group(calls, 0)), " calls, the longest ", bold(bucketText(spec, top))];
      }
      const out = [show(spec.x.unit, spec.x.unit === "count" ? Math.round(x) : x) + (spec.x.label ? ` ${spec.x.label}` : "")];
      const near = (this.range[1] - this.range[0]) / this.inner * 8;
      spec.series.forEach((s, k) => {
        if (this.hidden.has(k)) return;
        if (s.t) {
          if (s.close && this.range[1] - this.range[0] > 0.5 * (this.full[1] - this.full[0])) return;
          let best = -1, gap = s.line ? Infinity : near;
          for (let i = 0; i < s.t.length; i++) if (Math.abs(s.t[i] - x) < gap) { gap = Math.abs(s.t[i] - x); best = i; }
          if (best >= 0) out.push(` · ${s.name} `, bold(show(spec.y.unit, s.v[best])), s.label ? ` ${spec.labels[s.label[best]]}` : "");
          return;
        }
        // The highest within reach of a finger: what is drawn there, for bins are narrower than that.
        const from = Math.max(0, Math.floor((x - near / 2 - s.t0) / s.dt)), to = Math.min(s.hi.length - 1, Math.floor((x + near / 2 - s.t0) / s.dt));
        let i = -1;
        for (let j = from; j <= to; j++) if (s.hi[j] !== null && (i < 0 || s.hi[j] > s.hi[i])) i = j;
        if (i < 0) return;
        out.push(` · ${s.name} `, bold(show(spec.y.unit, s.hi[i])));
        if (s.lo && s.lo[i] !== s.hi[i]) out.push(` (least ${show(spec.y.unit, s.lo[i])})`);
      });
      if (out.length === 1) out.push(" · nothing here");
      return out;
    }
  }

  // ---- tables ----
  function sortable(table) {
    const heads = $$("thead th", table);
    heads.forEach((head, column) => {
      const button = $("button", head);
      if (!button) return;
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("n");
        const order = head.getAttribute("aria-sort") === (numeric ? "descending" : "ascending") ? 1 : -1;
        const direction = numeric ? order : -order;
        heads.forEach((other) => { if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none"); });
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        const body = $("tbody", table);
        const value = (row) => {
          const cell = row.cells[column];
          return numeric ? (cell.dataset.v === undefined ? -Infinity : Number(cell.dataset.v)) : cell.textContent.trim();
        };
        [...body.rows].map((row) => [value(row), row])
          .sort(([p], [q]) => direction * (numeric ? p - q || 0 : p.localeCompare(q, "en", { numeric: true })))
          .forEach(([, row]) => body.append(row));
      });
    });
  }

  // ---- page ----
  function theme() {
    const button = $(".theme"), root = document.documentElement;
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      button.setAttribute("aria-pressed", String(dark()));
      try { localStorage.setItem("kvprobe-theme", root.dataset.theme); } catch { /* a file without storage */ }
    });
    button.setAttribute("aria-pressed", String(dark()));
  }
  function copies() {
    for (const button of $$(".cmd .copy"))
      button.addEventListener("click", async () => {
        const code = $("code", button.parentElement);
        try { await navigator.clipboard.writeText(code.textContent); } catch {
          getSelection().selectAllChildren(code);
          document.execCommand("copy");
        }
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
  }
  // The legend of an account: without a part, the others share the whole bar.
  function accounts() {
    for (const figure of $$(".account")) {
      const boxes = $$(":scope > svg rect", figure).map((box) => ({ box, width: Number(box.getAttribute("width")), shown: true }));
      $$(".legend li", figure).forEach((item) => {
        const i = Number(item.dataset.part);
        const button = html("button", { type: "button", "aria-pressed": "true", title: "Show or hide" });
        button.append(...item.childNodes);
        item.append(button);
        button.addEventListener("click", () => {
          boxes[i].shown = !boxes[i].shown;
          button.setAttribute("aria-pressed", String(boxes[i].shown));
          const whole = boxes.reduce((sum, one) => sum + (one.shown ? one.width : 0), 0) || 1;
          let x = 0;
          for (const one of boxes) {
            const width = one.shown ? (one.width / whole) * 1000 : 0;
            one.box.setAttribute("x", x);
            one.box.setAttribute("width", width);
            x += width;
          }
        });
      });
    }
  }
  function contents() {
    const links = new Map($$(".toc a").map((a) => [a.hash.slice(1), a]));
    if (!links.size || !("IntersectionObserver" in window)) return;
    const watch = new IntersectionObserver((entries) => {
      const seen = entries.find((entry) => entry.isIntersecting);
      if (!seen) return;
      links.forEach((a) => a.removeAttribute("aria-current"));
      links.get(seen.target.id)?.setAttribute("aria-current", "true");
    }, { rootMargin: "-60px 0px -70% 0px" });
    links.forEach((_, id) => { const target = document.getElementById(id); if (target) watch.observe(target); });
  }
  function start() {
    const specs = JSON.parse($("#kvprobe-data").textContent);
    const later = new Map(); // figure -> what draws it: everything below the first view, in the browser's idle time
    const prepare = (figure) => {
      const spec = specs[figure.dataset.chart];
      if (window.kvprobePlotly && spec.kind !== "rows") { later.set(figure, () => window.kvprobePlotly(figure, spec)); return; }
      const plot = new Plot(figure, spec);
      all.push(plot);
      plot.reserve();
      later.set(figure, () => { if (!plot.drawn) plot.draw(); });
      return plot;
    };
    const enrich = (plot) => { if (plot?.spec.kind === "rows") window.kvprobe.rows(plot); };
    const draw = (figure) => { const act = later.get(figure); later.delete(figure); if (act) act(); };
    const idle = window.requestIdleCallback || ((act) => setTimeout(act));
    const next = () => {
      if (later.size) { draw(later.keys().next().value); idle(next, { timeout: 100 }); }
      else document.documentElement.dataset.drawn = String(Math.round(performance.now()));
    };
    if (innerWidth <= PHONE) // a long page is hard to find one's way in by thumb: its headings are its contents
      $$("section:not(#overview) > details.fold, .finding ~ .finding").forEach((d) => { d.open = false; });
    const unfold = () => { // a link leads into a section that is folded
      const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1)); // identifiers are ASCII
      const fold = target && $("details.fold", target.closest("section") || target);
      if (fold) fold.open = true;
    };
    addEventListener("hashchange", unfold);
    for (const figure of $$("figure[data-chart]")) { // what is folded has no width: it is drawn when it opens
      const closed = figure.closest("details:not([open])");
      if (closed) closed.addEventListener("toggle", () => { enrich(prepare(figure)); draw(figure); }, { once: true }); else prepare(figure);
    }
    all.forEach(enrich); // now that their peers are there
    for (const [figure, box] of [...later.keys()].map((one) => [one, one.getBoundingClientRect()]))
      if (box.top < innerHeight && box.bottom > 0) draw(figure);
    let pending = 0, width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return; // a phone's address bar changes the height alone
      width = innerWidth;
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(() => all.forEach((plot) => plot.drawn && plot.draw()));
    });
    const shut = [], printed = () => all.filter((plot) => plot.figure.matches("#rows, .own .chart"));
    addEventListener("beforeprint", () => {
      $$("details.finding:not([open])").forEach((d) => { d.open = true; shut.push(d); });
      for (const plot of printed()) { later.delete(plot.figure); plot.draw(PAPER); } // a sheet's width, so that text stays legible
    });
    addEventListener("afterprint", () => {
      shut.splice(0).forEach((d) => { d.open = false; });
      for (const plot of printed()) plot.draw();
    });
    $$("table").forEach(sortable);
    $$("table").forEach(window.kvprobe.csv);
    theme();
    copies();
    accounts();
    contents();
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
    idle(next, { timeout: 100 });
  }
  window.kvprobe = { Plot, STYLES, all, svg, html, show, linearTicks, group };
  document.addEventListener("DOMContentLoaded", start); // behind the scripts that add to it
})();
