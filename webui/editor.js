// In-place text editor: Enter saves, Escape cancels.

import { h } from "./dom.js";

/** Replaces the element `shown` by an editor. Calls `save(text)` on save and `closed()` in any case. */
export function editInPlace(shown, { text, label, button, save, closed }) {
	const area = h("textarea", { value: text, class: "edit-text", rows: 2, "aria-label": label });
	const close = () => {
		editor.replaceWith(shown);
		closed();
	};
	const keep = () => {
		const changed = area.value.trim();
		if (!changed) return;
		close();
		save(changed);
	};
	area.addEventListener("keydown", (event) => {
		if (event.isComposing) return;
		if (event.key === "Escape") close();
		else if (event.key === "Enter" && !event.shiftKey) keep();
		else return;
		event.preventDefault();
		event.stopPropagation();
	});
	const editor = h("div", { class: "editor" }, area, h("div", { class: "row end" },
		h("button", { class: "button quiet", onclick: close }, "Cancel"),
		h("button", { class: "button", onclick: keep }, button)));
	shown.replaceWith(editor);
	area.focus();
}
