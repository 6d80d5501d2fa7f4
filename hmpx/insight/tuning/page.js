const head = document.getElementById("head"), rest = document.getElementById("rest");
add(head, "h1", "The op lists of a model");
const box = add(head, "div", null, found.met ? "notice calm" : "notice");
for (const line of found.verdict) add(box, "p", line);

add(rest, "h2", "Every name, and why");
const table = add(add(rest, "div", null, "scroll"), "table");
table.id = "choices";
const header = add(add(table, "thead"), "tr");
const columns = ["name", "module", "dtype", "gradient error", "loss change", "of the budget", "BF16 saves", "calls", "why", "worst"];
for (const title of columns) add(header, "th", title);
const body = add(table, "tbody");
for (const choice of found.choices) {
  const line = add(body, "tr", null, "site");
  const cells = [choice.name, choice.module, choice.dtype, ...choice.shown, String(choice.calls), choice.why, choice.worst];
  cells.forEach((text, i) => {
    const cell = add(line, "td", text, i >= 3 && i <= 7 ? "number" : i === 2 ? choice.dtype : "text");
    cell.title = text;
    cell.dataset.key = columns[i];
  });
}
add(rest, "h2", "The recipe");
const details = add(rest, "details");
add(details, "summary", "as a file that hmpx reads");
add(details, "pre", found.recipe);
