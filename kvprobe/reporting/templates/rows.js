// Threads and streams on one time axis, the calls in them, search, and what leads from a finding to its call.
//
// A spec of kind "rows" (see reporting/rows.py): slices, rows: [{label, thread, lane, layers}], where a layer is a digit a
// slice of time for each style that the row has; styles: [[style, name]]; names, items: columns of what is kept one by
// one; stacks: [text]; fences: [[when, row that waits, row it waits for]]; waits: [[item that waited, item it waited for]].
(() => {
  "use strict";
  const { Plot, STYLES: CLASS, all, svg, html, show, linearTicks, group } = window.kvprobe;
  const BAR = 17, ARROWS = 40, LABELS = 120;
  // A row in px: names stand in a column on the left, and above their rows where there is no room for one.
  const LOW = { pitch: 26, head: 5 }, TALL = { pitch: 34, head: 13 };
  const COLUMN = 250, SHARE = 0.26; // of names: px at most, and of the whole width
  const layersOf = (row) => (row.digits ??= Object.entries(row.layers || {})
    .map(([style, digits]) => [Number(style), digits.replace(/(\d)x(\d+),/g, (_, digit, times) => digit.repeat(times))])
    .filter(([, digits]) => digits.length > 1));

  const pen = document.createElement("canvas").getContext("2d");
  function widthOf(text, bold = false) {
    pen.font = `${bold ? 600 : 400} 12px ${(pen.family ??= getComputedStyle(document.body).fontFamily)}`;
    return pen.measureText(text).width;
  }
  // A text in so many px: what stands before a colon and the prefix of CUDA's functions are the first to go, then its end.
  function within(text, room, bold = false) {
    if (widthOf(text, bold) <= room) return text;
    const colon = text.lastIndexOf(": "), tail = (colon < 0 ? text : text.slice(colon + 2)).replace(/^cuda?(?=[A-Z])/, "");
    let long = widthOf(tail, bold) <= room ? tail.length : Math.floor((tail.length * room) / widthOf(tail, bold));
    if (long >= tail.length) return tail;
    while (long > 1 && widthOf(`${tail.slice(0, long)}…`, bold) > room) long--;
    return long > 1 ? `${tail.slice(0, long).trimEnd()}…` : "";
  }

  // The column that the names of a chart's rows need, in px, at this width; 0: they stand above their rows.
  Plot.prototype.column = function (width, narrow) {
    if (narrow || this.spec.kind !== "rows") return 0;
    this.widest ??= Math.max(0, ...this.spec.rows.map((row) => widthOf(row.label, true)));
    return Math.round(Math.max(Math.min(this.widest + 14, COLUMN, width * SHARE), 62));
  };
  Plot.prototype.row = (narrow) => (narrow ? TALL : LOW);

  Plot.prototype.rows = function (root) {
    const { spec, left, inner } = this, [a, b] = this.range, perPixel = (b - a) / inner;
    const { pitch: PITCH, head: HEAD } = Object.assign(this, this.row(this.narrow));
    const top = (this.top = 6), base = (this.base = top + spec.rows.length * PITCH);
    this.axes(root, [], linearTicks("ns", a, b, inner / 92), "");
    const layer = svg("g", this.clip, root), slice = spec.x.span / spec.slices;
    spec.rows.forEach((row, i) => {
      const y = top + i * PITCH, floor = y + HEAD + BAR;
      svg("path", { class: "grid", d: `M${left} ${floor + 0.5}H${left + inner}` }, root);
      const from = Math.max(0, Math.floor(a / slice)), to = Math.min(spec.slices, Math.ceil(b / slice));
      const merge = Math.max(1, Math.floor((to - from) / inner)), filled = new Map(); // slice -> how high it is already
      for (const [style, digits] of layersOf(row)) {
        if (this.hidden.has(style)) continue;
        let d = "";
        for (let j = from; j < to; j += merge) {
          let high = 0, sum = 0;
          for (let k = j; k < j + merge && k < to; k++) { const one = digits.charCodeAt(k) - 48; sum += one; if (one > high) high = one; }
          if (row.lane) high = sum / merge; // its layers are parts of one whole; of a row, nothing short is to be overlooked
          const below = filled.get(j) || 0;
          high = Math.min(high, 9 - below);
          if (high <= 0) continue;
          filled.set(j, below + high);
          d += `M${this.X(j * slice).toFixed(1)} ${(floor - below * BAR / 9).toFixed(1)}v${(-high * BAR / 9).toFixed(1)}h${Math.max((merge * slice) / perPixel, 0.8).toFixed(1)}v${(high * BAR / 9).toFixed(1)}Z`;
        }
        if (d) svg("path", { d, class: `${CLASS[style]} slices${row.lane ? " lane" : ""}` }, layer);
      }
    });
    this.single(layer, perPixel);
    this.between(layer);
    spec.rows.forEach((row, i) => {
      const floor = top + i * PITCH + HEAD + BAR, text = this.narrow ? row.label : within(row.label, left - 12, true);
      const name = svg("text", this.narrow ? { x: left + 2, y: top + i * PITCH + 10, class: "halo strong" } : { x: 2, y: floor - 4, class: "strong" }, root, text);
      if (text !== row.label) svg("title", {}, name, row.label);
    });
  };

  // Calls and executions that are wide enough, or few enough, to be told apart.
  Plot.prototype.single = function (layer, perPixel) {
    const { items, names } = this.spec, [a, b] = this.range, paths = CLASS.map(() => ""), labels = [];
    let hits = "";
    for (let i = 0; i < items.t.length; i++) {
      const start = items.t[i], width = items.d[i] / perPixel;
      if (start > b || start + items.d[i] < a) continue;
      const found = this.found && this.found.has(i);
      if (this.hidden.has(items.w[i])) continue;
      // A GPU's lane shows all of its pieces anyway: the longest alone, drawn apart, would look unlike the rest.
      if (width < (this.spec.rows[items.row[i]].lane ? 32 : 1.5) && !found) continue;
      const x = Math.max(this.X(start), this.left - 2), x2 = Math.min(this.X(start + items.d[i]), this.left + this.inner + 2);
      const y = this.top + items.row[i] * this.pitch + this.head;
      const d = `M${x.toFixed(1)} ${y}h${Math.max(x2 - x, 1.5).toFixed(1)}v${BAR}h${(-Math.max(x2 - x, 1.5)).toFixed(1)}Z`;
      if (found) hits += d; else paths[items.w[i]] += d;
      if (x2 - x > 32 && labels.length < LABELS) labels.push([(x + x2) / 2, y + 13, within(names[items.n[i]], x2 - x - 8), found ? "found" : CLASS[items.w[i]]]);
    }
    paths.forEach((d, style) => { if (d) svg("path", { d, class: `call ${CLASS[style]}` }, layer); });
    if (hits) svg("path", { d: hits, class: "call found" }, layer);
    for (const [x, y, text, on] of labels) if (text) svg("text", { x, y, class: `within on-${on}`, "text-anchor": "middle" }, layer, text);
    const i = this.chosen;
    if (i === undefined) return;
    const x = this.X(items.t[i]), width = Math.max(items.d[i] / perPixel, 2), y = this.top + items.row[i] * this.pitch + this.head;
    svg("rect", { x: x - 1.5, y: y - 1.5, width: width + 3, height: BAR + 3, class: "chosen" }, layer);
  };
  Plot.prototype.middle = function (row) { return this.top + row * this.pitch + this.head + BAR / 2; };
  // Fences between streams, and from the chosen call to its stream; only where they can be told apart.
  Plot.prototype.between = function (layer) {
    const { items, fences } = this.spec, [a, b] = this.range;
    const seen = fences.filter(([t]) => t >= a && t <= b);
    if (seen.length <= 80) {
      let d = "";
      for (const [t, to, of] of seen) {
        const x = this.X(t).toFixed(1), y = this.middle(to), down = y > this.middle(of) ? -5 : 5;
        d += `M${x} ${this.middle(of)}V${y}m-3 ${down}l3 ${-down}l3 ${down}`;
      }
      if (d) svg("path", { d, class: "fence" }, layer);
    }
    let drawn = 0; // from the operation that a call waited for to the call's end; the longest calls come first
    for (const [call, ran] of this.spec.waits || []) {
      const end = items.t[call] + items.d[call], chosen = this.chosen === call || this.chosen === ran;
      if (end < a || end > b || this.hidden.has(items.w[call]) || this.hidden.has(items.w[ran])) continue;
      if (!chosen && (drawn >= ARROWS || this.X(end) - this.X(items.t[call]) < 6)) continue;
      drawn++;
      const x = this.X(end).toFixed(1), x0 = this.X(items.t[ran] + items.d[ran]).toFixed(1), up = items.row[call] < items.row[ran];
      const y = this.middle(items.row[call]) + (up ? BAR / 2 : -BAR / 2), y0 = this.middle(items.row[ran]) - (up ? BAR / 2 : -BAR / 2), tip = up ? 5 : -5;
      svg("path", { d: `M${x0} ${y0}L${x} ${y}m-3 ${tip}l3 ${-tip}l3 ${tip}`, class: chosen ? "fence wait strong" : "fence wait" }, layer);
      if (chosen) svg("path", { d: `M${this.X(items.t[ran]).toFixed(1)} ${this.middle(items.row[ran]) - BAR / 2}H${x0}v${BAR}H${this.X(items.t[ran]).toFixed(1)}Z`, class: "chosen" }, layer);
    }
    const i = this.chosen;
    if (i === undefined || items.on[i] < 0) return;
    const x = this.X(items.t[i] + items.d[i]);
    svg("path", { d: `M${x} ${this.middle(items.row[i])}V${this.middle(items.on[i])}`, class: "fence strong" }, layer);
  };

  const rowOf = (plot, event) => {
    const box = plot.host.querySelector("svg").getBoundingClientRect();
    return Math.floor((event.clientY - box.top - plot.top) / plot.pitch);
  };
  // The call at a time, the innermost where they nest, else the nearest within reach.
  function nearest(plot, time, wanted, reach = Infinity) {
    const { items } = plot.spec;
    let best = -1, gap = reach;
    for (let i = 0; i < items.t.length; i++) {
      if (!wanted(i)) continue;
      const off = Math.max(items.t[i] - time, time - items.t[i] - items.d[i], 0);
      if (off < gap || (off === gap && best >= 0 && items.d[i] < items.d[best])) { gap = off; best = i; }
    }
    return best;
  }
  // What lies under the pointer, in words.
  Plot.prototype.under = function (time) {
    const { items, names, rows } = this.spec, finger = ((this.range[1] - this.range[0]) / this.inner) * 4;
    const i = this.over === undefined ? -1 : nearest(this, time, (one) => items.row[one] === this.over && !this.hidden.has(items.w[one]), finger);
    if (i < 0) return [show("ns", time), ": choose a call, or press Enter for the nearest"];
    const bits = [html("b", {}, null, names[items.n[i]]), ` ${show("ns", items.d[i])}, at ${show("ns", items.t[i])} · ${rows[items.row[i]].label}`];
    if (items.depth[i] >= 0) bits.push(` · ${group(items.depth[i], 0)} outstanding when it was entered`);
    return bits;
  };
  // The same beside the pointer, where a mouse is.
  function hover(plot, event) {
    plot.over = rowOf(plot, event);
    const { host, tip } = plot, box = host.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    plot.point(plot.at(event));
    const said = event.pointerType === "mouse" && plot.drag === null ? plot.under(plot.at(event)) : [];
    tip.hidden = !(said[0] instanceof Node);
    if (tip.hidden) return;
    tip.replaceChildren(...said);
    if (!tip.isConnected) host.append(tip);
    tip.style.top = `${y + 16}px`;
    tip.style.left = `${Math.max(0, Math.min(x + 10, box.width - tip.offsetWidth))}px`;
  }
  function choose(plot, i, zoom = true) {
    const { spec } = plot, { items } = spec;
    plot.chosen = i;
    const pane = plot.pane;
    pane.replaceChildren();
    html("h4", {}, pane, `${spec.names[items.n[i]]}: ${show("ns", items.d[i])}`);
    const facts = [`${spec.rows[items.row[i]].label}, at ${show("ns", items.t[i])}`];
    if (items.on[i] >= 0) facts.push(`on ${spec.rows[items.on[i]].label}`);
    if (items.depth[i] >= 0) facts.push(`${group(items.depth[i], 0)} outstanding when it was entered`);
    if (items.lost[i] > 0) facts.push(`${show("ns", items.lost[i])} of it lost`);
    if (items.id[i] >= 0) facts.push(`row ${group(items.id[i], 0)} of the calls`);
    html("p", {}, pane, `${facts.join(" · ")}.`);
    const waited = (spec.waits || []).find(([call]) => call === i), whoever = (spec.waits || []).filter(([, ran]) => ran === i);
    const ended = (k) => items.t[k] + items.d[k];
    if (waited) html("p", {}, pane, `It returned ${show("ns", ended(i) - ended(waited[1]))} after this had ended on ${spec.rows[items.row[waited[1]]].label}: ${spec.names[items.n[waited[1]]]}.`);
    for (const [call] of whoever.slice(0, 3)) html("p", {}, pane, `${spec.names[items.n[call]]} of ${spec.rows[items.row[call]].label} returned ${show("ns", ended(call) - ended(i))} after it had ended.`);
    if (items.s[i] >= 0) {
      html("p", { class: "how" }, pane, "Python stack, innermost frame first:");
      html("pre", { class: "stack", tabindex: "0" }, pane, spec.stacks[items.s[i]]);
    } else if (items.id[i] >= 0) html("p", { class: "how" }, pane, "No Python stack was taken during this call. kvprobe run takes one of each call that blocks long enough.");
    if (zoom) {
      const width = Math.max(items.d[i] * 4, spec.x.span / 2000, 2e4), middle = items.t[i] + items.d[i] / 2;
      plot.show([middle - width / 2, middle + width / 2]);
    } else plot.draw();
    plot.remember?.();
  }
  function remember(plot) {
    const [a, b] = plot.range, whole = a <= plot.full[0] && b >= plot.full[1], bits = [];
    if (!whole) bits.push(`t=${Math.round(a)}-${Math.round(b)}`);
    const { items } = plot.spec;
    if (plot.chosen !== undefined && items.id[plot.chosen] >= 0) bits.push(`call=${items.id[plot.chosen]}`);
    try { history.replaceState(null, "", bits.length ? `#${bits.join("&")}` : location.pathname + location.search); } catch { /* a viewer without addresses */ }
  }
  function follow(plot) {
    const call = location.hash.match(/\bcall=(\d+)/), time = location.hash.match(/\bt=(\d+)-(\d+)/);
    if (!call && !time) return;
    const i = call ? plot.spec.items.id.indexOf(Number(call[1])) : -1;
    if (i >= 0) choose(plot, i, !time);
    else if (call) missing(plot, Number(call[1]));
    if (time) plot.show([Number(time[1]), Number(time[2])]);
    plot.figure.scrollIntoView({ block: "start" });
    if (call) plot.pane.focus({ preventScroll: true });
  }
  // A link leads to a call of a thread that the chart has no row for.
  function missing(plot, id) {
    plot.chosen = undefined;
    plot.draw();
    plot.pane.replaceChildren(html("p", {}, null, `Row ${group(id, 0)} of the calls is of a thread that is not shown here. kvprobe export writes all calls.`));
  }
  function save(name, type, text) {
    const link = html("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  // What is kept one by one, as Chrome's trace events; microseconds.
  function perfetto(spec) {
    const { items } = spec, processOf = (row) => (row.thread ? 1 : row.lane ? 3 : 2);
    const events = spec.rows.flatMap((row, i) => [
      { ph: "M", name: "thread_name", pid: processOf(row), tid: i + 1, args: { name: row.label } },
      { ph: "M", name: "thread_sort_index", pid: processOf(row), tid: i + 1, args: { sort_index: i } },
    ]);
    events.push({ ph: "M", name: "process_name", pid: 1, args: { name: "threads" } }, { ph: "M", name: "process_name", pid: 2, args: { name: "streams" } }, { ph: "M", name: "process_name", pid: 3, args: { name: "GPUs and ranges" } });
    for (let i = 0; i < items.t.length; i++) {
      const args = {};
      if (items.id[i] >= 0) args.row = items.id[i];
      if (items.depth[i] >= 0) args.outstanding = items.depth[i];
      if (items.s[i] >= 0) args.stack = spec.stacks[items.s[i]];
      events.push({ ph: "X", name: spec.names[items.n[i]], ts: items.t[i] / 1e3, dur: items.d[i] / 1e3, pid: processOf(spec.rows[items.row[i]]), tid: items.row[i] + 1, args });
    }
    return JSON.stringify({ traceEvents: events, displayTimeUnit: "ns" });
  }

  function search(plot) {
    const { spec } = plot, { items } = spec;
    const box = html("form", { class: "search", role: "search" });
    const field = html("input", { type: "search", placeholder: "Search calls and stacks", "aria-label": "Search calls and stacks" }, box);
    const count = html("output", {}, box);
    let hits = [], at = -1, last = "";
    const look = () => {
      const text = (last = field.value.trim().toLowerCase());
      const named = new Set(), stacked = new Set();
      if (text) {
        spec.names.forEach((name, i) => { if (name.toLowerCase().includes(text)) named.add(i); });
        spec.stacks.forEach((stack, i) => { if (stack.toLowerCase().includes(text)) stacked.add(i); });
      }
      hits = [];
      if (text) for (let i = 0; i < items.t.length; i++) if (named.has(items.n[i]) || stacked.has(items.s[i])) hits.push(i);
      hits.sort((p, q) => items.d[q] - items.d[p]);
      at = -1;
      plot.found = new Set(hits);
      count.textContent = text ? `${group(hits.length, 0)} found; Enter: the next, longest first` : "";
      plot.draw();
    };
    field.addEventListener("input", look);
    box.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim().toLowerCase() !== last) look();
      if (!hits.length) return;
      at = (at + 1) % hits.length;
      choose(plot, hits[at]);
      count.textContent = `${group(at + 1, 0)} of ${group(hits.length, 0)}`;
    });
    plot.strip.prepend(box);
    const button = html("button", { type: "button", class: "copy" }, plot.strip.querySelector(".tools"), "For Perfetto");
    button.title = "Saves what is kept one by one as a trace; open it at ui.perfetto.dev";
    button.addEventListener("click", () => save("kvprobe-trace.json", "application/json", perfetto(spec)));
  }

  window.kvprobe.rows = (plot) => {
    const { spec } = plot;
    plot.pane = html("div", { class: "pane", tabindex: "-1", "aria-live": "polite" });
    plot.readout.after(plot.pane);
    search(plot);
    plot.tip = html("div", { class: "hover", "aria-hidden": "true", hidden: "" });
    plot.host.addEventListener("pointermove", (event) => { if (plot.inner && plot.drawn) hover(plot, event); });
    plot.host.addEventListener("pointerleave", () => { plot.tip.hidden = true; plot.over = undefined; });
    plot.host.addEventListener("keydown", () => { plot.tip.hidden = true; plot.over = undefined; }, { capture: true });
    let down = null;
    plot.host.addEventListener("pointerdown", (event) => { down = [event.clientX, event.clientY]; });
    plot.host.addEventListener("click", (event) => {
      if (down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) > 5) return; // that was a zoom
      const row = rowOf(plot, event), finger = ((plot.range[1] - plot.range[0]) / plot.inner) * 6;
      const i = nearest(plot, plot.at(event), (one) => plot.spec.items.row[one] === row && !plot.hidden.has(plot.spec.items.w[one]), finger);
      if (i >= 0) choose(plot, i, false);
    });
    plot.host.addEventListener("keydown", (event) => { // from call to call, in order of time; Enter: the one at the cursor
      if (event.ctrlKey || event.metaKey || event.altKey || !["Enter", "n", "p"].includes(event.key)) return;
      event.preventDefault();
      const { items } = plot.spec, row = plot.chosen === undefined ? 0 : items.row[plot.chosen];
      if (event.key === "Enter") {
        const best = nearest(plot, plot.cursor ?? (plot.range[0] + plot.range[1]) / 2, (i) => items.id[i] >= 0);
        if (best >= 0) choose(plot, best, false);
        return;
      }
      const next = (plot.chosen ?? -1) + (event.key === "n" ? 1 : -1);
      if (next >= 0 && next < items.t.length && (plot.chosen === undefined || items.row[next] === row)) choose(plot, next);
    });
    if (plot.figure.id !== "rows") return; // of two recordings on one page: an address names calls of one
    plot.remember = () => remember(plot);
    addEventListener("hashchange", () => follow(plot));
    for (const link of document.querySelectorAll("a[href^='#call=']"))
      link.addEventListener("click", (event) => {
        event.preventDefault();
        try { history.pushState(null, "", link.getAttribute("href")); } catch { /* a viewer without addresses */ }
        const id = Number(link.getAttribute("href").slice(6)), i = spec.items.id.indexOf(id);
        if (i < 0) missing(plot, id); else choose(plot, i);
        plot.figure.scrollIntoView({ block: "start" });
        plot.pane.focus({ preventScroll: true });
      });
    follow(plot);
  };

  // Every table as CSV: what its cells sort by where they are numbers, with the unit in the head of the column.
  const UNITS = [["ns", /\d\s(ns|µs|ms|s)$/], ["bytes", /\d\s([KMGT]i|[kMGT])?B$/], ["bytes/s", /B\/s$/], ["of 1", /\d%$/]];
  const unitOf = (text) => UNITS.find(([, pattern]) => pattern.test(text))?.[0];
  window.kvprobe.csv = (table) => {
    const caption = table.querySelector("caption");
    const button = html("button", { type: "button", class: "copy csv", "aria-label": `Save as CSV: ${caption.textContent}` }, caption, "CSV");
    const inert = (text) => (/^[=+\-@\t\r]/.test(text) && isNaN(text) ? `'${text}` : text); // a spreadsheet would compute it
    const quote = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    button.addEventListener("click", () => {
      const rows = [...table.tBodies[0].rows];
      const lines = [[...table.tHead.rows[0].cells].map((cell, column) => {
        const units = new Set(rows.map((row) => row.cells[column]).filter((one) => one.dataset.v !== undefined && one.textContent !== "–").map((one) => unitOf(one.textContent)));
        const [unit] = units;
        return cell.textContent + (units.size === 1 && unit ? ` (${unit})` : "");
      })];
      const said = (cell) => (cell.textContent === "–" ? "" : cell.dataset.v === undefined ? inert(cell.textContent) : String(Number(cell.dataset.v)));
      for (const row of rows) lines.push([...row.cells].map(said));
      const name = caption.firstChild.textContent.trim().replace(/[^\w]+/g, "-").toLowerCase();
      save(`${name || "table"}.csv`, "text/csv", lines.map((cells) => cells.map(quote).join(",")).join("\n") + "\n");
    });
  };
})();
