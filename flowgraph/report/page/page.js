'use strict';
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const form = document.getElementById('toggles');
const panel = document.getElementById('panel');
const known = JSON.parse(form.dataset.views);
let opener = null;

// Nothing measures what a single controller would carry: a run measures the compiled plan.
function show() {
  const {plan, bytes} = form.elements, why = document.getElementById('why');
  const measured = form.querySelector('[value=measured]');
  if (known.includes('compiled-measured')) {
    measured.disabled = plan.value === 'naive';
    if (measured.disabled) measured.setAttribute('aria-describedby', 'why');
    else measured.removeAttribute('aria-describedby');
    why.textContent = measured.disabled ? 'a run measures the compiled plan' : '';
    if (measured.disabled) bytes.value = 'predicted';
  }
  const chosen = plan.value + '-' + bytes.value;
  for (const view of all('[data-view]')) view.hidden = view.dataset.view !== chosen;
}

function sort(button) {
  const head = button.closest('th'), table = button.closest('table');
  const at = head.cellIndex, rows = [...table.tBodies[0].rows].filter((row) => row.className !== 'below');
  const numbers = rows.some((row) => row.cells[at].dataset.v !== undefined);
  const was = head.getAttribute('aria-sort');
  const down = was ? was === 'ascending' : numbers;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const value = (row) => numbers ? row.cells[at].dataset.v : row.cells[at].textContent;
  const order = (a, b) => numbers ? Number(a) - Number(b) : a.localeCompare(b);
  rows.sort((one, other) => {  // what is unknown comes last, whichever way
    const a = value(one), b = value(other);
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    return (down ? -1 : 1) * order(a, b);
  });
  const below = (row) => row.nextElementSibling?.className === 'below' ? [row.nextElementSibling] : [];
  table.tBodies[0].append(...rows.flatMap((row) => [row, ...below(row)]));
}

function mark(seam) {
  for (const one of all('.on')) one.classList.remove('on');
  for (const one of all('[data-seam]')) if (one.dataset.seam === seam) one.classList.add('on');
  for (const row of all('[data-row]')) {
    row.classList.toggle('on', row.dataset.row === seam);
    if (row.dataset.row === seam) row.setAttribute('aria-current', 'true');
    else row.removeAttribute('aria-current');
  }
}

function open(hop, from) {
  opener = from;
  for (const one of all('[data-about]')) one.hidden = one.dataset.about !== hop;
  for (const one of all('[data-hop]')) one.classList.toggle('on', one.dataset.hop === hop);
  panel.hidden = false;
  document.getElementById('close').focus();
}

function close() {
  if (panel.hidden) return;
  panel.hidden = true;
  for (const one of all('[data-hop].on')) one.classList.remove('on');
  if (opener) opener.focus();
}

// Its fields stand in the row below.
function expand(button) {
  const open = button.getAttribute('aria-expanded') === 'true';
  button.setAttribute('aria-expanded', String(!open));
  button.closest('tr').nextElementSibling.hidden = open;
}

function act(element) {
  if (element.dataset.hop !== undefined) return open(element.dataset.hop, element);
  mark(element.dataset.seam);
  const view = element.closest('[data-view]');
  const row = all('[data-row]', view).find((one) => one.dataset.row === element.dataset.seam);
  if (row) row.scrollIntoView({block: 'nearest'});
}

// Each hop and each seam can be reached once by Tab; a seam's labels are parts of it.
for (const view of all('[data-view]')) {
  const seen = new Set();
  for (const one of all('[data-hop],[data-seam]', view)) {
    const name = one.dataset.hop ?? one.dataset.seam;
    if (seen.has(name)) continue;
    seen.add(name);
    one.setAttribute('tabindex', '0');
    one.setAttribute('role', 'button');
    one.setAttribute('aria-label', (one.dataset.hop === undefined ? 'seam ' : 'hop ') + name);
  }
  // A picture fills the page, as long as its texts are neither too small to read nor larger than those around it.
  const picture = view.querySelector('svg'), width = picture.width.baseVal.value;
  picture.setAttribute('role', 'group');
  picture.style.minWidth = 0.92 * width + 'px';
  picture.style.maxWidth = 1.3 * width + 'px';
}

form.addEventListener('change', (event) => show());
form.addEventListener('submit', (event) => event.preventDefault());
document.addEventListener('click', (event) => {
  const button = event.target.closest('th button');
  if (button) return sort(button);
  if (event.target.closest('#close')) return close();
  const part = event.target.closest('[data-hop],[data-seam]');
  if (part) return act(part);
  const row = event.target.closest('[data-row]');
  if (!row) return;
  mark(row.dataset.row);
  const opens = event.target.closest('[aria-expanded]');
  if (opens) expand(opens);
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') return close();
  const part = event.target.closest ? event.target.closest('[data-hop],[data-seam]') : null;
  if (part && (event.key === 'Enter' || event.key === ' ')) {
    event.preventDefault();
    act(part);
  }
});
show();
