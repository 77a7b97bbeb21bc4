// A field in place of a text, to change it: Enter saves, Escape leaves it as it was.

import { h } from "./dom.js";

/** Shows the editor in place of `shown`. `save(text)` gets what was written; `closed()` follows either way. */
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
