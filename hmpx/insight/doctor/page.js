add(page, "h1", found.wrong ? "Something is wrong with the precision"
  : found.not_checked.length ? "Not everything was checked" : "Nothing wrong was found");
for (const line of found.looked) add(page, "p", line);
for (const each of found.findings) {
  const box = add(page, "section", "", each.wrong ? "finding wrong" : "finding");
  add(box, "h2", each.kind);
  add(box, "p", each.where, "where");
  add(box, "p", each.said);
  add(box, "p", "Do: " + each.do);
  if (each.names.length > 3) {
    const more = add(box, "details");
    add(more, "summary", each.names.length + " names");
    add(more, "pre", each.names.join("\n"));
  }
}
for (const line of found.not_checked) add(page, "p", "Not checked: " + line);
if (found.recipe) {
  add(page, "h2", "The smallest recipe that answers them");
  add(page, "pre", found.recipe);
}
