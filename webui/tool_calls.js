// Tool calls of an answer: stored with the message, shown collapsed. The page runs no tool.

import { h } from "./dom.js";
import { jsonBlock } from "./json_block.js";

/** Stored or imported data as [{id, name, arguments}]. */
export const normaliseCalls = (raw) => (Array.isArray(raw) ? raw : []).map((call) => ({
	id: String(call?.id ?? ""), name: String(call?.name ?? ""), arguments: String(call?.arguments ?? ""),
}));

/** Appends whole tool calls or deltas to a message. */
export function appendCalls(message, deltas) {
	for (const [i, { index = i, id, function: made = {} }] of deltas.entries()) {
		const call = message.calls[index] ??= { id: "", name: "", arguments: "" };
		if (id) call.id = id;
		call.name += made.name ?? "";
		call.arguments += made.arguments ?? "";
	}
}

/** The calls in the server's format. */
export const toWireCalls = (calls) => calls.map(({ id, name, arguments: given }) =>
	({ id, type: "function", function: { name, arguments: given } }));

/** One collapsed line per call, with its arguments inside; formatted when they are `complete`. */
export const callsView = (calls, complete) => calls.map(({ name, arguments: given }) =>
	h("details", { class: "thoughts call" }, h("summary", {}, h("span", {}, "Calls "), h("code", {}, name)),
		(complete && jsonBlock(given)) || h("pre", {}, given)));
