// Keeps the page up to date: fetches it again, and replaces what has changed. Without it the page is a still picture.
"use strict";

const REFRESH_MS = 1000;
const MAX_REFRESH_MS = 60000;
let pauseMs = REFRESH_MS;
let shown = "";

async function update() {
  const source = document.querySelector("main").dataset.source;
  const answer = await fetch(source, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(10000) });
  if (answer.redirected) return location.reload(); // the session has ended
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const text = await answer.text();
  if (text === shown) return; // the desk has not looked again since
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const element of document.querySelectorAll("[data-live], [data-class]")) {
    const now = fresh.getElementById(element.id);
    if (!now) continue;
    element.className = now.className;
    if ("live" in element.dataset) renew(element, now);
  }
  shown = text;
  const sign = document.getElementById("sign");
  if (sign) document.title = document.title.replace(/^\S+/, sign.textContent);
}

// What has not changed stays as it is: a screen reader is not told again, a selection is kept, and of a long table only
// those cells are laid out again that are new.
function renew(element, now) {
  if (element.isEqualNode(now)) return;
  element.className = now.className;
  const [old, fresh] = [[...element.children], [...now.children]];
  const isTable = element.matches("table, thead, tbody, tr") && old.length === fresh.length;
  if (!isTable) return element.replaceChildren(...now.childNodes);
  old.forEach((child, place) => renew(child, fresh[place]));
}

// A screen reader is told once, and not at each try.
function sayWhetherItAnswers(sentence) {
  const told = document.getElementById("away");
  if (told.textContent !== sentence) told.textContent = sentence;
}

async function keepUpToDate() {
  try {
    await update();
    pauseMs = REFRESH_MS;
    sayWhetherItAnswers("");
  } catch {
    pauseMs = Math.min(2 * pauseMs, MAX_REFRESH_MS); // the desk is busy or away: ask less often
    sayWhetherItAnswers("The desk does not answer at the moment: this page may be out of date.");
  }
  setTimeout(keepUpToDate, pauseMs);
}

function offerCopy() {
  const button = document.getElementById("copy");
  if (!button) return;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const line = document.getElementById("copy-text");
    const told = document.getElementById("copied");
    try {
      await navigator.clipboard.writeText(line.textContent);
      told.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(line); // a browser copies by itself on secure pages only
      told.textContent = "Selected: press Ctrl-C.";
    }
    setTimeout(() => (told.textContent = ""), 4000);
  });
}

async function waitForSignature() {
  const state = await (await fetch(document.querySelector("main").dataset.waits)).text();
  if (state !== "waiting") location.reload(); // let in, or it needs another code
}

offerCopy();
if (document.querySelector("main").dataset.source) setTimeout(keepUpToDate, pauseMs);
if (document.querySelector("main").dataset.waits) setInterval(() => waitForSignature().catch(() => {}), REFRESH_MS);
