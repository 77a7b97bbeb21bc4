// Colours for code, one line at a time, so that a growing block costs its last line only.

import { h } from "./dom.js";

const LONGEST = 500; // longer lines stay plain

const WORDS = "abstract and as assert async await bool break case catch char class const constexpr "
  + "continue def default defer del delete do double elif else enum except export extends extern "
  + "false False finally float fn for foreach from func function global go goto if impl implements "
  + "import in include instanceof int interface is lambda let long loop match mod module move mut "
  + "namespace new nil None nonlocal not null operator or package pass private protected pub public "
  + "raise ref return self short sizeof static std struct super switch template this throw trait true "
  + "True try type typedef typename typeof union unsafe unsigned use using var virtual void volatile "
  + "where while with yield";
const SHELL = "case cd do done echo elif else esac exit export fi for function if in local read "
  + "return set source then unset until while sudo";
const SQL = "add all alter and as asc between by case create delete desc distinct drop else end "
  + "exists from full group having in index inner insert into is join key left like limit not null "
  + "on or order outer primary references right select set table then union unique update values "
  + "view when where with";

const set = (words) => new Set(words.split(" "));
const C = { words: set(WORDS), line: "//", block: ["/*", "*/"] };
const HASH = { words: set(WORDS), line: "#" };
const FAMILIES = {
  python: { ...HASH, blocks: ['"""', "'''"] },
  shell: { words: set(SHELL), line: "#" },
  sql: { words: set(SQL), line: "--", block: ["/*", "*/"], anyCase: true },
  data: { words: set("true false null yes no"), line: "#" },
  markup: { words: new Set(), block: ["<!--", "-->"], tags: true },
  css: { words: new Set(), block: ["/*", "*/"] },
  c: C,
  hash: HASH,
  none: null,
};
const LANGUAGES = {
  python: "py python python3", shell: "sh bash shell zsh console dockerfile makefile make",
  sql: "sql sqlite postgresql mysql", data: "json yaml yml toml ini jsonc", markup: "html xml svg",
  css: "css scss less", hash: "ruby rb perl r elixir julia",
  none: "text txt plain plaintext markdown md output log diff csv latex tex",
};
const FAMILY_OF = new Map(Object.entries(LANGUAGES)
  .flatMap(([family, names]) => names.split(" ").map((name) => [name, FAMILIES[family]])));

const STRING = /"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|`(?:\\.|[^`\\])*`?/y;
const NUMBER = /\b(?:0[xob][\da-f_]+|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)\w*/iy;
const NAME = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const TAG = /<\/?[\w:-]+|\/?>/y;
const OTHER = /\s+|./uy;

export function familyOf(language) {
  return FAMILY_OF.has(language) ? FAMILY_OF.get(language) : C;
}

/** Nodes of a line and the state for the next one (null, or what ends the open block). */
export function highlightLine(line, family, state) {
  if (!family || line.length > LONGEST) return { nodes: [line], state };
  const nodes = [];
  let plain = "";
  const put = (kind, text) => {
    if (!kind) { plain += text; return; }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(h("span", { class: `tok-${kind}` }, text));
  };
  let at = 0;
  while (at < line.length) {
    if (state) {
      const close = line.indexOf(state, at);
      const end = close < 0 ? line.length : close + state.length;
      put(family.blocks ? "s" : "c", line.slice(at, end));
      if (close >= 0) state = null;
      at = end;
      continue;
    }
    const triple = family.blocks?.find((mark) => line.startsWith(mark, at));
    if (triple || (family.block && line.startsWith(family.block[0], at))) {
      const open = triple ?? family.block[0];
      put(triple ? "s" : "c", open);
      state = triple ?? family.block[1];
      at += open.length;
    } else if (family.line && line.startsWith(family.line, at) && (family.line !== "#" || !/\S/.test(line[at - 1] ?? " "))) {
      put("c", line.slice(at));
      at = line.length;
    } else {
      const [kind, text] = token(line, at, family);
      put(kind, text);
      at += text.length;
    }
  }
  if (plain) nodes.push(plain);
  return { nodes, state };
}

function token(line, at, family) {
  const take = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(line)?.[0];
  };
  let text = family.tags && take(TAG);
  if (text) return ["k", text];
  if ((text = take(STRING))) return ["s", text];
  if ((text = take(NAME))) {
    if (family.words.has(family.anyCase ? text.toLowerCase() : text)) return ["k", text];
    return [line[at + text.length] === "(" ? "f" : null, text];
  }
  if ((text = take(NUMBER))) return ["n", text];
  return [null, take(OTHER)];
}
