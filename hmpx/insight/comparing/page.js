const number = value => value === null ? "-" : value === "inf" ? "inf" : value === 0 ? "0" : value.toExponential(1);
const size = value => value === null ? -Infinity : value === "inf" ? Infinity : value;
const shortPath = where => where.slice(Math.max(where.lastIndexOf("/"), where.lastIndexOf("\\")) + 1);
const shortDtypes = text => text.replaceAll("bfloat", "bf").replaceAll("float", "fp").replaceAll(" and ", "+");

function head() {
  add(page, "h1", "Each op beside itself in FP32");
  add(page, "p", found.rows.length + " sites, " + found.passes + " runs of the model", "faint");
  const box = add(page, "div", null, found.is_broken ? "notice" : "notice calm");
  for (const line of found.verdict) add(box, "p", line);
}

// From 1e-5 to 10 on a logarithmic scale, with a mark where the training becomes another one.
const place = value => Math.max(0, Math.min(1, (Math.log10(value) + 5) / 6));
function scale(cell, value) {
  if (!(size(value) > 0)) return;
  const box = add(cell, "div", null, size(value) >= found.broken ? "scale broken" : "scale");
  box.title = number(value) + " of the noise between batches";
  add(box, "div", null, "bar").style.width = 100 * place(size(value)) + "%";
  add(box, "div", null, "mark").style.left = 100 * place(found.broken) + "%";
}

const FIGURES = [
  ["gradient error", "gradient_error"], ["loss change", "loss_change"], ["error", "error"], ["accumulated", "accumulated"],
];

if (found.log_prob_change !== null) FIGURES.splice(1, 0, ["log-probs", "log_prob_change"]);

function table(title, rows, texts, id, words) {
  add(page, "h2", title);
  if (words) add(page, "p", words, "faint");
  const element = add(add(page, "div", null, "scroll"), "table");
  element.id = id;
  const header = add(add(element, "thead"), "tr");
  const body = add(element, "tbody");
  const columns = [...texts.slice(0, 1), ["", "scale"], ...FIGURES, ["calls", "calls"], ...texts.slice(1)];
  const textual = new Set(texts.map(([, key]) => key));
  let order = null, down = true;
  const render = () => {
    body.replaceChildren();
    const shown = [...rows];
    if (order !== null) shown.sort((a, b) => {
      const [first, second] = textual.has(order) ? [a[order], b[order]] : [size(a[order]), size(b[order])];
      const less = first < second ? -1 : first > second ? 1 : 0;
      return down ? -less : less;
    });
    for (const row of shown) {
      const line = add(body, "tr", null, "site");
      for (const [, key] of columns) {
        const cell = add(line, "td", null, textual.has(key) ? "text" : "number");
        if (key === "scale") { scale(cell, row.gradient_error); continue; }
        const value = row[key];
        cell.dataset.key = key;
        cell.dataset.value = value ?? "";
        if (key === "gradient_error") cell.textContent = number(value) + (row.measured || !(size(value) > 0) ? "" : " ~");
        else if (key === "where") cell.textContent = shortPath(value);
        else if (key === "dtypes") cell.textContent = shortDtypes(value);
        else cell.textContent = textual.has(key) || key === "calls" ? value : number(value);
        if (textual.has(key)) cell.title = value;
      }
      const notes = [row.where, row.reason, row.phase && "not finite in the " + row.phase + " pass", row.note].filter(Boolean);
      if (!notes.length) continue;
      const more = add(body, "tr", null, "more");
      more.hidden = true;
      const cell = add(more, "td");
      cell.colSpan = columns.length;
      for (const text of notes) add(cell, "div", text, "mono");
      line.addEventListener("click", () => { more.hidden = !more.hidden; });
    }
    for (const each of header.children)
      if (each.dataset.key === order) each.setAttribute("aria-sort", down ? "descending" : "ascending");
      else each.removeAttribute("aria-sort");
  };
  for (const [title, key] of columns) {
    const cell = add(header, "th", null, textual.has(key) ? "" : "number");
    if (key === "scale") continue;
    cell.dataset.key = key;
    add(cell, "button", title).addEventListener("click", () => {
      [order, down] = order === key ? [key, !down] : [key, !textual.has(key)];
      render();
    });
  }
  render();
}

head();
table("By op", found.by_op, [["op", "op"]], "ops",
  "Effects of all calls of an op together. The bar is the gradient error in units of the noise between batches, on a " +
  "logarithmic scale; beyond the mark it is another training. ~ is an estimate.");
table("Every site", found.worst, [["op", "op"], ["dtypes", "dtypes"], ["module", "module"], ["line", "where"]], "sites",
  "The worst first. Click a row for its reason, a heading to sort.");
table("By module", found.by_module, [["module", "module"]], "modules");
add(page, "h2", "The lists");
const details = add(page, "details");
add(details, "summary", "as one file that hmpx reads");
add(details, "pre", found.policy);
