// Calls of tools in an answer: kept with the message, shown folded. The page itself calls nothing.

import { h } from "./dom.js";
import { jsonBlock } from "./json.js";

/** Whatever came in from storage or a file, as [{id, name, arguments}]. */
export const cleanCalls = (raw) => (Array.isArray(raw) ? raw : []).map((call) => ({
	id: String(call?.id ?? ""), name: String(call?.name ?? ""), arguments: String(call?.arguments ?? ""),
}));

/** Adds what is new of the server's calls, whole ones or deltas, to a message. */
export function noteCalls(message, deltas) {
	for (const [place, { index = place, id, function: made = {} }] of deltas.entries()) {
		const call = message.calls[index] ??= { id: "", name: "", arguments: "" };
		if (id) call.id = id;
		call.name += made.name ?? "";
		call.arguments += made.arguments ?? "";
	}
}

/** As the server takes them back. */
export const wireCalls = (calls) => calls.map(({ id, name, arguments: given }) =>
	({ id, type: "function", function: { name, arguments: given } }));

/** One folded line for each call, with its arguments inside. */
export const callsView = (calls) => calls.map(({ name, arguments: given }) =>
	h("details", { class: "thoughts call" }, h("summary", {}, h("span", {}, "Calls "), h("code", {}, name)),
		jsonBlock(given) ?? h("pre", {}, given)));
