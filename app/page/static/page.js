// Keeps a page up to date: after an event of a job, fetches the page again and replaces its [data-live] regions.
// Without script or without the event stream the page works as well; the user reloads it.
"use strict";

const MIN_INTERVAL_MS = 1000, MAX_INTERVAL_MS = 15000;
// A page with [data-ticks] shows elapsed times, which change without events.
const interval = () => document.querySelector("[data-ticks]") ? MIN_INTERVAL_MS : MAX_INTERVAL_MS;
const regions = () => document.querySelectorAll("[data-live][id]");
let scheduled = null, isFetching = false, fetchedAt = 0;

function schedule(ms) {
  const at = Date.now() + ms;
  if (scheduled !== null && scheduled.at <= at) return;
  if (scheduled !== null) clearTimeout(scheduled.timer);
  scheduled = { at, timer: setTimeout(refresh, ms) };
}

async function refresh() {
  scheduled = null;
  if (document.hidden || isFetching) return;
  isFetching = true;
  fetchedAt = Date.now();
  try {
    const response = await fetch(location.href, { credentials: "same-origin", headers: { Accept: "text/html" } });
    if (response.redirected) location.reload();
    else if (response.ok) replaceRegions(new DOMParser().parseFromString(await response.text(), "text/html"));
  } catch {
    // The server does not answer; the next refresh tries again.
  }
  isFetching = false;
  schedule(interval());
}

// Replaces changed regions; keeps the focus, open details and scroll positions.
function replaceRegions(freshPage) {
  for (const region of regions()) {
    const fresh = freshPage.getElementById(region.id);
    if (!fresh || fresh.innerHTML === region.innerHTML || isInUse(region)) continue;
    const focused = region.contains(document.activeElement) ? focusPath(document.activeElement) : null;
    const openIds = [...region.querySelectorAll("details[open][id]")].map((details) => details.id);
    const scrollable = () => [...region.querySelectorAll("pre, .scroll")];
    const positions = scrollable().map((element) => [element.scrollLeft, element.scrollTop]);
    for (const id of openIds) fresh.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    region.replaceChildren(...fresh.childNodes);
    scrollable().forEach((element, n) => positions[n] && element.scrollTo(...positions[n]));
    if (focused) document.querySelectorAll(focused.selector)[focused.index]?.focus({ preventScroll: true });
  }
}

// Returns whether the user edits a field, has checked a box or has selected text in the region.
function isInUse(region) {
  const active = document.activeElement, selection = getSelection();
  const isEditing = region.contains(active) && active.matches("input, select, textarea");
  const hasSelection = !selection.isCollapsed && region.contains(selection.anchorNode);
  const checkedBox = region.querySelector("input[type=checkbox]:checked");
  return isEditing || hasSelection || checkedBox !== null;
}

// Returns a selector and an index that find the element again after its region was replaced.
function focusPath(element) {
  const href = element.getAttribute("href");
  const selector = element.tagName.toLowerCase() + (href ? `[href="${CSS.escape(href)}"]` : "");
  return { selector, index: [...document.querySelectorAll(selector)].indexOf(element) };
}

const streamUrl = document.body.dataset.stream;
if (streamUrl && regions().length) {
  const liveSign = document.getElementById("pulse");
  const stream = new EventSource(streamUrl);
  const refreshSoon = () => schedule(Math.max(0, fetchedAt + MIN_INTERVAL_MS - Date.now()));
  for (const type of ["enqueued", "delayed", "started", "completed", "failed", "expired", "canceled", "dlq"])
    stream.addEventListener(`job.${type}`, refreshSoon);
  stream.addEventListener("stream.gap", refreshSoon);
  stream.onopen = () => { liveSign.hidden = false; };
  stream.onerror = () => { liveSign.hidden = true; };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  addEventListener("pagehide", () => stream.close());
  schedule(interval());
}

// The checkbox in the header of a table checks all boxes of the table.
document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-all]")) return;
  for (const box of event.target.form.querySelectorAll(`input[name="${event.target.dataset.all}"]`))
    box.checked = event.target.checked;
});
