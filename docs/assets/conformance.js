// Filters of the table of docs/conformance.md: kinds of trainers, numbers of ranks, and rows without a difference.
document$.subscribe(() => {
  const table = document.getElementById("matrix");
  if (!table) return;
  const form = document.createElement("form");
  form.className = "matrix-filters";
  form.innerHTML = `
    <label><input type="checkbox" name="default" checked> defaults</label>
    <label><input type="checkbox" name="remedy" checked> documented remedies, other versions</label>
    <label><input type="checkbox" name="ours" checked> this project</label>
    <label>ranks <select name="ranks"><option value="">1 and 2</option><option>1</option><option>2</option></select></label>
    <label><input type="checkbox" name="wrong"> only rows with a difference</label>
    <label>trainer <input type="search" name="trainer" placeholder="all"></label>`;
  table.parentElement.before(form);
  const heads = [...table.tHead.rows[0].cells];
  const filter = () => {
    const asked = form.elements.trainer.value.toLowerCase();
    const shown = heads.map((head, column) => column === 0 ||
      (form.elements[head.dataset.kind].checked && head.textContent.toLowerCase().includes(asked)));
    for (const row of table.rows) {
      shown.forEach((is, column) => { if (row.cells[column]) row.cells[column].hidden = !is; });
      const ranks = form.elements.ranks.value;
      const differs = [...row.cells].some((cell) => !cell.hidden && cell.classList.contains("wrong"));
      row.hidden = row.parentElement.tagName === "TBODY" &&
        ((ranks && row.dataset.ranks !== ranks) || (form.elements.wrong.checked && !differs));
    }
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
});
