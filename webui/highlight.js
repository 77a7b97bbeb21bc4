// Syntax highlighting line by line: a growing block re-renders only its last line.

import { h } from "./dom.js";

const LONGEST = 500; // longer lines stay plain
const WORDS = new Set(("and as assert async await auto bool break case catch char class const continue def "
	+ "default del delete do done double echo elif else enum except export extends extern false False fi "
	+ "finally float fn for from func function go if impl import in include int interface is lambda let long "
	+ "match mut namespace new nil None not null or package pass private protected pub public raise return "
	+ "self static struct super switch template then this throw trait true True try type typedef union unsafe "
	+ "unsigned use using var virtual void where while with yield").split(" "));
const PLAIN = /^(?:te?xt|plain.*|markdown|md|output|log|diff|csv|latex|tex)$/;
const HASH = /^(?:py.*|sh|bash|zsh|shell|console|docker.*|make.*|ya?ml|toml|ini|rb|ruby|perl|r|julia|elixir)$/;
const DASH = /^(?:.*sql.*|lua|haskell|hs)$/;
const MARKUP = /^(?:html|xml|svg|vue)$/;

const TOKENS = [ // [kind, pattern]; a name's kind depends on the name
	["s", /"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|`(?:\\.|[^`\\])*`?/y],
	["name", /[\p{L}_$][\p{L}\p{N}_$]*/uy],
	["n", /\d[\w.]*/y],
	[null, /\s+|./uy],
];
const TAG = ["k", /<\/?[\w:-]+|\/?>/y];

/** Lexical rules of a language: {line, blocks: [[open, close, kind]], tokens, upper}, or null. */
export function familyOf(language) {
	if (PLAIN.test(language)) return null;
	const markup = MARKUP.test(language);
	const line = HASH.test(language) ? "#" : DASH.test(language) ? "--" : markup ? null : "//";
	const blocks = markup ? [["<!--", "-->", "c"]]
		: line === "//" ? [["/*", "*/", "c"]] : ['"""', "'''"].map((mark) => [mark, mark, "s"]);
	return { line, blocks, tokens: markup ? [TAG, ...TOKENS] : TOKENS, upper: line === "--" };
}

/** Nodes of a line and the state for the next line: the open block, or null. */
export function highlightLine(line, family, state) {
	if (!family || line.length > LONGEST) return { nodes: [line], state };
	const nodes = [];
	let plain = "";
	for (let at = 0; at < line.length;) {
		let [kind, text] = [null, ""];
		const open = state ? null : family.blocks.find(([mark]) => line.startsWith(mark, at));
		if (state || open) {
			const [mark, end, of] = state ?? open;
			const close = line.indexOf(end, open ? at + mark.length : at);
			state = close < 0 ? state ?? open : null;
			[kind, text] = [of, line.slice(at, close < 0 ? undefined : close + end.length)];
		} else if (family.line && line.startsWith(family.line, at) && !/[^\s;]/.test(line[at - 1] ?? " ")) {
			[kind, text] = ["c", line.slice(at)];
		} else {
			[kind, text] = token(line, at, family);
		}
		at += text.length;
		if (!kind) { plain += text; continue; }
		if (plain) nodes.push(plain);
		plain = "";
		nodes.push(h("span", { class: `tok-${kind}` }, text));
	}
	if (plain) nodes.push(plain);
	return { nodes, state };
}

function token(line, at, { tokens, upper }) {
	for (const [kind, pattern] of tokens) {
		pattern.lastIndex = at;
		const text = pattern.exec(line)?.[0];
		if (!text) continue;
		if (kind !== "name") return [kind, text];
		if (WORDS.has(text) || (upper && /^[A-Z]{2,}$/.test(text))) return ["k", text];
		return [line[at + text.length] === "(" ? "f" : null, text];
	}
	return [null, line.slice(at)];
}
