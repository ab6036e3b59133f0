// Pages on a phone, and the sections of a page in the results of a search.
"use strict";

// On a narrow screen the theme hides the contents of a page behind an icon.
function showContents() {
  const title = document.querySelector("article h1");
  const tree = document.querySelector(".toc-tree > ul > li > ul");
  if (!title || !tree) return;
  const contents = document.createElement("details");
  contents.className = "contents-of-page";
  contents.innerHTML = "<summary>On this page</summary>";
  contents.append(tree.cloneNode(true));
  title.after(contents);
}

// On a phone, site.css stacks the cells of a wide table, each after the name of its column. A table
// of numbers stays one and scrolls: its rows are to be compared.
function nameColumns() {
  for (const table of document.querySelectorAll("table.docutils:has(thead)")) {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    const numbers = cells.filter((cell) => /^[-+\d]/.test(cell.textContent.trim()));
    for (const cell of cells) cell.dataset.column = names[cell.cellIndex];
    const isWide = cells.some((cell) => !cell.cellIndex && /\S{20}/.test(cell.textContent));
    const stacks = (isWide || names.length > 2) && numbers.length < cells.length / 3;
    table.classList.toggle("stacks", stacks);
  }
}

const MOST_SECTIONS = 3;
const CONTEXT = 80; // characters before and after a word

// The sections of a page that have most of the words, each with the text around one of them.
function findSections(html, words) {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll(".headerlink").forEach((part) => part.remove());
  const sections = [...page.querySelectorAll("[role=main] section")].map((section) => {
    const parts = [...section.children].filter((part) => part.tagName !== "SECTION");
    const title = parts.find((part) => /^H\d$/.test(part.tagName))?.textContent ?? "";
    const text = parts.map((part) => part.textContent).join(" ").replace(/\s+/g, " ");
    const places = words.map((word) => text.toLowerCase().lastIndexOf(word));
    const named = words.filter((word) => title.toLowerCase().includes(word));
    const score = named.length + places.filter((place) => place >= 0).length;
    const start = Math.max(0, Math.max(...places) - CONTEXT);
    const isPage = !section.matches("section section");
    return { id: section.id, isPage, title, score, text: text.slice(start, start + 2 * CONTEXT) };
  });
  const best = Math.max(1, ...sections.map((section) => section.score));
  return sections.filter((section) => section.score === best).slice(0, MOST_SECTIONS);
}

// What Sphinx shows below the name of a page that holds the words of a search.
function summarize(html, keywords) {
  const summary = document.createElement("div");
  const words = [...keywords].map((word) => word.replace(/i$/, "")); // the stem of "memory" is "memori"
  for (const { id, isPage, title, text } of findSections(html, words)) {
    const line = document.createElement("p");
    const link = document.createElement("a");
    link.textContent = title;
    line.className = "context";
    line.append(...(isPage ? [] : [link, ": "]), `...${text.trim()}...`);
    summary.append(line);
    // The line will stand below the link to its page.
    queueMicrotask(() => (link.href = `${summary.parentElement.firstChild.href.split("#")[0]}#${id}`));
  }
  return summary;
}

// A heading that holds all that was searched for comes before pages that hold the words.
const headingsFirst = ([, , , , score, , kind]) => score + (kind === "title" ? 100 : 0);

document.addEventListener("DOMContentLoaded", () => {
  showContents();
  nameColumns();
  if (typeof Search === "undefined") return;
  Search.makeSearchSummary = summarize;
  Scorer.score = headingsFirst;
});
