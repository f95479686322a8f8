"use strict";
// Figures are drawn when the reader scrolls near them. Their colours follow the reader's light or dark mode.
(() => {
  // In pixels. An A4 or a Letter page has room for this width, and for two such figures.
  const printed = (plot) => ({ width: 660, height: plot.classList.contains("tall") ? 520 : 340 });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();
  const hidden = new Set();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function theme() {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--quiet"), linecolor: colour("--line") };
    const look = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": colour("--text") };
    for (const [name, value] of Object.entries(axis)) {
      look[`xaxis.${name}`] = value;
      look[`yaxis.${name}`] = value;
    }
    look["modebar.bgcolor"] = "rgba(0,0,0,0)";
    look["modebar.color"] = look["modebar.activecolor"] = colour("--quiet");
    look["hoverlabel.bgcolor"] = colour("--back");
    look["hoverlabel.font.color"] = colour("--text");
    return look;
  }

  // The colours on paper, whatever the reader's mode is.
  function themeOnPaper() {
    const root = document.documentElement;
    root.classList.add("paper");
    const look = theme();
    root.classList.remove("paper");
    return look;
  }

  // The page has one legend for all figures. On paper and in files each figure needs its own.
  function named(data) {
    return data.some((trace) => trace.name && trace.showlegend !== false && trace.visible !== false);
  }

  function download(plot) {
    const layout = { ...structuredClone(plot.layout), showlegend: named(plot.data) };
    set(layout, { ...themeOnPaper(), paper_bgcolor: "#ffffff" });
    const filename = plot.closest("figure").id;
    Plotly.downloadImage({ data: plot.data, layout }, { format: "svg", filename, ...printed(plot) });
  }

  function set(layout, look) {
    for (const [path, value] of Object.entries(look)) {
      const names = path.split(".");
      const last = names.pop();
      let place = layout;
      for (const name of names) place = place[name] ??= {};
      place[last] = value;
    }
  }

  function visible(trace) {
    const band = trace.fill === "toself" && hidden.has("bands");
    return !band && !(trace.meta !== undefined && hidden.has(trace.meta));
  }

  // Keyboards and screen readers use the table instead of the figure, so they skip the figure's buttons and the element
  // with which plotly measures text.
  function hush(plot) {
    for (const button of plot.querySelectorAll("button")) button.tabIndex = -1;
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
  }

  const file = { name: "file", title: "Download as SVG with its legend", icon: Plotly.Icons.camera, click: download };

  function draw(plot) {
    if (drawn.has(plot)) return;
    drawn.add(plot);
    const { data, layout } = JSON.parse(plot.parentElement.nextElementSibling.textContent);
    const base = {
      showlegend: false,
      margin: { l: 60, r: 12, t: 12, b: 48 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 13 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      hovermode: "closest",
      barmode: "group",
    };
    const full = { ...base, ...layout };
    for (const axis of ["xaxis", "yaxis"]) {
      // Only words may need more room than the margin offers. Measuring them costs plotly another pass.
      const words = full[axis]?.ticktext || (axis === "xaxis" && typeof data[0]?.x?.[0] === "string");
      full[axis] = { automargin: Boolean(words), zeroline: false, ...full[axis] };
    }
    set(full, theme());
    for (const trace of data) trace.visible = visible(trace);
    Plotly.newPlot(plot, data, full, {
      responsive: true,
      displaylogo: false,
      displayModeBar: "hover",
      modeBarButtons: [[file, "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    }).then(() => {
      hush(plot);
      plot.on("plotly_afterplot", () => hush(plot));
      plot.setAttribute("data-drawn", "");
    });
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        watcher.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "200px" },
  );
  for (const plot of document.querySelectorAll(".plot")) watcher.observe(plot);

  dark.addEventListener("change", () => {
    for (const plot of drawn) Plotly.relayout(plot, theme());
  });

  for (const box of document.querySelectorAll("fieldset input")) {
    box.addEventListener("change", () => {
      const group = box.value === "bands" ? box.value : Number(box.value);
      if (box.checked) hidden.delete(group);
      else hidden.add(group);
      for (const plot of drawn) Plotly.restyle(plot, { visible: plot.data.map(visible) });
    });
  }

  const bar = document.querySelector("fieldset");
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);

  const onScreen = new Map(); // what printing has changed in each figure
  addEventListener("beforeprint", () => {
    for (const plot of document.querySelectorAll(".plot")) {
      if (!plot.checkVisibility()) continue;
      draw(plot);
      onScreen.set(plot, { showlegend: plot.layout.showlegend, autosize: true, width: null, height: null });
      Plotly.relayout(plot, { ...themeOnPaper(), showlegend: named(plot.data), ...printed(plot) });
    }
  });
  addEventListener("afterprint", () => {
    for (const [plot, before] of onScreen) Plotly.relayout(plot, { ...theme(), ...before });
    onScreen.clear();
  });
})();
