// Formatted display of an answer that is JSON as a whole.

import { codeBlock } from "./blocks.js";
import { familyOf, highlightLine } from "./highlight.js";

const MAX_LENGTH = 200_000; // characters; longer answers are not formatted
const MAX_DEPTH = 50; // indentation makes deeper ones long

/** A code block with the indented JSON object or list in `text`; null when it is not one. */
export function jsonBlock(text) {
	if (text.length > MAX_LENGTH || !/^\s*[{[]/.test(text) || depthOf(text) > MAX_DEPTH) return null;
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

/** Depth of nested brackets. */
function depthOf(text) {
	let depth = 0;
	let deepest = 0;
	for (const [piece] of text.matchAll(/"(?:\\.|[^"\\])*"?|[[{\]}]/g)) {
		if (piece === "[" || piece === "{") deepest = Math.max(deepest, ++depth);
		else if (piece === "]" || piece === "}") depth -= 1;
	}
	return deepest;
}
