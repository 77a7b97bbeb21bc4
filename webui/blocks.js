// Composite Markdown blocks: code with a toolbar, tables, task checkboxes.

import { copyButton, h } from "./dom.js";
import { inlineNodes } from "./inline.js";

export function codeBlock(language) {
	const code = h("code");
	const label = language.slice(0, 24);
	const block = h("div", { class: "code" },
		h("div", { class: "code-bar" }, h("span", { class: "code-language" }, label || "text"),
			copyButton("Copy code", () => code.textContent, { class: "icon-button code-copy" })),
		h("pre", { tabIndex: 0, "aria-label": label ? `${label} code` : "Code" }, code));
	return { block, code };
}

/** A table with its head; rows go to `body`. `align`: a class or null per column. */
export function tableBlock(head, separator) {
	const align = cells(separator).map((cell) => cell.endsWith(":")
		? (cell.startsWith(":") ? "center" : "right") : null);
	const body = h("tbody");
	const top = h("tr");
	cells(head).forEach((cell, i) => top.append(
		h("th", { class: align[i], scope: "col" }, ...inlineNodes(cell))));
	const block = h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" },
		h("table", {}, h("thead", {}, top), body));
	return { block, body, align };
}

export function tableRow(row, align) {
	const texts = cells(row).slice(0, align.length);
	const missing = align.length - texts.length; // one cell: the cost depends on the text, not on the columns
	return h("tr", {}, ...texts.map((text, i) => h("td", { class: align[i] }, ...inlineNodes(text))),
		missing ? h("td", { colSpan: missing }) : null);
}

/** The cells of a row; a `|` in code or after a backslash is not a separator. */
export function cells(row) {
	const found = [""];
	let inCode = false;
	for (const piece of row.trim().replace(/^\|/, "").match(/\\.|[`|]|[^\\`|]+|\\/g) ?? []) {
		if (piece === "`") inCode = !inCode;
		if (piece === "|" && !inCode) found.push("");
		else found[found.length - 1] += piece === "\\|" ? "|" : piece;
	}
	if (found.length > 1 && !found.at(-1).trim()) found.pop();
	return found.map((cell) => cell.trim());
}

export function taskCheckbox(done) {
	return h("input", { type: "checkbox", checked: done, disabled: true, "aria-label": done ? "done" : "to do" });
}
