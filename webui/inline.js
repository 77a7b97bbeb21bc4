// Markdown inside a block: emphasis, code, links. Makes nodes, never HTML, so text cannot become
// anything else. Every search is bounded, so that no text takes more than linear time.

import { h } from "./dom.js";

const REACH = 2000; // characters that an emphasis, a link or a code span may span
const DEPTH = 6;
const PLAIN = /[^\\`!\[<*_~h\n]+/y;
const URL_START = /https?:\/\/[^\s<>"'`|]+/y;
const AUTOLINK = /<(https?:\/\/[^\s<>]+)>/y;
const BREAK = /<br ?\/?>/iy;
const LINK_END = /\]\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const ESCAPABLE = /[\\`*_~#|<>!+\-.{}]/;
const WORD = /[\p{L}\p{N}]/u;

/** The address of a link that may be followed, or null. Only absolute http, https and mailto. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/**
 * Nodes for `source`, with `cut`: a place in `source` (after a space) where everything before it
 * can no longer change, or 0. Used to leave the finished part of a growing paragraph alone.
 */
export function renderInline(source) {
  const parser = new Inline(source);
  const nodes = parser.nodes(0, source.length, 0);
  return { nodes, cut: parser.cut };
}

class Inline {
  constructor(source) {
    this.source = source;
    this.open = Infinity; // the first place where something was opened and not closed, so far
    this.cut = 0;
  }

  nodes(start, end, depth) {
    const { source } = this;
    const nodes = [];
    let text = "";
    let textStart = start;
    const flush = (at) => {
      if (text) nodes.push(document.createTextNode(text));
      if (depth === 0 && text) this.#mark(textStart, at);
      text = "";
    };
    let at = start;
    while (at < end) {
      const plain = match(PLAIN, source, at);
      if (plain) {
        const length = Math.min(plain[0].length, end - at);
        text += source.slice(at, at + length);
        at += length;
        continue;
      }
      const found = this.#special(at, end, depth);
      if (found.node) {
        flush(at);
        nodes.push(found.node);
        at = found.end;
        textStart = at;
      } else {
        text += found.text;
        at = found.end;
      }
    }
    flush(at);
    return nodes;
  }

  /** Remembers the last safe place to cut in the text [start, end). The tail may still change. */
  #mark(start, end) {
    const at = this.source.lastIndexOf(" ", Math.min(end - 1, this.source.length - 40));
    if (at >= start && at < this.open) this.cut = at + 1;
  }

  /** {node, end} for an element, {text, end} for literal characters. */
  #special(at, end, depth) {
    const { source } = this;
    const char = source[at];
    if (char === "\n") return { node: h("br"), end: at + 1 };
    if (char === "\\") {
      const escaped = at + 1 < end && ESCAPABLE.test(source[at + 1]);
      return { text: escaped ? source[at + 1] : "\\", end: at + (escaped ? 2 : 1) };
    }
    if (char === "`") return this.#code(at, end);
    if (char === "h") return this.#bareUrl(at, end);
    if (char === "<") {
      const br = match(BREAK, source, at);
      if (br) return { node: h("br"), end: at + br[0].length };
      const auto = match(AUTOLINK, source, at);
      const url = auto && safeUrl(auto[1]);
      if (url) return { node: link(url, [auto[1]]), end: at + auto[0].length };
    } else if (depth < DEPTH && (char === "[" || (char === "!" && source[at + 1] === "["))) {
      return this.#link(at, end, depth);
    } else if (depth < DEPTH && "*_~".includes(char)) {
      return this.#emphasis(at, end, depth);
    }
    return { text: char, end: at + 1 };
  }

  #literal(at, length) {
    this.open = Math.min(this.open, at);
    return { text: this.source.slice(at, at + length), end: at + length };
  }

  #code(at, end) {
    const { source } = this;
    const ticks = run(source, at, "`", end);
    const limit = Math.min(end, at + REACH);
    for (let from = at + ticks; from < limit;) {
      const close = source.indexOf("`", from);
      if (close < 0 || close >= limit) break;
      const length = run(source, close, "`", end);
      if (length === ticks) {
        let inner = source.slice(at + ticks, close).replaceAll("\n", " ");
        if (/^ .*[^ ].* $/.test(inner)) inner = inner.slice(1, -1);
        return { node: h("code", {}, inner), end: close + length };
      }
      from = close + length;
    }
    return this.#literal(at, ticks);
  }

  #bareUrl(at, end) {
    const found = !WORD.test(this.source[at - 1] ?? "") && match(URL_START, this.source, at);
    if (!found) return { text: "h", end: at + 1 };
    let address = found[0].slice(0, end - at).replace(/[.,;:!?*_~\]]+$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    const url = safeUrl(address);
    if (!url) return { text: "h", end: at + 1 };
    return { node: link(url, [address]), end: at + address.length };
  }

  #link(at, end, depth) {
    const { source } = this;
    const start = source.indexOf("[", at) + 1;
    let level = 1;
    let close = start;
    const limit = Math.min(end, start + REACH);
    for (; close < limit; close++) {
      if (source[close] === "\\") close++;
      else if (source[close] === "[") level++;
      else if (source[close] === "]" && --level === 0) break;
    }
    if (close >= limit) return this.#literal(at, start - at);
    const target = match(LINK_END, source, close);
    if (!target || close + target[0].length > end) {
      return close > end - 200 ? this.#literal(at, start - at)
        : { text: source.slice(at, start), end: start };
    }
    const url = safeUrl(target[1]);
    const after = close + target[0].length;
    const label = this.nodes(start, close, DEPTH); // no links in links
    // A picture is never fetched: it becomes a link to it. An unsafe link keeps only its words.
    if (!label.length) label.push(document.createTextNode(target[1]));
    return { node: url ? link(url, label) : h("span", {}, ...label), end: after };
  }

  #emphasis(at, end, depth) {
    const { source } = this;
    const char = source[at];
    const length = Math.min(run(source, at, char, end), 3);
    const before = source[at - 1] ?? " ";
    const next = source[at + length] ?? " ";
    const opens = !/\s/.test(next) && !(char === "_" && WORD.test(before)) && !(char === "~" && length !== 2);
    if (!opens || at + length >= end) {
      return at + length >= end ? this.#literal(at, length)
        : { text: source.slice(at, at + length), end: at + length };
    }
    const close = this.#closer(at + length, end, char, length);
    if (close < 0) return this.#literal(at, length);
    const inner = this.nodes(at + length, close, depth + 1);
    const tag = char === "~" ? "del" : length === 1 ? "em" : "strong";
    let node = h(tag, {}, ...inner);
    if (length === 3) node = h("em", {}, node);
    return { node, end: close + length };
  }

  #closer(from, end, char, length) {
    const { source } = this;
    const limit = Math.min(end, from + REACH);
    for (let at = from; at < limit; at++) {
      if (source[at] === "\\") at++;
      else if (source[at] === "`") at += run(source, at, "`", end) - 1;
      else if (source[at] === char) {
        const count = run(source, at, char, end);
        const closes = count === length || (count === 3 && length < 3);
        if (closes && !/\s/.test(source[at - 1])
          && !(char === "_" && WORD.test(source[at + count] ?? ""))) {
          return at + count - length;
        }
        at += count - 1;
      }
    }
    return -1;
  }
}

function match(pattern, source, at) {
  pattern.lastIndex = at;
  return pattern.exec(source);
}

function run(source, at, char, end) {
  let length = 0;
  while (at + length < end && source[at + length] === char) length++;
  return length;
}

function link(url, children) {
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url },
    ...children);
}
