// What the whole page shares: numbers as people read them, and the colours of light and dark.
window.weir = {};

// Bokeh asks the style of each axis, grid and label for some twenty properties of its own, each time that one is drawn or
// measured, and to answer is slow: it was a sixth of an update. This page sets none of them.
(() => {
  const value = CSSStyleDeclaration.prototype.getPropertyValue;
  CSSStyleDeclaration.prototype.getPropertyValue = function (name) {
    return name.startsWith("--bk-") ? "" : value.call(this, name);
  };
})();

// Numbers.  Formatters are made once: a new one for each label was a tenth of the work.
(() => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const time = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
  const three = (x) => String(Number(x.toPrecision(3)));

  weir.bytes = (n) => {  // with a binary unit, chosen by the size of the number
    if (!isFinite(n)) return "none";
    let at = 0, size = Math.abs(n);
    while (size >= 1024 && at < 4) { size /= 1024; at += 1; }
    const digits = size >= 100 || size === Math.round(size) ? 0 : size >= 10 ? 1 : 2;
    return (n < 0 ? "-" : "") + size.toFixed(digits) + " " + units[at];
  };
  weir.seconds = (s) => {
    if (!isFinite(s)) return "none";
    if (s === 0) return "0 s";
    return s < 1e-3 ? three(s * 1e6) + " us" : s < 1 ? three(s * 1e3) + " ms" : three(s) + " s";
  };
  weir.share = (x) => isFinite(x) ? (Math.round(x * 1000) / 10) + " %" : "none";
  weir.clock = (ms) => time.format(ms);
})();

// Light and dark: text, grid and backgrounds of everything that is drawn, from the page's own style.
(() => {
  const key = "weir-theme";
  const asked = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const theme = () => stored() ?? (asked.matches ? "dark" : "light");

  function dress(doc) {
    const style = getComputedStyle(document.documentElement);
    const [faint, line] = ["--faint", "--line"].map((name) => style.getPropertyValue(name).trim());
    const looks = {
      plot: {outline_line_color: line},
      axis: {axis_label_text_color: faint, major_label_text_color: faint, axis_line_color: line,
        major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal",
        axis_label_text_font_size: "11px", major_label_text_font_size: "11px"},
      grid: {grid_line_color: line, minor_grid_line_color: line, minor_grid_line_alpha: 0.4, grid_line_alpha: 0.6},
      bar: {title_text_color: faint, major_label_text_color: faint, major_label_text_font_size: "10px",
        title_text_font_size: "10px", title_text_font_style: "normal"},
    };
    const set = (model, values) => model.setv(values, {sync: false});
    for (const root of doc.roots()) {
      if (root.type !== "Plot") continue;
      set(root, looks.plot);
      for (const model of root.references()) {
        if (model.type.endsWith("Axis")) set(model, looks.axis);
        else if (model.type === "Grid") set(model, looks.grid);
        else if (model.type === "ColorBar") set(model, looks.bar);
      }
    }
  }

  function paint() {
    document.documentElement.dataset.theme = theme();
    for (const doc of window.Bokeh?.documents ?? []) dress(doc);
    weir.map?.again();
  }

  // What the page says, put where it belongs; names from users come escaped.
  weir.say = (words) => {
    for (const place of ["head", "streams"]) {
      const [text] = words[place];
      const node = document.getElementById(place);
      if (node.said !== text) node.innerHTML = node.said = text;
    }
  };

  paint();
  // A document is dressed as soon as it is read, before anything of it is drawn: later, all of it would be drawn twice.
  const documents = window.Bokeh?.documents;
  if (documents) documents.push = (...docs) => {
    queueMicrotask(() => docs.forEach(dress));  // it is announced empty, and filled at once
    return Array.prototype.push.apply(documents, docs);
  };
  asked.addEventListener("change", paint);
  weir.colors = (which) => { document.body.dataset.colors = which; weir.map.again(); };
  weir.ready = () => { paint(); document.documentElement.dataset.ready = "yes"; performance.mark("weir-ready"); };
  weir.lost = () => { document.getElementById("lost").style.display = "block"; };
  document.getElementById("theme").addEventListener("click", () => {
    try { localStorage.setItem(key, theme() === "dark" ? "light" : "dark"); } catch { /* for this visit only */ }
    paint();
  });
})();
