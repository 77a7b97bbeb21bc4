// Markdown as it arrives. Lines that are complete are never looked at again; the open line is taken
// back and read anew with every piece, unless more text cannot change what it is: then the piece is
// only added to its paragraph. The cost of a piece depends on the last line, not on the answer.

import { cells, codeBlock, tableBlock, tableRow } from "./blocks.js";
import { h } from "./dom.js";
import { familyOf, highlightLine } from "./highlight.js";
import { renderInline } from "./inline.js";

const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const FENCE = /^ *(`{3,}|~{3,}) *([^`]*)$/;
const MARKER = /^( *)([-+*]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const SEPARATOR = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
// Lines whose kind is decided however they go on.
const SETTLED = /^(?:[^\s#>\-+*\d`~_]|\d+[^\d.)]|(?:\*\*?|__?|`)[^\s*_`]|\d+[.)]\S|[-+]+[^\s\-+])/;
const FREEZE = 400; // characters of a paragraph that may still be rendered again
const FORCE = 4000; // characters after which it is not, even if something in it is still open

export class Markdown {
	#root;
	#stack; // containers: {kind: doc | quote | list | item, el, ...}
	#leaf = null; // what the next line may go on: {kind: p | h | code | table, ...}
	#pending = ""; // the open line
	#streaming = false; // the open line is in #leaf already, and only grows
	#saved = null; // how to take the open line back

	constructor(root) {
		this.#root = root;
		this.#stack = [{ kind: "doc", el: root }];
	}

	push(piece) {
		let text = piece.replaceAll("\r", "");
		if (this.#streaming) {
			const end = text.indexOf("\n");
			this.#leaf.text += end < 0 ? text : text.slice(0, end);
			if (end < 0) return this.#paint();
			this.#streaming = false;
			text = text.slice(end + 1);
		}
		this.#rollback();
		const lines = (this.#pending + text).split("\n");
		this.#pending = lines.pop();
		for (const line of lines) this.#line(line);
		if (this.#pending) this.#openLine();
		this.#paint();
	}

	/** No more text comes. */
	end() {
		this.#streaming = false;
		this.#rollback();
		if (this.#pending) this.#line(this.#pending);
		this.#pending = "";
		this.#setLeaf(null);
	}

	#openLine() {
		const leaf = this.#leaf;
		this.#saved = { stack: [...this.#stack], leaf, fields: { ...leaf }, added: [] };
		const rest = this.#line(this.#pending);
		if (rest !== null && (SETTLED.test(rest) || rest.length > 60)) {
			this.#saved = null;
			this.#streaming = true;
			this.#pending = "";
		}
	}

	#rollback() {
		if (!this.#saved) return;
		for (const node of this.#saved.added.reverse()) node.remove();
		this.#stack = this.#saved.stack;
		this.#leaf = this.#saved.leaf;
		if (this.#leaf) Object.assign(this.#leaf, this.#saved.fields, { painted: null });
		this.#saved = null;
	}

	#add(element, parent = this.#stack.at(-1).el) {
		parent.append(element);
		this.#saved?.added.push(element);
		return element;
	}

	#setLeaf(leaf) {
		if (this.#leaf) this.#paint();
		this.#leaf = leaf;
	}

	/** Reads one line. Returns the text that went to a paragraph or heading, or null. */
	#line(line) {
		if (this.#leaf?.kind === "code") return this.#codeLine(line);
		if (this.#leaf?.kind === "h") this.#setLeaf(null);
		let rest = line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
		const blank = !rest.trim();
		let depth = 1;
		for (; depth < this.#stack.length; depth++) {
			const inside = enter(this.#stack[depth], rest, blank);
			if (inside === null) break;
			rest = inside;
		}
		if (!rest.trim()) {
			this.#setLeaf(null);
			if (!blank || this.#stack[depth]?.kind === "quote") this.#close(depth);
			return null;
		}
		if (depth < this.#stack.length) {
			if (this.#leaf?.kind === "p" && !startsBlock(rest)) return this.#text(rest);
			this.#close(depth);
		}
		rest = this.#containers(rest);
		return rest === null ? null : this.#leafLine(rest);
	}

	#close(depth) {
		this.#setLeaf(null);
		this.#stack.length = depth;
	}

	/** Opens quotes and lists that begin here; null when the line is used up. */
	#containers(rest) {
		for (;;) {
			const quote = QUOTE.exec(rest);
			const marker = RULE.test(rest) ? null : MARKER.exec(rest);
			// "1986. A good year" in the middle of a paragraph is no list.
			const list = marker && !(this.#leaf?.kind === "p" && /^\d/.test(marker[2])
				&& Number.parseInt(marker[2], 10) !== 1) ? marker : null;
			if (quote) {
				this.#leaveList();
				this.#setLeaf(null);
				this.#stack.push({ kind: "quote", el: this.#add(h("blockquote")) });
				rest = rest.slice(quote[0].length);
			} else if (list) {
				this.#setLeaf(null);
				this.#item(list);
				rest = rest.slice(list[0].length);
			} else {
				this.#leaveList();
				return rest.trim() ? rest : null;
			}
		}
	}

	#leaveList() {
		if (this.#stack.at(-1).kind === "list") this.#stack.pop();
	}

	#item([whole, space, mark]) {
		const tag = /^\d/.test(mark) ? "ol" : "ul";
		if (this.#stack.at(-1).tag !== tag) {
			this.#leaveList();
			const el = this.#add(h(tag));
			if (tag === "ol" && Number.parseInt(mark, 10) !== 1) el.start = Number.parseInt(mark, 10);
			this.#stack.push({ kind: "list", tag, el });
		}
		const extra = whole.length - space.length - mark.length;
		const indent = space.length + mark.length + Math.min(Math.max(extra, 1), 4);
		this.#stack.push({ kind: "item", indent, margin: space.length, el: this.#add(h("li")) });
	}

	#leafLine(rest) {
		if (RULE.test(rest)) {
			this.#setLeaf(null);
			this.#add(h("hr"));
			return null;
		}
		const fence = FENCE.exec(rest);
		if (fence) return this.#fence(rest, fence);
		const heading = HEADING.exec(rest);
		if (heading) {
			this.#setLeaf({ kind: "h", el: this.#add(h(`h${heading[1].length}`)), ...EMPTY,
				text: heading[2].replace(/\s+#+\s*$/, "") });
			return heading[2] ? `x${heading[2]}` : null;
		}
		if (this.#leaf?.kind === "table") return this.#row(rest);
		if (this.#leaf?.kind === "p" && rest.includes("|") && this.#leaf.text.includes("|")
			&& /^[ |:-]+$/.test(rest)) {
			if (this.#saved) return null; // half of a separator: not shown
			const head = this.#leaf.text.slice(this.#leaf.text.lastIndexOf("\n") + 1);
			if (SEPARATOR.test(rest) && cells(head).length === cells(rest).length) return this.#table(head, rest);
		}
		return this.#text(rest);
	}

	#text(rest) {
		const text = rest.trimStart();
		if (this.#leaf?.kind === "p") this.#leaf.text += `\n${text}`;
		else this.#setLeaf({ kind: "p", el: this.#add(h("p")), ...EMPTY, text });
		return text;
	}

	// ---- code

	#fence(rest, [, mark, info]) {
		const language = info.trim().split(/[\s{,]/)[0].toLowerCase();
		const { block, code } = codeBlock(language);
		this.#add(block);
		const indent = rest.length - rest.trimStart().length;
		this.#setLeaf({ kind: "code", el: code, mark, indent, family: language ? familyOf(language) : null,
			state: null });
		return null;
	}

	#codeLine(line) {
		const leaf = this.#leaf;
		const trimmed = line.trim();
		const marks = new RegExp(`^\\${leaf.mark[0]}+$`).test(trimmed);
		if (marks && trimmed.length >= leaf.mark.length) {
			this.#setLeaf(null);
			return null;
		}
		if (marks && this.#saved) return null; // perhaps the end: not shown yet
		const depth = this.#stack.reduce((sum, { indent = 0 }) => sum + indent, leaf.indent);
		let text = line;
		for (const { kind } of this.#stack) if (kind === "quote") text = text.replace(QUOTE, "");
		text = text.replace(new RegExp(`^ {0,${depth}}`), "");
		const { nodes, state } = highlightLine(text, leaf.family, leaf.state);
		leaf.state = state;
		for (const node of [...nodes, "\n"]) {
			this.#add(typeof node === "string" ? document.createTextNode(node) : node, leaf.el);
		}
		return null;
	}

	// ---- tables

	#table(head, separator) {
		const { el } = this.#leaf;
		const before = this.#leaf.text.slice(0, this.#leaf.text.lastIndexOf("\n") + 1).trimEnd();
		this.#leaf = { ...this.#leaf, ...EMPTY, text: before };
		el.replaceChildren();
		this.#setLeaf(null);
		const { block, body, align } = tableBlock(head, separator);
		this.#add(block);
		if (!before) el.remove();
		this.#leaf = { kind: "table", el: body, align };
		return null;
	}

	#row(rest) {
		this.#add(tableRow(rest, this.#leaf.align), this.#leaf.el);
		return null;
	}

	// ---- text

	/** Brings the open paragraph or heading up to date; its finished part is left alone. */
	#paint() {
		const leaf = this.#leaf;
		if (!leaf || leaf.text === undefined || leaf.painted === leaf.text) return;
		for (;;) {
			while (leaf.el.childNodes.length > leaf.kept) leaf.el.lastChild.remove();
			const source = leaf.text.slice(leaf.frozen, leaf.frozen + FORCE);
			const full = source.length === FORCE;
			const { nodes, cut } = renderInline(source);
			const at = cut || (full ? FORCE : 0);
			if (!full && (this.#saved || source.length < FREEZE || !at)) {
				leaf.el.append(...nodes);
				leaf.painted = leaf.text;
				return;
			}
			leaf.el.append(...renderInline(source.slice(0, at)).nodes);
			leaf.frozen += at;
			leaf.kept = leaf.el.childNodes.length;
		}
	}
}

const EMPTY = { text: "", painted: null, frozen: 0, kept: 0 };

/** What is left of a line inside a container, or null when the line does not belong to it. */
function enter(container, rest, blank) {
	if (container.kind === "list") return rest;
	if (container.kind === "quote") return QUOTE.test(rest) ? rest.replace(QUOTE, "") : null;
	if (blank) return rest;
	const indent = rest.length - rest.trimStart().length;
	const nested = indent >= container.margin + 2 && MARKER.test(rest); // models indent by two, or four
	return indent >= container.indent || nested ? rest.slice(Math.min(indent, container.indent)) : null;
}

function startsBlock(rest) {
	return [RULE, FENCE, HEADING, MARKER, QUOTE].some((pattern) => pattern.test(rest));
}
