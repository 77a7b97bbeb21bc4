// How likely each token was, and what else the model thought of. Kept as long as the page is open.

import { h } from "./dom.js";

const known = new WeakMap(); // message -> [{text, probability, others: [{text, probability}]}]

/** Adds tokens that have arrived to a message. */
export function note(message, tokens) {
	if (!tokens.length) return;
	if (!known.has(message)) known.set(message, []);
	known.get(message).push(...tokens);
}

export const hasTokens = (message) => known.has(message);

/** The tokens of an answer, darker where the model was less sure; pointing at one shows the others. */
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
