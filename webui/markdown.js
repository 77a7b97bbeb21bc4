// Incremental Markdown renderer. Complete lines are final. The open line is rolled back and parsed
// again with every piece, unless further text cannot change its kind: then the piece is appended to
// its paragraph. The cost of a piece depends on the last line, not on the length of the answer.

import { cells, codeBlock, tableBlock, tableRow, taskCheckbox } from "./blocks.js";
import { h } from "./dom.js";
import { EMPTY, paint } from "./growing_text.js";
import { familyOf, highlightLine } from "./highlight.js";
import * as lines from "./markdown_lines.js";
import { formula } from "./math.js";

const OFTEN = 250; // characters of an open line up to which every piece is shown; then growth by a quarter
const MAX_CONTAINERS = 20; // nested quotes, lists and items; deeper markers are text
const MAX_COLUMNS = 100; // of a table
const MAX_FORMULA = 4000; // characters of a formula over several lines

export class Markdown {
	#root;
	#stack; // containers: {kind: doc | quote | list | item, el, ...}
	#leaf = null; // the block that the next line may continue: {kind: p | h | code | formula | table, ...}
	#pending = ""; // the open line
	#streaming = false; // the open line is in #leaf and only grows
	#saved = null; // state before the open line, for rollback
	#due = 0; // length of the open line at which it is parsed again

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
		const complete = text.split("\n");
		complete[0] = this.#pending + complete[0];
		if (complete.length === 1 && complete[0].length < this.#due) {
			this.#pending = complete[0];
			return;
		}
		this.#rollback();
		this.#pending = complete.pop();
		this.#due = this.#pending.length > OFTEN ? 1.25 * this.#pending.length : 0;
		for (const line of complete) this.#line(line);
		this.#paint(); // freezes text before the open line, which may be rolled back
		if (this.#pending) this.#openLine();
		this.#paint();
	}

	/** Ends the document. */
	end() {
		this.#streaming = false;
		this.#rollback();
		if (this.#pending) this.#line(this.#pending);
		this.#setLeaf(null);
	}

	#openLine() {
		const leaf = this.#leaf;
		this.#saved = { stack: [...this.#stack], leaf, fields: { ...leaf }, added: [] };
		const rest = this.#line(this.#pending);
		if (rest !== null && (lines.SETTLED.test(rest) || rest.length > 60)) {
			this.#saved = null;
			this.#streaming = true;
			this.#pending = "";
			this.#due = 0;
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

	/** Parses one line. Returns the text added to a paragraph or heading, or null. */
	#line(line) {
		if (this.#leaf?.kind === "code") return this.#codeLine(line);
		if (this.#leaf?.kind === "formula") return this.#formulaLine(line);
		if (this.#leaf?.kind === "h") this.#setLeaf(null);
		let rest = line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
		const blank = !rest.trim();
		let depth = 1;
		for (; depth < this.#stack.length; depth++) {
			const inside = lines.enter(this.#stack[depth], rest, blank);
			if (inside === null) break;
			rest = inside;
		}
		if (!rest.trim()) {
			this.#setLeaf(null);
			if (!blank || this.#stack[depth]?.kind === "quote") this.#close(depth);
			return null;
		}
		if (depth < this.#stack.length) {
			const half = this.#saved && lines.FORMULA_BEGUN.test(rest);
			if (this.#leaf?.kind === "p" && !half && !lines.startsBlock(rest)) return this.#text(rest);
			this.#close(depth);
		}
		rest = this.#containers(rest);
		return rest === null ? null : this.#leafLine(rest);
	}

	#close(depth) {
		this.#setLeaf(null);
		this.#stack.length = depth;
	}

	/** Opens the quotes and lists that begin here; null when the line is consumed. */
	#containers(rest) {
		for (;;) {
			const full = this.#stack.length > MAX_CONTAINERS;
			const quote = full ? null : lines.QUOTE.exec(rest);
			const marker = full || lines.RULE.test(rest) ? null : lines.MARKER.exec(rest);
			// "1986. A good year" inside a paragraph is not a list.
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
				rest = this.#task(rest.slice(list[0].length));
				if (rest === null) return null;
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
		const extra = Math.min(Math.max(whole.length - space.length - mark.length, 1), 4);
		const indent = space.length + mark.length + extra;
		this.#stack.push({ kind: "item", indent, margin: space.length, el: this.#add(h("li")) });
	}

	/** Checkbox at the beginning of a list item; null when more text is needed to decide. */
	#task(rest) {
		if (this.#saved && lines.TASK_BEGUN.test(rest)) return null;
		const box = lines.TASK.exec(rest);
		if (!box) return rest;
		this.#stack.at(-1).el.className = "task";
		this.#add(taskCheckbox(box[1] !== " "));
		return rest.slice(box[0].length);
	}

	#leafLine(rest) {
		if (lines.RULE.test(rest)) {
			this.#setLeaf(null);
			this.#add(h("hr"));
			return null;
		}
		const fence = lines.FENCE.exec(rest);
		if (fence) return this.#fence(rest, fence);
		const math = lines.FORMULA.exec(rest);
		if (math) return this.#formula(math);
		if (this.#saved && lines.FORMULA_BEGUN.test(rest)) return null;
		const heading = lines.HEADING.exec(rest);
		if (heading) {
			this.#setLeaf({ kind: "h", el: this.#add(h(`h${heading[1].length}`)), ...EMPTY,
				text: heading[2].replace(/(?<!\s)\s+#+\s*$/, "") });
			return heading[2] ? `x${heading[2]}` : null;
		}
		if (this.#leaf?.kind === "table") {
			this.#add(tableRow(rest, this.#leaf.align), this.#leaf.el);
			return null;
		}
		if (this.#leaf?.kind === "p" && rest.includes("|") && this.#leaf.text.includes("|")
			&& /^[ |:-]+$/.test(rest)) {
			if (this.#saved) return null; // possibly half of a separator
			const head = this.#leaf.text.slice(this.#leaf.text.lastIndexOf("\n") + 1);
			const columns = cells(rest).length;
			if (columns <= MAX_COLUMNS && lines.SEPARATOR.test(rest) && cells(head).length === columns) return this.#table(head, rest);
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
		this.#setLeaf({ kind: "code", el: code, mark, indent: rest.length - rest.trimStart().length,
			family: language ? familyOf(language) : null, state: null });
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
		if (marks && this.#saved) return null; // possibly the closing fence
		const text = lines.codeText(line, this.#stack, leaf.indent);
		const { nodes, state } = highlightLine(text, leaf.family, leaf.state);
		leaf.state = state;
		for (const node of [...nodes, "\n"]) {
			this.#add(typeof node === "string" ? document.createTextNode(node) : node, leaf.el);
		}
		return null;
	}

	// ---- formulas

	#formula([, mark, text]) {
		const end = lines.FORMULA_ENDS[mark];
		const close = text.indexOf(end);
		if (close >= 0) {
			if (text.slice(close + end.length).trim()) return this.#text(mark + text); // a formula at the start of a sentence
			this.#setLeaf(null);
			this.#add(h("div", { class: "formula" }, formula(text.slice(0, close), true)));
		} else if (!this.#saved) {
			this.#setLeaf({ kind: "formula", el: this.#add(h("div", { class: "formula" }, text)), end, tex: text });
		}
		return null;
	}

	#formulaLine(line) {
		if (this.#saved) return null; // shown when it is complete
		const leaf = this.#leaf;
		if (leaf.tex.length + line.length > MAX_FORMULA) { // stays text
			this.#setLeaf(null);
			return this.#line(line);
		}
		const close = line.indexOf(leaf.end);
		leaf.tex += `\n${close < 0 ? line : line.slice(0, close)}`;
		leaf.el.textContent = leaf.tex;
		if (close < 0) return null;
		leaf.el.replaceChildren(formula(leaf.tex, true));
		this.#setLeaf(null);
		const after = line.slice(close + leaf.end.length).trim();
		return after ? this.#text(after) : null;
	}

	// ---- tables

	#table(head, separator) {
		const { el } = this.#leaf;
		const before = this.#leaf.text.slice(0, this.#leaf.text.lastIndexOf("\n") + 1).trimEnd();
		this.#leaf = { ...this.#leaf, ...EMPTY, text: before };
		el.replaceChildren();
		el.shown = null;
		this.#setLeaf(null);
		const { block, body, align } = tableBlock(head, separator);
		this.#add(block);
		if (!before) el.remove();
		this.#leaf = { kind: "table", el: body, align };
		return null;
	}

	/** Renders the open paragraph or heading. */
	#paint() {
		if (this.#leaf?.text !== undefined) paint(this.#leaf, this.#saved !== null);
	}
}
