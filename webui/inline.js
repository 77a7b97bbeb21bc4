// Inline Markdown: emphasis, code, links, formulas. Builds DOM nodes, never HTML strings.
//
// Two passes in linear time. The first finds code, formulas, links, escapes and runs of emphasis marks; the
// second pairs the runs. Nesting is limited; deeper text stays plain.

import { h } from "./dom.js";
import { formula } from "./math.js";

export const MAX_LENGTH = 2000; // characters that are parsed together
const MAX_DEPTH = 8; // nested emphasis and link labels

const START = /[\\$`!\[<*~_\n]|https?:/g;
// Constructs that begin at a START. No repetition is ambiguous, and each stops at the next construct of its kind.
const SIMPLE = new RegExp([
	/\\(?<escaped>[\\`*_~#|<>!+\-.{}$])/,
	/\$\$(?<block>[^$]+)\$\$/,
	// Not an amount of money: no space inside the dollars, no digit after them.
	/(?<![\p{L}\p{N}$])\$(?=[^\s$])(?<dollars>(?:\\[^\n]|[^$\\\n])+)(?<!\s)\$(?![\p{N}$])/,
	/<(?<auto>https?:\/\/[^\s<>]+)>/,
	/(?<bare>(?<![\p{L}\p{N}])https?:\/\/[^\s<>"'`|]*[^\s<>"'`|.,;:!?*_~\])])/,
	/(?<br>\n|<br ?\/?>)/,
].map(({ source }) => source).join("|"), "uy");
const TARGET = /\(\s{0,9}<?(?<target>(?:[^\s()<>]|\([^\s()]*\))*)>?(?:\s{1,9}"[^"]*")?\s{0,9}\)/y;
const TICKS = /`+/g;
// Text that may become a construct when more text arrives.
const OPEN = /[`[$]|\\\(|[*~](?=\S|$)|(?<![\p{L}\p{N}])_|https?:\S*$/u;

/** A URL that a link may have, or null. Only absolute http, https and mailto. */
function safeUrl(text) {
	try {
		const url = new URL(text);
		return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
	} catch {
		return null;
	}
}

/** Nodes for a complete text; plain when it is longer than MAX_LENGTH. */
export function inlineNodes(source, inLink = false, depth = 0) {
	if (source.length > MAX_LENGTH || depth > MAX_DEPTH) return [document.createTextNode(source)];
	return inlineTokens(source, depth).tokens.map((token) => nodeOf(token, source, inLink, depth));
}

/**
 * Tokens of `source`, and `cut`: an offset after a space before which the text is final, or 0.
 * A growing paragraph parses only the text after it again.
 */
export function inlineTokens(source, depth = 0) {
	const tokens = pair(scan(source), 0, source.length, source, depth);
	let cut = 0;
	for (const { kind, start, raw } of tokens) {
		const limit = source.length - 40 - start;
		if (kind !== "text" || limit < 0) continue;
		const open = raw.search(OPEN);
		const space = raw.lastIndexOf(" ", open < 0 ? limit : Math.min(open, limit));
		if (space >= 0) cut = start + space + 1;
		if (open >= 0) break;
	}
	return { tokens, cut };
}

/** Constructs and runs of marks in order: [{kind, start, end, ...}]. */
function scan(source) {
	const found = [];
	const ticks = tickRuns(source);
	const brackets = bracketPairs(source);
	let noTex = false; // no \) follows
	START.lastIndex = 0;
	for (let match = START.exec(source); match; match = START.exec(source)) {
		const start = match.index;
		const char = match[0];
		let item = null;
		if (char === "`") item = codeSpan(source, start, ticks);
		else if (/[*~_]/.test(char)) item = markRun(source, start);
		else if (char === "[" || (char === "!" && source[start + 1] === "[")) item = link(source, start, brackets);
		else if (char === "\\" && source[start + 1] === "(" && !noTex) {
			const end = source.indexOf("\\)", start + 2);
			noTex = end < 0;
			if (!noTex) item = { kind: "formula", end: end + 2, tex: source.slice(start + 2, end) };
		}
		item ??= simple(source, start);
		if (item.kind) found.push({ start, ...item });
		START.lastIndex = item.end;
	}
	return found;
}

function simple(source, start) {
	SIMPLE.lastIndex = start;
	const match = SIMPLE.exec(source);
	if (!match) return { end: start + 1 };
	const { escaped, block, dollars, auto, bare } = match.groups;
	const end = start + match[0].length;
	if (escaped) return { kind: "escaped", end, escaped };
	if (block ?? dollars) return { kind: "formula", end, tex: block ?? dollars, display: Boolean(block) };
	if (auto ?? bare) return { kind: "link", end, target: auto ?? bare };
	return { kind: "br", end };
}

/** Length of a run -> matches of the runs of backticks with that length, last first. */
const tickRuns = (source) => Map.groupBy([...source.matchAll(TICKS)].reverse(), ([run]) => run.length);

function codeSpan(source, start, runs) {
	let inside = start;
	while (source[inside] === "`") inside += 1;
	const closing = runs.get(inside - start) ?? [];
	while (closing.at(-1)?.index < inside) closing.pop();
	const end = closing.at(-1)?.index;
	if (end === undefined || source[start - 1] === "`") return { end: inside };
	return { kind: "code", end: end + inside - start, code: source.slice(inside, end) };
}

/** Offset of each [ -> offset of its ]. */
function bracketPairs(source) {
	const pairs = new Map();
	if (!source.includes("](")) return pairs;
	const open = [];
	for (const { 0: char, index } of source.matchAll(/\\[^]|[[\]]/g)) {
		if (char === "[") open.push(index);
		else if (char === "]" && open.length) pairs.set(open.pop(), index);
	}
	return pairs;
}

function link(source, start, brackets) {
	const open = source.indexOf("[", start);
	const close = brackets.get(open);
	if (close === undefined || source[close + 1] !== "(") return { end: open + 1 };
	TARGET.lastIndex = close + 1;
	const match = TARGET.exec(source);
	if (!match) return { end: open + 1 };
	return { kind: "link", end: close + 1 + match[0].length, label: source.slice(open + 1, close), target: match.groups.target };
}

/** A run of `*`, `_` or `~`; `_` does not work inside words. */
function markRun(source, start) {
	const mark = source[start];
	let end = start + 1;
	while (source[end] === mark) end += 1;
	const size = end - start;
	if (mark === "~" ? size !== 2 : size > 3) return { end };
	const before = source[start - 1] ?? " ";
	const after = source[end] ?? " ";
	const word = mark === "_" ? /[\p{L}\p{N}]/u : /[^]{2}/;
	return { kind: "mark", end, mark, size, opens: /\S/.test(after) && !word.test(before), closes: /\S/.test(before) && !word.test(after) };
}

/** Tokens of the items between two offsets: runs of marks become emphasis or text. */
function pair(items, start, end, source, depth) {
	const tokens = [];
	let at = start;
	const emit = (token) => {
		if (token.start > at) tokens.push({ kind: "text", start: at, raw: source.slice(at, token.start) });
		if (token.end > token.start) tokens.push({ ...token, raw: source.slice(token.start, token.end) });
		at = token.end;
	};
	const closers = closingRuns(items);
	const find = (mark, size, i) => {
		const list = closers.get(mark + size) ?? [];
		while (list.at(-1) <= i) list.pop();
		return list.at(-1);
	};
	for (let i = 0; i < items.length; i++) {
		const item = items[i];
		if (item.kind !== "mark") emit(item);
		if (!item.opens || depth >= MAX_DEPTH) continue;
		let { size } = item;
		let close = find(item.mark, size, i);
		if (close === undefined && size === 3) {
			const [one, two] = [find(item.mark, 1, i), find(item.mark, 2, i)];
			if (one === undefined || two === undefined) continue;
			[size, close] = one > two ? [1, one] : [2, two];
		}
		if (close === undefined) continue;
		const last = items[close];
		const inside = items.slice(i + 1, close);
		const [from, to] = [item.start + size, last.end - size];
		if (from < item.end) inside.unshift({ ...item, start: from, size: item.size - size, closes: false });
		if (to > last.start) inside.push({ ...last, end: to, size: last.size - size, opens: false });
		emit({ kind: "emphasis", start: item.start, end: last.end, mark: item.mark, size,
			children: () => pair(inside, from, to, source, depth + 1) });
		i = close;
	}
	emit({ start: end, end });
	return tokens;
}

/** Mark and size -> indices of the runs that close it, last first. A run of three also closes one or two. */
function closingRuns(items) {
	const closers = new Map();
	for (let i = items.length - 1; i >= 0; i--) {
		const { closes, mark, size } = items[i];
		for (const part of closes ? (size === 3 ? [1, 2, 3] : [size]) : []) {
			if (!closers.has(mark + part)) closers.set(mark + part, []);
			closers.get(mark + part).push(i);
		}
	}
	return closers;
}

/** The node of a token of `source`. */
export function nodeOf(token, source, inLink = false, depth = 0) {
	const { kind, raw, mark, size, label, target } = token;
	switch (kind) {
	case "text": return document.createTextNode(raw);
	case "escaped": return document.createTextNode(token.escaped);
	case "formula": return formula(token.tex, token.display);
	case "code": return h("code", {}, token.code.replaceAll("\n", " ").replace(/^ ([^]*\S[^]*) $/, "$1"));
	case "br": return h("br");
	case "emphasis": {
		const children = token.children().map((child) => nodeOf(child, source, inLink, depth + 1));
		const node = h(mark === "~" ? "del" : size === 1 ? "em" : "strong", {}, ...children);
		return size === 3 ? h("em", {}, node) : node;
	}
	}
	// Images are never fetched: they become links. An unsafe link becomes its text.
	const url = inLink ? null : safeUrl(target);
	const words = label === undefined ? [target] : inlineNodes(label || target, true, depth + 1);
	return url ? h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, ...words)
		: h("span", {}, ...words);
}
