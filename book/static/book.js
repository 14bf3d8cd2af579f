// Draws the figures of a page, and searches all pages. Needs no server: search.js holds the sections.
"use strict";

const HITS = 20; // shown at once

for (const box of document.querySelectorAll(".figure")) {
  const stored = JSON.parse(box.querySelector("script").textContent);
  Plotly.newPlot(box, stored.data, stored.layout, { displaylogo: false }).catch((e) => console.error(e));
}

function search(typed) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const rated = [];
  for (const section of window.BOOK_SECTIONS) {
    const title = section.title.toLowerCase();
    const text = section.text.toLowerCase();
    if (!words.every((w) => title.includes(w) || text.includes(w))) continue;
    // a word in a heading counts more than any number of times in the text
    const rate = words.reduce((sum, w) => sum + (title.includes(w) ? 100 : 0) + Math.min(text.split(w).length - 1, 50), 0);
    rated.push({ section, rate, at: Math.max(text.indexOf(words[0]), 0) });
  }
  return rated.sort((a, b) => b.rate - a.rate);
}

function show(typed, place) {
  place.replaceChildren();
  if (!typed.trim()) return;
  const hits = search(typed);
  const count = document.createElement("p");
  count.textContent = hits.length ? `${hits.length} section${hits.length > 1 ? "s" : ""}` : "Nothing found.";
  place.append(count);
  for (const { section, at } of hits.slice(0, HITS)) {
    const link = document.createElement("a");
    link.href = section.url;
    link.textContent = section.title === section.page ? section.page : `${section.page}: ${section.title}`;
    const around = document.createElement("span");
    around.textContent = "… " + section.text.slice(Math.max(at - 40, 0), at + 80) + " …";
    place.append(link, around);
  }
}

const field = document.getElementById("search");
field.addEventListener("input", () => show(field.value, document.getElementById("found")));
