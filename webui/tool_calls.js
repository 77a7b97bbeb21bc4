// Tool calls of an answer: stored with the message, shown collapsed. `result`: the text that an MCP server
// returned; null before the call.

import { h } from "./dom.js";
import { jsonBlock } from "./json_block.js";

/** Stored or imported data as [{id, name, arguments, result}]. */
export const normaliseCalls = (raw) => (Array.isArray(raw) ? raw : []).map((call) => ({
	id: String(call?.id ?? ""), name: String(call?.name ?? ""), arguments: String(call?.arguments ?? ""),
	result: typeof call?.result === "string" ? call.result : null,
}));

/** Stored or imported tools of MCP servers as [{url, name, description, schema}]. */
export const normaliseTools = (raw) => (Array.isArray(raw) ? raw : []).filter((tool) => URL.canParse(tool?.url))
	.map(({ url, name, description, schema }) => ({ url, name: String(name), description: String(description ?? ""), schema: Object(schema) }));

/** Appends whole tool calls or deltas to a message. */
export function appendCalls(message, deltas) {
	for (const [i, { index = i, id, function: made = {} }] of deltas.entries()) {
		const call = message.calls[index] ??= { id: "", name: "", arguments: "", result: null };
		if (id) call.id = id;
		call.name += made.name ?? "";
		call.arguments += made.arguments ?? "";
	}
}

/** The calls in the server's format. */
export const toWireCalls = (calls) => calls.map(({ id, name, arguments: given }) =>
	({ id, type: "function", function: { name, arguments: given } }));

/** Calls in the server's format, whose arguments are a text or, from a stored session, an object. */
export const fromWireCalls = (calls) => calls.map(({ id, function: { name, arguments: given } }) =>
	({ id, name, arguments: typeof given === "string" ? given : JSON.stringify(given), result: null }));

/** The results of calls as messages in the server's format. */
export const toWireResults = (calls) => calls.filter(({ result }) => result !== null)
	.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));

/** Whether a message is an answer whose calls all have results, so that the model can go on. */
export const hasResults = ({ calls }) => Boolean(calls?.length) && calls.every(({ result }) => result !== null);

/** One collapsed line per call, with its arguments and its result inside; formatted when they are `complete`.
 * `isPending(call)`: the call waits for consent, so its arguments are shown. */
export const callsView = (calls, complete, isPending) => calls.map(({ name, arguments: given, result }) =>
	h("details", { class: "thoughts call", open: complete && isPending({ name, result }) }, h("summary", {}, h("span", {}, "Calls "), h("code", {}, name)),
		(complete && jsonBlock(given)) || h("pre", {}, given), result === null ? null : h("pre", { class: "result" }, result)));
