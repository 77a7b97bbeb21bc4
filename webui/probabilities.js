// Token probabilities and alternatives of answers, kept in memory until the page closes.

import { h } from "./dom.js";

const known = new WeakMap(); // message -> [{text, probability, others: [{text, probability}]}]

/** Appends tokens to the record of a message. */
export function appendTokens(message, tokens) {
	if (!tokens.length) return;
	if (!known.has(message)) known.set(message, []);
	known.get(message).push(...tokens);
}

export const hasTokens = (message) => known.has(message);

/** The tokens of an answer, darker where less probable; the tooltip lists the alternatives. */
export function tokenView(message) {
	const tokens = known.get(message).map(({ text, probability, others }) => {
		const lines = [{ text, probability }, ...others.filter((other) => other.text !== text)]
			.map((token) => `${percent(token.probability)}  ${JSON.stringify(token.text)}`);
		const element = h("span", { class: "token", title: lines.join("\n") }, text);
		element.style.setProperty("--doubt", (1 - probability).toFixed(2));
		return element;
	});
	return h("div", { class: "tokens", role: "group", "aria-label": "Token probabilities" }, ...tokens);
}

const percent = (part) => `${(100 * part).toFixed(1)} %`.padStart(7);
