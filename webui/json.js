// An answer that is JSON as a whole, shown as such.

import { codeBlock } from "./blocks.js";
import { familyOf, highlightLine } from "./highlight.js";

const MAX_LENGTH = 200_000; // characters; more stays as it came

/** A block with the object or list that `text` is, indented; null when it is none. */
export function jsonBlock(text) {
	if (text.length > MAX_LENGTH || !/^\s*[{[]/.test(text)) return null;
	let value;
	try {
		value = JSON.parse(text);
	} catch {
		return null;
	}
	const { block, code } = codeBlock("json");
	let state = null;
	for (const line of JSON.stringify(value, null, 2).split("\n")) {
		const { nodes, state: next } = highlightLine(line, familyOf("json"), state);
		code.append(...nodes, "\n");
		state = next;
	}
	return block;
}
