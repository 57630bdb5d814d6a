// Light and dark: text, grid and backgrounds of everything that is drawn, from the page's own style.
(() => {
  const key = "weir-theme";
  const asked = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const theme = () => stored() ?? (asked.matches ? "dark" : "light");

  function paint() {
    document.documentElement.dataset.theme = theme();
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const [text, faint, line, card] = ["--text", "--faint", "--line", "--card"].map(color);
    const looks = {
      figure: {outline_line_color: line},
      axis: {axis_label_text_color: faint, major_label_text_color: faint, axis_line_color: line,
        major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal",
        axis_label_text_font_size: "11px", major_label_text_font_size: "11px"},
      grid: {grid_line_color: line, minor_grid_line_color: line, minor_grid_line_alpha: 0.4, grid_line_alpha: 0.6},
      bar: {title_text_color: faint, major_label_text_color: faint, major_label_text_font_size: "10px",
        title_text_font_size: "10px", title_text_font_style: "normal"},
    };
    const set = (model, values) => model.setv(values, {sync: false});
    for (const doc of window.Bokeh?.documents ?? []) {
      for (const root of doc.roots()) {
        if (root.type !== "Figure") continue;
        set(root, looks.figure);
        for (const model of root.references()) {
          if (model.type.endsWith("Axis")) set(model, looks.axis);
          else if (model.type === "Grid") set(model, looks.grid);
          else if (model.type === "ColorBar") set(model, looks.bar);
          else if (model.type === "LinearColorMapper" && model.name === "blocks-colors")
            set(model, {palette: [color("--idle"), ...model.palette.slice(1)]});
          else if (model.type === "Quad" && model.name === "foreground") set(model, {line_color: {value: text}});
          else if (model.type === "Quad" && root.name === "map" && model.name !== "foreground")
            set(model, {line_color: {value: card}});
        }
      }
    }
  }

  paint();
  window.weirColors = (which) => { document.body.dataset.colors = which; paint(); };
  asked.addEventListener("change", paint);
  window.weirReady = () => { paint(); document.documentElement.dataset.ready = "yes"; performance.mark("weir-ready"); };
  window.weirLost = () => { document.getElementById("lost").style.display = "block"; };
  document.getElementById("theme").addEventListener("click", () => {
    try { localStorage.setItem(key, theme() === "dark" ? "light" : "dark"); } catch { /* for this visit only */ }
    paint();
  });
})();
