// Searches the built site with the code and the index that its readers' browsers use.
//
//   node docs/search.js build/docs "why divide by the world size" ...    the first hits of each query
//   node docs/search.js build/docs --headings docs/questions.md    fails unless each heading of the
//                                                                  page is the first hit of its words
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...words] = process.argv.slice(2);

// A browser, as far as the scripts of the site need one to search.
const element = { childNodes: [], removeChild() {} };
const whenLoaded = [];
const page = {
  addEventListener: (event, run) => whenLoaded.push(run),
  getElementById: () => element,
  querySelector: () => null,
  querySelectorAll: () => [],
};
const browser = { document: page, SPHINX_HIGHLIGHT_ENABLED: false, _ready() {}, _: (text) => text };
browser.window = browser;
vm.createContext(browser);
const scripts = ["base-stemmer", "english-stemmer", "language_data", "searchtools", "site"];
const files = [...scripts.map((name) => `_static/${name}.js`), "searchindex.js"];
const code = files.map((file) => fs.readFileSync(path.join(site, file), "utf8"));
vm.runInContext([...code, "this.Search = Search;"].join("\n"), browser);
whenLoaded.forEach((run) => run());

// The hits of a query as "page > section", best first. Sphinx returns the best one last.
function search(query) {
  const [, ...terms] = browser.Search._parseQuery(query);
  return browser.Search._performSearch(query, ...terms).reverse().map((hit) => hit[1]);
}

if (words[0] === "--headings") {
  const headings = fs.readFileSync(words[1], "utf8").match(/^### .+$/gm);
  const titles = headings.map((heading) => heading.slice(4));
  const lost = titles.filter((title) => !search(title)[0]?.endsWith(`> ${title}`));
  console.log(`${titles.length - lost.length} of ${titles.length} headings are found by their words`);
  lost.forEach((title) => console.log(`not found: ${title}; first hit: ${search(title)[0]}`));
  process.exitCode = lost.length ? 1 : 0;
} else {
  words.forEach((query) => console.log(`${query}: ${search(query).slice(0, 3).join("; ") || "nothing"}`));
}
