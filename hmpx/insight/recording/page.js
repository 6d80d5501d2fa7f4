const log = found;

const SVG = "http://www.w3.org/2000/svg";
function draw(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const ms = seconds => (1000 * seconds).toLocaleString("en", {minimumFractionDigits: 1, maximumFractionDigits: 1});
const count = number => number.toLocaleString("en");
function bytes(number) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (number < 999.5) return number.toFixed(unit === "B" ? 0 : 1) + " " + unit;
    number /= 1000;
  }
  return number.toFixed(1) + " TB";
}
const tail = (text, most) => (text.length > most ? "\u2026" + text.slice(1 - most) : text);
const unique = list => [...new Set(list)];
const seconds = site => site.cast_seconds + site.op_seconds;

function chips(parent, site) {
  let before = null;
  for (const dtypes of [site.given, site.seen, site.result]) {
    const now = unique(dtypes);
    if (!now.length || (before !== null && now.join() === before)) continue;
    if (before !== null) add(parent, "span", "\u2192", "arrow");
    now.forEach((dtype, i) => {
      if (i) parent.append(" ");
      add(parent, "span", shortDtypes(dtype), "chip").classList.add(dtype);
    });
    before = now.join();
  }
}

function head() {
  add(page, "h1", "What ran in which precision");
  add(page, "p", log.versions.join(" \u00b7 "), "faint");
  if (!log.policy) add(add(page, "div", null, "notice"), "p", log.nothing);
  const tiles = add(page, "div", null, "tiles");
  const t = log.totals;
  for (const [label, value] of [
    ["calls of ops", count(t.calls)], ["optimizer steps", count(log.steps)], ["casts made", count(t.casts)],
    ["casts avoided", count(t.casts_avoided)], ["moved by casts", bytes(t.bytes_cast)],
    ["time of casts", ms(t.cast_seconds) + " ms"], ["of casts and ops", (100 * t.cast_share).toFixed(1) + " %"],
  ]) {
    const tile = add(tiles, "div", null, "tile");
    add(tile, "b", value);
    add(tile, "span", label, "faint");
  }
}

function attention() {
  add(page, "h2", "What calls for attention");
  if (!log.attention.length) add(add(page, "div", null, "notice calm"), "p", "Nothing.");
  for (const [heading, lines, calm] of log.attention) {
    const box = add(page, "div", null, calm ? "notice calm" : "notice");
    add(box, "b", heading);
    const list = add(box, "ul");
    for (const line of lines) add(list, "li", line, "mono");
  }
  const unused = log.unmatched_of_hmpx.length;
  if (unused) {
    const more = add(page, "details");
    add(more, "summary", unused + " names of the lists that come with hmpx matched no call, as is usual", "faint");
    add(more, "p", log.unmatched_of_hmpx.join(", "), "mono faint");
  }
}

function bars() {
  add(page, "h2", "Where the time of casts goes");
  const found = log.together.filter(site => site.cast_seconds > 0).sort((a, b) => b.cast_seconds - a.cast_seconds);
  if (!found.length) { add(page, "p", "Nothing was cast.", "faint"); return; }
  const all = found.reduce((sum, site) => sum + site.cast_seconds, 0);
  const box = add(page, "div", null, "bars");
  const row = (name, amount, title) => {
    add(box, "span", name, "name mono").title = title;
    add(add(box, "div", null, "track"), "div", null, "bar").style.width = 100 * amount / found[0].cast_seconds + "%";
    add(box, "span", ms(amount) + " ms", "amount");
  };
  for (const site of found.slice(0, 12))
    row(site.op + "  " + tail(site.module || shortPath(site.where), 42 - site.op.length), site.cast_seconds, site.where + " " + site.module);
  const rest = found.slice(12).reduce((sum, site) => sum + site.cast_seconds, 0);
  add(page, "p", "together " + ms(all) + " ms" + (rest ? "; of these " + ms(rest) + " ms in " + (found.length - 12) +
    " more places" : "") + ". Equal blocks stand together.", "faint");
}

function tree() {
  add(page, "h2", "Modules");
  const make = name => ({name, children: new Map(), calls: 0, casts: 0, cast_seconds: 0, op_seconds: 0});
  const root = make("");
  for (const site of log.sites) {
    let node = root;
    const path = site.module ? site.module.split(".") : ["(outside of any module)"];
    for (const part of [null, ...path]) {
      if (part !== null) {
        if (!node.children.has(part)) node.children.set(part, make(part));
        node = node.children.get(part);
      }
      for (const key of ["calls", "casts", "cast_seconds", "op_seconds"]) node[key] += site[key];
    }
  }
  const box = add(page, "div", null, "tree");
  const line = (parent, cells) => {
    const made = add(parent, "span", null, "line");
    for (const cell of cells) add(made, "span", cell);
  };
  line(add(add(box, "div", null, "head"), "div", null, "leaf"), ["module", "calls", "casts", "casts ms", "op ms"]);
  const show = (node, parent, open) => {
    const cells = [node.name, count(node.calls), count(node.casts), ms(node.cast_seconds), ms(node.op_seconds)];
    if (!node.children.size) { line(add(parent, "div", null, "leaf"), cells); return; }
    const details = add(parent, "details");
    details.open = open;
    line(add(details, "summary"), cells);
    const inside = add(details, "div");
    for (const child of node.children.values()) show(child, inside, false);
  };
  for (const child of root.children.values()) show(child, box, true);
}

function flow() {
  const blocks = new Map();
  for (const site of log.sites) {
    const parts = site.module ? site.module.split(".") : [];
    for (let i = 1; i <= parts.length; i++) {
      const name = parts.slice(0, i).join(".");
      if (!blocks.has(name)) blocks.set(name, []);
      blocks.get(name).push(site);
    }
  }
  const names = [...blocks.keys()].filter(name => blocks.get(name).length > 1);
  add(page, "h2", "Dtypes through a block");
  if (!names.length) {
    add(page, "p", "No module called two ops.", "faint");
    return;
  }
  const score = name => blocks.get(name).length * (/(^|\.)\d+$/.test(name) ? 100 : 1);
  const controls = add(page, "div", null, "controls");
  const select = add(add(controls, "label", "block "), "select");
  select.id = "block";
  for (const name of names.slice(0, 500)) add(select, "option", name).value = name;
  select.value = names.slice(0, 500).reduce((best, name) => (score(name) > score(best) ? name : best));
  add(controls, "span", "in the order in which its ops were first called", "faint");
  const box = add(page, "div", null, "scroll");
  box.id = "flow";
  const render = () => {
    box.replaceChildren();
    const sites = blocks.get(select.value).slice(0, 200);
    const lanes = unique(sites.flatMap(site => [...site.given, ...site.seen, ...site.result])).sort().reverse();
    const left = 330, step = 170, height = 46, top = 34;
    const x = dtype => left + lanes.indexOf(dtype) * step + 70;
    const width = left + lanes.length * step, tall = top + sites.length * height + 12;
    const svg = draw(box, "svg", {width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "img"});
    for (const dtype of lanes) {
      draw(svg, "line", {class: "lane", x1: x(dtype), x2: x(dtype), y1: top, y2: tall});
      draw(svg, "text", {x: x(dtype), y: 22, "text-anchor": "middle"}, shortDtypes(dtype));
    }
    sites.forEach((site, i) => {
      const y = top + i * height, middle = y + height / 2;
      const name = site.module.slice(select.value.length + 1) || "\u2013";
      const place = shortPath(site.where);
      draw(svg, "text", {x: 12, y: middle - 2}, tail(name, 38));
      draw(svg, "text", {x: 12, y: middle + 14, class: "faint"}, tail(place, 40));
      const seen = unique(site.seen), result = unique(site.result);
      const home = seen.length === 1 ? seen[0] : result[0] || seen[0];
      if (!home) return;
      const wire = (from, to, y1, y2, dtype) => draw(svg, "path", {
        class: "wire " + dtype, d: `M${x(from)},${y1} C${x(from)},${(y1 + y2) / 2} ${x(to)},${(y1 + y2) / 2} ${x(to)},${y2}`,
      });
      for (const dtype of unique(site.given)) wire(dtype, home, y, middle, dtype);
      for (const dtype of result) wire(home, dtype, middle, y + height, dtype);
      const label = site.op.length > 17 ? site.op.slice(0, 16) + "\u2026" : site.op;
      draw(svg, "rect", {class: "box " + home, x: x(home) - 68, y: middle - 12, width: 136, height: 24, rx: 5});
      const text = draw(svg, "text", {x: x(home), y: middle + 4, "text-anchor": "middle"}, label);
      draw(text, "title", {}, `${site.op} as ${site.entry}: ${site.reason}`);
    });
  };
  select.addEventListener("change", render);
  render();
}

function table() {
  add(page, "h2", "Every site");
  const columns = [
    ["op", "op"], ["line", "where"], ["module", "module"], ["rule", "rule"], ["dtypes", "dtypes"],
    ["total ms", "seconds", ms], ["op ms", "op_seconds", ms], ["casts ms", "cast_seconds", ms], ["calls", "calls", count],
    ["casts", "casts", count], ["avoided", "casts_avoided", count], ["moved", "bytes_cast", bytes],
    ["inf, NaN", "nonfinite", value => value === null ? "" : "call " + count(value)],
  ];
  const figures = new Map(columns.filter(([, , words]) => words).map(([, key, words]) => [key, words]));
  const held = (site, key) =>
    key === "seconds" ? seconds(site)
    : key === "dtypes" ? [site.given, site.seen, site.result].map(each => unique(each).join("+")).join(" ")
    : site[key];
  const draw = (cell, site, key) => {
    if (key === "dtypes") chips(cell, site);
    else if (figures.has(key)) cell.textContent = figures.get(key)(held(site, key));
    else cell.textContent = key === "where" ? tail(shortPath(site.where), 30) : tail(site[key], 34);
    cell.dataset.key = key;
    cell.dataset.value = held(site, key) ?? "";
    if (key === "where" || key === "module") cell.title = site[key];
  };
  const controls = add(page, "div", null, "controls");
  const filter = add(controls, "input");
  filter.type = "search";
  filter.id = "filter";
  filter.placeholder = "op, line, module, reason";
  const shown = add(controls, "span", log.sites.length + " sites", "faint");
  const show = sortable({
    id: "sites", rows: log.sites, order: "seconds", draw,
    columns: columns.map(([title, key, words]) => [title, key, words ? "number" : "text"]),
    value: (site, key) => held(site, key) ?? Infinity,
    notes: site => [
      site.where, "called as " + site.entry, site.reason, "shapes " + site.shapes.join("; "), site.unchosen,
    ],
  });
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase();
    const found = show(site => [site.op, site.entry, site.where, site.module, site.reason, site.unchosen, site.rule]
      .some(text => text.toLowerCase().includes(words)));
    shown.textContent = (found === log.sites.length ? "" : found + " of ") + log.sites.length + " sites";
  });
  add(page, "p", "Click a row for its reason and its shapes, a heading to sort.", "faint");
}

function lists() {
  if (!log.policy) return;
  add(page, "h2", "The lists in force");
  const details = add(page, "details");
  add(details, "summary", "as one file that hmpx reads");
  add(details, "pre", log.policy);
}

head();
attention();
if (log.sites.length) { bars(); tree(); flow(); table(); }
lists();
