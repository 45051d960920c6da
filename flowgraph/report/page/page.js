'use strict';
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const form = document.getElementById('toggles');
const panel = document.getElementById('panel');
const known = JSON.parse(form.dataset.views);
let opener = null;

// Nothing measures what a single controller would carry: with one choice the other falls back.
function show(changed) {
  const chosen = () => form.elements.plan.value + '-' + form.elements.bytes.value;
  if (!known.includes(chosen())) {
    if (changed === 'bytes') form.elements.plan.value = 'compiled';
    else form.elements.bytes.value = 'predicted';
  }
  for (const view of all('[data-view]')) view.hidden = view.dataset.view !== chosen();
}

function sort(button) {
  const head = button.closest('th'), table = button.closest('table');
  const at = head.cellIndex, rows = all('tbody tr', table);
  const numbers = rows.some((row) => row.cells[at].dataset.v !== undefined);
  const was = head.getAttribute('aria-sort');
  const down = was ? was === 'ascending' : numbers;
  for (const other of all('th', table)) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const value = (row) => numbers ? Number(row.cells[at].dataset.v ?? -1e300) : row.cells[at].textContent;
  const order = (a, b) => numbers ? value(a) - value(b) : value(a).localeCompare(value(b));
  rows.sort((a, b) => (down ? -1 : 1) * order(a, b));
  table.tBodies[0].append(...rows);
}

function mark(seam) {
  for (const one of all('.on')) one.classList.remove('on');
  for (const one of all('[data-seam]')) if (one.dataset.seam === seam) one.classList.add('on');
  for (const one of all('[data-row]')) if (one.dataset.row === seam) one.classList.add('on');
}

function open(hop, from) {
  opener = from;
  for (const one of all('[data-about]')) one.hidden = one.dataset.about !== hop;
  panel.hidden = false;
  document.getElementById('close').focus();
}

function close() {
  if (panel.hidden) return;
  panel.hidden = true;
  if (opener) opener.focus();
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
  const picture = view.querySelector('svg');
  picture.setAttribute('role', 'group');
}

form.addEventListener('change', (event) => show(event.target.name));
form.addEventListener('submit', (event) => event.preventDefault());
document.addEventListener('click', (event) => {
  const button = event.target.closest('th button');
  if (button) return sort(button);
  if (event.target.closest('#close')) return close();
  const part = event.target.closest('[data-hop],[data-seam]');
  if (part) return act(part);
  const row = event.target.closest('[data-row]');
  if (row) mark(row.dataset.row);
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
