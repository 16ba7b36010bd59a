// Keeps a screen as it is: when something happens to a job, what is marked [data-live] is asked for anew and put in
// place.  Without script, or without the stream, the page is the same and is looked at again by hand.
"use strict";

const LEAST_MS = 1000, MOST_MS = 15000;
// While [data-ticks] is on the screen, it shows times that pass although nothing happens.
const pause = () => document.querySelector("[data-ticks]") ? LEAST_MS : MOST_MS;
const regions = () => document.querySelectorAll("[data-live][id]");
let due = null, asking = false, asked = 0;

function later(ms) {
  const at = Date.now() + ms;
  if (due !== null && due.at <= at) return;
  if (due !== null) clearTimeout(due.timer);
  due = { at, timer: setTimeout(look, ms) };
}

async function look() {
  due = null;
  if (document.hidden || asking) return;
  asking = true;
  asked = Date.now();
  try {
    const answer = await fetch(location.href, { credentials: "same-origin", headers: { Accept: "text/html" } });
    if (answer.redirected) location.reload();
    else if (answer.ok) put(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch {
    // It does not answer now; the next look is due all the same.
  }
  asking = false;
  later(pause());
}

function put(fresh) {
  for (const old of regions()) {
    const found = fresh.getElementById(old.id);
    if (!found || found.innerHTML === old.innerHTML || isInUse(old)) continue;
    const focused = old.contains(document.activeElement) ? place(document.activeElement) : null;
    const open = [...old.querySelectorAll("details[open][id]")].map((it) => it.id);
    const scrolled = [...old.querySelectorAll("pre, .scroll")].map((it) => [it.scrollLeft, it.scrollTop]);
    for (const id of open) found.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    old.replaceChildren(...found.childNodes);
    [...old.querySelectorAll("pre, .scroll")].forEach((it, n) => scrolled[n] && it.scrollTo(...scrolled[n]));
    if (focused) document.querySelectorAll(focused.kind)[focused.number]?.focus({ preventScroll: true });
  }
}

// Somebody fills in a form, chooses, or marks text there.
function isInUse(region) {
  const at = document.activeElement, chosen = getSelection();
  const fills = region.contains(at) && at.matches("input, select, textarea");
  const marks = !chosen.isCollapsed && region.contains(chosen.anchorNode);
  const checked = region.querySelector("input[type=checkbox]:checked");
  return fills || marks || checked !== null;
}

function place(element) {
  const href = element.getAttribute("href");
  const kind = element.tagName.toLowerCase() + (href ? `[href="${CSS.escape(href)}"]` : "");
  return { kind, number: [...document.querySelectorAll(kind)].indexOf(element) };
}

const address = document.body.dataset.stream;
if (address && regions().length) {
  const pulse = document.getElementById("pulse");
  const stream = new EventSource(address);
  const happened = () => later(Math.max(0, asked + LEAST_MS - Date.now()));
  for (const type of ["enqueued", "delayed", "started", "completed", "failed", "expired", "canceled", "dlq"])
    stream.addEventListener(`job.${type}`, happened);
  stream.addEventListener("stream.gap", happened);
  stream.onopen = () => { pulse.hidden = false; };
  stream.onerror = () => { pulse.hidden = true; };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  addEventListener("pagehide", () => stream.close());
  later(pause());
}

// A box with all others of its table.
document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-all]")) return;
  for (const box of event.target.form.querySelectorAll(`input[name="${event.target.dataset.all}"]`))
    box.checked = event.target.checked;
});
