// DOM construction without HTML strings, so that text is never parsed as HTML.

import { icon } from "./icons.js";

export { icon };

/** Makes an element. `props` are DOM properties; `class`, `data` and `aria-*`/`role` are special. */
export function h(tag, props = {}, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(props)) {
		if (value === undefined || value === null) continue;
		if (name === "class") element.className = value;
		else if (name === "data") Object.assign(element.dataset, value);
		else if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
		else element[name] = value;
	}
	element.append(...children.filter((child) => child !== null && child !== undefined));
	return element;
}

/** A button with an icon; `label` is its accessible name and its tooltip; `props`: further ones of the button. */
export function iconButton(name, label, onclick, props) {
	return h("button", { class: "icon-button", title: label, "aria-label": label, onclick, ...props }, icon(name));
}

/** A line of text with a button. */
export function offer(text, label, onclick, props) {
	return h("div", { class: "cut" }, text ? h("span", {}, text) : null,
		h("button", { class: "button quiet", onclick, ...props }, icon("play"), label));
}

export const byId = (id) => document.getElementById(id);

/** Copies text; falls back to execCommand without the clipboard API (plain http on a LAN). */
async function copyText(text) {
	try {
		await navigator.clipboard.writeText(text);
		return true;
	} catch {
		const area = h("textarea", { value: text, class: "offscreen", readOnly: true });
		document.body.append(area);
		area.select();
		const done = document.execCommand("copy");
		area.remove();
		return done;
	}
}

/** A copy button that shows the result for a moment. `text()` is called on click. */
export function copyButton(label, text, props) {
	const button = iconButton("copy", label, async () => {
		const done = await copyText(text());
		button.replaceChildren(icon(done ? "check" : "warning"));
		announce(done ? "Copied" : "Copying failed");
		setTimeout(() => button.replaceChildren(icon("copy")), 1500);
	}, props);
	return button;
}

export function download(name, type, text) {
	const url = URL.createObjectURL(new Blob([text], { type }));
	h("a", { href: url, download: name }).click();
	setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Announces text to screen readers; `status` is a polite live region. */
export function announce(text) {
	byId("status").textContent = text;
}

let toastTimer = 0;

/** Shows a short note at the bottom, with at most one action (such as Undo). Replaces an earlier note. */
export function toast(text, action, run) {
	const box = byId("toast");
	clearTimeout(toastTimer);
	const close = () => box.replaceChildren();
	box.replaceChildren(h("div", { class: "toast" }, h("span", {}, text),
		action ? h("button", { class: "link", onclick: () => { close(); run(); } }, action)
			: null,
		iconButton("close", "Dismiss", close)));
	toastTimer = setTimeout(close, action ? 10_000 : 5_000);
}
