// Formatted display of an answer that is JSON as a whole.

import { codeBlock } from "./blocks.js";
import { familyOf, highlightLine } from "./highlight.js";

const MAX_LENGTH = 200_000; // characters; longer answers are not formatted

/** A code block with the indented JSON object or list in `text`; null when it is not one. */
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
