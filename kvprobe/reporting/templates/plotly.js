// Draws the page's charts with plotly (`--interactive`): the same specs as page.js, with plotly's menus and exports.
(() => {
  "use strict";
  const DASH = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const SYMBOL = ["circle-open", "x-thin-open", "triangle-up-open", "square-open", "diamond-open", "cross-thin-open"];
  const PATTERN = ["", "/", ".", "x", "|", "-"];
  const seconds = (v) => (v === null ? null : v / 1e9);
  const edgesOf = (spec) => spec.edges.map((edge) => seconds(Math.max(edge, 0.5))); // 0 ns has no place on a logarithmic axis

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const probe = document.createElement("i"); // resolves light-dark() to a colour that plotly can parse
    document.body.append(probe);
    const get = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
    const out = {
      ink: get("--ink"), soft: get("--soft"), grid: get("--grid"), card: get("--card"), hot: get("--critical"),
      series: [0, 1, 2, 3, 4, 5].map((i) => get(`--s${i}`)), heat: [0, 1, 2, 3, 4, 5, 6].map((i) => get(`--h${i}`)),
      font: style.getPropertyValue("--sans"),
    };
    probe.remove();
    return out;
  }

  function traces(spec, c) {
    const time = spec.x && spec.x.unit === "ns", y = spec.y && spec.y.unit === "ns" ? seconds : (v) => v;
    const line = (s) => ({ color: c.series[s.style % 6], dash: DASH[s.style % 6], width: 1.6 });
    if (spec.kind === "timeline")
      return spec.series.map((s) => {
        const x = s.t ? s.t : s.hi.map((_, i) => s.t0 + i * s.dt);
        const trace = {
          type: "scatter", name: s.name, x: time ? x.map(seconds) : x, y: (s.t ? s.v : s.hi).map(y), line: line(s),
          mode: s.t && !s.line ? "markers" : "lines", marker: { symbol: SYMBOL[s.style % 6], size: 6, color: c.series[s.style % 6] },
          visible: s.close ? "legendonly" : true,
        };
        if (!s.t) trace.line.shape = "hv";
        if (s.label) trace.text = s.label.map((i) => spec.labels[i]);
        return trace;
      });
    if (spec.kind === "histogram")
      return spec.series.map((s) => {
        const edges = edgesOf(spec);
        return {
          type: "bar", name: s.name, y: s.counts, x: s.counts.map((_, i) => Math.sqrt(edges[i] * edges[i + 1])),
          width: s.counts.map((_, i) => edges[i + 1] - edges[i]), opacity: 0.75,
          marker: { color: c.series[s.style % 6], pattern: { shape: PATTERN[s.style % 6] } },
        };
      });
    if (spec.kind === "heat") {
      const rows = spec.edges.length - 1, columns = Math.round(spec.x.span / spec.dt);
      const z = Array.from({ length: rows }, () => Array(columns).fill(null));
      for (let i = 0; i < spec.cells.length; i += 3) z[spec.cells[i + 1]][spec.cells[i]] = Math.log10(spec.cells[i + 2]);
      return [{
        type: "heatmap", z, x: Array.from({ length: columns + 1 }, (_, i) => seconds(i * spec.dt)), y: edgesOf(spec),
        colorscale: c.heat.map((colour, i) => [i / 6, colour]), colorbar: { title: { text: "log10 calls" } }, hoverongaps: false,
      }];
    }
    return spec.parts.map((part, i) => ({
      type: "bar", orientation: "h", name: part, y: spec.rows.map((row) => row.label), x: spec.rows.map((row) => seconds(row.values[i])),
      marker: { color: c.series[i % 6], pattern: { shape: PATTERN[i % 6] } },
    }));
  }

  window.kvprobePlotly = (figure, spec) => {
    const host = figure.querySelector(".plot");
    const draw = () => {
      const c = colours();
      const axis = (extra) => ({ gridcolor: c.grid, zerolinecolor: c.grid, linecolor: c.grid, automargin: true, ...extra });
      const inSeconds = (unit) => (unit === "ns" ? { ticksuffix: "s", exponentformat: "SI" } : {});
      const layout = {
        height: spec.kind === "bars" ? spec.rows.length * 60 + 110 : 340, margin: { l: 8, r: 8, t: 24, b: 8 },
        paper_bgcolor: c.card, plot_bgcolor: c.card, font: { color: c.ink, family: c.font, size: 12 }, barmode: spec.kind === "bars" ? "stack" : "overlay",
        legend: { orientation: "h", y: 1.12 }, hovermode: "x unified", hoverlabel: { bgcolor: c.card },
        xaxis: axis(spec.kind === "histogram" ? { type: "log", ...inSeconds(spec.unit) } : inSeconds(spec.kind === "bars" ? spec.unit : spec.x.unit)),
        yaxis: axis(spec.kind === "timeline" ? { type: spec.y.scale === "log" ? "log" : "linear", title: { text: spec.y.label }, ...inSeconds(spec.y.unit) }
          : spec.kind === "bars" ? { autorange: "reversed" } : { type: "log", ...(spec.kind === "heat" ? inSeconds("ns") : {}) }),
        shapes: [], annotations: [],
      };
      const x = (v) => (spec.kind === "histogram" || !spec.x || spec.x.unit === "ns" ? seconds(v) : v);
      for (const mark of spec.marks || []) {
        const at = x(mark.t ?? mark.v), shown = spec.kind === "histogram" ? Math.log10(at) : at;
        layout.shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: c.ink, width: 1.5 } });
        layout.annotations.push({ x: shown, yref: "paper", y: 1, text: mark.label.replace(/</g, "&lt;"), showarrow: false, xanchor: "left" });
      }
      for (const span of (spec.spans || []).filter((one) => one.hot))
          layout.shapes.push({ type: "rect", x0: x(span.a), x1: x(span.b), yref: "paper", y0: 0, y1: 1, fillcolor: c.hot, opacity: 0.09, line: { width: 0 } });
      for (const level of spec.levels || []) {
        const at = spec.y.unit === "ns" ? seconds(level.v) : level.v;
        layout.shapes.push({ type: "line", y0: at, y1: at, xref: "paper", x0: 0, x1: 1, line: { color: c.soft, width: 1, dash: "dash" } });
        layout.annotations.push({ xref: "paper", x: 1, y: spec.y.scale === "log" ? Math.log10(at) : at, text: level.label.replace(/</g, "&lt;"), showarrow: false, xanchor: "right", yanchor: "bottom" });
      }
      // plotly reads a subset of HTML in names; what a recording calls things is text.
      const safe = traces(spec, c).map((trace) => ({ ...trace, name: String(trace.name ?? "").replace(/</g, "&lt;"),
        text: trace.text ? trace.text.map((text) => text.replace(/</g, "&lt;")) : undefined }));
      window.Plotly.react(host, safe, layout, { responsive: true, displaylogo: false });
    };
    host.classList.remove("zoomable");
    draw();
    new MutationObserver(draw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  };
})();
