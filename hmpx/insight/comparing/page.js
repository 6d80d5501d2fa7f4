const number = value => value === null ? "-" : value === "inf" ? "inf" : value === 0 ? "0" : value.toExponential(1);
const size = value => value === null ? -Infinity : value === "inf" ? Infinity : value;

function head() {
  add(page, "h1", "Op lists beside FP32");
  add(page, "p", found.rows.length + " sites, " + found.passes + " runs of the model", "faint");
  const box = add(page, "div", null, found.is_broken ? "notice" : "notice calm");
  for (const line of found.verdict) add(box, "p", line);
}

// From 1e-5 to 10 on a logarithmic scale, with a mark where the training becomes another one.
const place = value => Math.max(0, Math.min(1, (Math.log10(value) + 5) / 6));
function scale(cell, value) {
  if (!(size(value) > 0)) return;
  const box = add(cell, "div", null, size(value) >= found.felt ? "scale broken" : "scale");
  box.title = number(value) + " of the noise between batches";
  add(box, "div", null, "bar").style.width = 100 * place(size(value)) + "%";
  add(box, "div", null, "mark").style.left = 100 * place(found.felt) + "%";
}

const FIGURES = [["gradient error", "gradient_error"], ["loss change", "loss_change"]];

if (found.log_prob_change !== null) FIGURES.splice(1, 0, ["log-probs", "log_prob_change"]);

function table(title, rows, texts, id, words) {
  add(page, "h2", title);
  if (words) add(page, "p", words, "faint");
  const textual = new Set(texts.map(([, key]) => key));
  const columns = [...texts.slice(0, 1), ["", "scale"], ...FIGURES, ["calls", "calls"], ...texts.slice(1)];
  const value = (row, key) => (textual.has(key) ? row[key] : size(row[key]));
  const draw = (cell, row, key) => {
    if (key === "scale") { scale(cell, row.gradient_error); return; }
    const held = row[key];
    cell.dataset.key = key;
    cell.dataset.value = held ?? "";
    if (key === "gradient_error") cell.textContent = number(held);
    else if (key === "where") cell.textContent = shortPath(held);
    else if (key === "dtypes") cell.textContent = shortDtypes(held);
    else cell.textContent = textual.has(key) || key === "calls" ? held : number(held);
    if (textual.has(key)) cell.title = held;
  };
  const notes = row => [row.where, row.reason, row.phase && "not finite in the " + row.phase + " pass", row.note];
  const kinds = columns.map(([title, key]) => [title, key, textual.has(key) ? "text" : "number"]);
  sortable({id, rows, columns: kinds, order: null, value, draw, notes});
}

head();
const PLACES = [["op", "op"], ["dtypes", "dtypes"], ["module", "module"], ["line", "where"]];
if (found.broken.length) table("To be in FP32", found.broken, PLACES, "broken", "Click a row for its reason, a heading to sort.");
table("Each list name alone in low precision", found.by_op, [["op", "op"], ["sites", "sites"], ["line", "where"]], "names",
  "In one batch. The bar is the gradient error in units of the noise between batches, on a logarithmic scale; beyond the " +
  "mark the training shows it. Names of healthy lists have no figures unless scores=True asks for them.");
table("Every site", found.rows, PLACES, "sites", "In the order in which they were met.");
add(page, "h2", "The lists");
const details = add(page, "details");
add(details, "summary", "as one file that hmpx reads");
add(details, "pre", found.policy);
