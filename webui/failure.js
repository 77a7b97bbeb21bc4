// Error card, shown where the error occurred.

import { copyButton, h, icon } from "./dom.js";

const TITLES = {
	0: "No connection",
	400: "The server rejected this request",
	401: "The API key is missing or wrong",
	413: "Too long",
	429: "The server is busy",
	500: "The server failed",
	503: "The server is not available",
};

/** `retry`: called by the button, which is disabled until Retry-After has passed; null: no button. */
export function failureCard(failure, retry) {
	const title = TITLES[failure.status] ?? `Error ${failure.status}`;
	const card = h("div", { class: "failure", role: "alert" }, icon("warning"),
		h("div", { class: "failure-text" },
			h("strong", {}, title), h("p", {}, failure.text),
			failure.requestId ? h("p", { class: "request-id" },
				failure.status ? `${failure.status} · ` : "", "Request ", h("code", {}, failure.requestId),
				copyButton("Copy request id", () => failure.requestId)) : null));
	if (retry) card.append(retryButton(failure.retryAt, retry));
	return card;
}

function retryButton(retryAt, retry) {
	const button = h("button", { class: "button", onclick: retry }, "Try again");
	const tick = () => {
		const left = Math.ceil(((retryAt ?? 0) - Date.now()) / 1000);
		button.disabled = left > 0;
		button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
		if (left > 0) setTimeout(() => button.isConnected && tick(), 250);
	};
	queueMicrotask(tick);
	return button;
}
