const head = document.getElementById("head"), rest = document.getElementById("rest");
add(head, "h1", "The op lists of a model");
const box = add(head, "div", null, found.met ? "notice calm" : "notice");
for (const line of found.verdict) add(box, "p", line);

add(rest, "h2", "Every name, and why");
const table = add(add(rest, "div", null, "scroll"), "table");
table.id = "choices";
const header = add(add(table, "thead"), "tr");
const columns = ["name", "module", "dtype", "gradient error alone", "loss change alone", "BF16 saves", "calls", "why", "where"];
const figure = value => typeof value === "number" ? value.toExponential(1) : value ?? "";
for (const title of columns) add(header, "th", title);
const body = add(table, "tbody");
for (const choice of found.choices) {
  const line = add(body, "tr", null, "site");
  const cells = [choice.name, choice.module, choice.dtype, figure(choice.gradient_error), figure(choice.loss_change),
    choice.gain, String(choice.calls), choice.why, choice.where];
  cells.forEach((text, i) => {
    const cell = add(line, "td", text, i >= 3 && i <= 6 ? "number" : i === 2 ? choice.dtype : "text");
    cell.title = text;
    cell.dataset.key = columns[i];
  });
}
add(rest, "h2", "The recipe");
const details = add(rest, "details");
add(details, "summary", "as a file that hmpx reads");
add(details, "pre", found.recipe);
