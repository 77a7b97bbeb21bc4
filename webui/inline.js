// Inline Markdown: emphasis, code, links, formulas. Builds DOM nodes, never HTML strings.

import { h } from "./dom.js";
import { formula } from "./math.js";

// Inline constructs in order of precedence. `_` does not work inside words. No repetition is
// ambiguous, so matching takes linear time.
const TOKEN = new RegExp([
	/\\\((?<tex>[^]*?)\\\)/,
	/\\(?<escaped>[\\`*_~#|<>!+\-.{}$])/,
	/\$\$(?<block>[^$]+)\$\$/,
	// Not an amount of money: no space inside the dollars, no digit after them.
	/(?<![\p{L}\p{N}$])\$(?=[^\s$])(?<dollars>(?:\\.|[^$\\\n])*?[^\s$\\])\$(?![\p{N}$])/,
	/(?<!`)(?<ticks>`+)(?<code>[^`](?:[^]*?[^`])?)\k<ticks>(?!`)/,
	/!?\[(?<label>(?:\\.|\[[^\]]*\]|[^\]\\[])*)\]\(\s*<?(?<target>(?:[^\s()<>]|\([^\s()]*\))*)>?(?:\s+"[^"]*")?\s*\)/,
	/<(?<auto>https?:\/\/[^\s<>]+)>/,
	/(?<bare>(?<![\p{L}\p{N}])https?:\/\/[^\s<>"'`|]*[^\s<>"'`|.,;:!?*_~\])])/,
	/(?<mark>\*{1,3}|~~|(?<![\p{L}\p{N}_])_{1,3})(?=\S)(?<inner>(?:`[^`]*`|`(?![^`]*`)|\\.|[^`\\])*?(?:[^\s\\*]|[^\s*]\*(?=\*\*)))\k<mark>(?!\*|_|~)(?<!_(?=[\p{L}\p{N}]))/,
	/(?<br>\n|<br ?\/?>)/,
].map(({ source }) => source).join("|"), "gu");
// Text that may become one of them when more text arrives.
const OPEN = /[`[$]|\\\(|[*~](?=\S|$)|(?<![\p{L}\p{N}])_|https?:\S*$/u;

/** A URL that a link may have, or null. Only absolute http, https and mailto. */
export function safeUrl(text) {
	try {
		const url = new URL(text);
		return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
	} catch {
		return null;
	}
}

/**
 * Nodes for `source`, and `cut`: an offset after a space before which the text is final, or 0.
 * A growing paragraph re-renders only the text after it.
 */
export function renderInline(source, inLink = false) {
	const nodes = [];
	let cut = 0;
	let open = false;
	let at = 0;
	const text = (end) => {
		const piece = source.slice(at, end);
		if (piece) nodes.push(document.createTextNode(piece));
		const last = piece.slice(0, Math.max(0, source.length - 40 - at)).search(OPEN);
		const space = open ? -1 : piece.lastIndexOf(" ", last < 0 ? source.length - 40 - at : last);
		open ||= OPEN.test(piece);
		if (space >= 0) cut = at + space + 1;
	};
	for (const found of source.matchAll(TOKEN)) {
		text(found.index);
		nodes.push(element(found.groups, inLink) ?? document.createTextNode(found[0]));
		at = found.index + found[0].length;
	}
	text(source.length);
	return { nodes, cut };
}

function element({ escaped, tex, block, dollars, code, label, target, auto, bare, mark, inner, br }, inLink) {
	const inside = (source, link = inLink) => renderInline(source, link).nodes;
	if (escaped) return document.createTextNode(escaped);
	if (tex ?? dollars) return formula(tex ?? dollars);
	if (block) return formula(block, true);
	if (code) return h("code", {}, code.replaceAll("\n", " ").replace(/^ (.*\S.*) $/, "$1"));
	if (br) return h("br");
	if (mark) {
		const node = h(mark === "~~" ? "del" : mark.length === 1 ? "em" : "strong", {}, ...inside(inner));
		return mark.length === 3 ? h("em", {}, node) : node;
	}
	// Images are never fetched: they become links. An unsafe link becomes its text.
	const url = inLink ? null : safeUrl(target ?? auto ?? bare);
	const words = label === undefined ? [auto ?? bare] : inside(label || target, true);
	return url ? h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, ...words)
		: h("span", {}, ...words);
}
