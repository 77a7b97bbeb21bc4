// One message on the page. It follows its message object: `sync` brings it up to date.

import { Answer } from "./answer.js";
import { copyButton, h, icon, iconButton } from "./dom.js";
import { failureCard } from "./failure.js";

/** `actions`: {edit, regenerate, resume, stop, fork}, each called with the message. */
export function messageView(message, actions) {
	return message.role === "user" ? new UserView(message, actions) : new AnswerView(message, actions);
}

class UserView {
	constructor(message, actions) {
		this.message = message;
		this.actions = actions;
		this.text = h("div", { class: "bubble" }, message.content);
		this.tools = h("div", { class: "tools" },
			iconButton("edit", "Edit message", () => this.edit(message.content)),
			copyButton("Copy message", () => message.content));
		this.element = h("article", { class: "message user", "aria-label": "You" }, this.text, this.tools);
	}

	sync({ running }) {
		this.tools.firstChild.disabled = running;
	}

	/** Opens an editor in place of the text. */
	edit(text) {
		if (this.editor) return;
		const area = h("textarea", { value: text, class: "edit-text", rows: 2, "aria-label": "Edit message" });
		const close = () => {
			this.editor.replaceWith(this.text);
			this.editor = null;
			this.element.classList.remove("editing");
			this.tools.firstChild.focus();
		};
		const save = () => {
			const changed = area.value.trim();
			if (!changed) return;
			close();
			this.actions.edit(this.message, changed);
		};
		area.addEventListener("keydown", (event) => {
			if (event.isComposing) return;
			if (event.key === "Escape") close();
			else if (event.key === "Enter" && !event.shiftKey) save();
			else return;
			event.preventDefault();
			event.stopPropagation();
		});
		this.editor = h("div", { class: "editor" }, area, h("div", { class: "row end" },
			h("button", { class: "button quiet", onclick: close }, "Cancel"),
			h("button", { class: "button", onclick: save }, "Send")));
		this.text.replaceWith(this.editor);
		this.element.classList.add("editing");
		area.focus();
	}
}

const NOTES = {
	length: "Cut off: the limit of tokens was reached.",
	stopped: "Stopped.",
	abort: "Stopped by the server.",
	interrupted: "Interrupted.",
};

class AnswerView {
	#shown = 0; // characters that have been rendered
	#answer = null;
	#state = null;

	constructor(message, actions) {
		this.message = message;
		this.actions = actions;
		this.body = h("div", { class: "answer" });
		this.foot = h("div", { class: "foot" });
		this.element = h("article", { class: "message assistant", "aria-label": "Assistant" },
			this.body, this.foot);
	}

	/** `running`: the chat has a run; `writing`: it writes this message; `last`: of the chat. */
	sync({ running, writing, last }) {
		this.#render(writing);
		const { message } = this;
		const state = JSON.stringify([running, writing, last, message.finish, message.failure]);
		if (state === this.#state) return;
		this.#state = state;
		this.element.classList.toggle("writing", writing);
		this.element.classList.toggle("last", last);
		this.element.setAttribute("aria-busy", String(writing));
		this.foot.replaceChildren(...(writing ? [] : this.#footer(running, last)));
	}

	#render(writing) {
		const { content } = this.message;
		if (!this.#answer || content.length < this.#shown || (this.#state && this.ended && writing)) {
			this.body.replaceChildren();
			this.#answer = new Answer(this.body);
			this.#shown = 0;
			this.ended = false;
		}
		if (content.length > this.#shown) this.#answer.push(content.slice(this.#shown));
		this.#shown = content.length;
		if (!writing && !this.ended) {
			this.#answer.end();
			this.ended = true;
		}
	}

	#footer(running, last) {
		const { message, actions } = this;
		const parts = [];
		const cut = NOTES[message.finish];
		if (message.failure) parts.push(failureCard(message.failure, null));
		if (last && (cut || message.failure)) {
			parts.push(h("div", { class: "cut" }, cut ? h("span", {}, cut) : null,
				h("button", { class: "button quiet", disabled: running,
					onclick: () => actions.resume(message) }, icon("play"), "Continue")));
		}
		const tools = h("div", { class: "tools" },
			copyButton("Copy answer", () => message.content),
			iconButton("refresh", "Regenerate answer", () => actions.regenerate(message)),
			iconButton("branch", "Branch into a new chat", () => actions.fork(message)));
		tools.children[1].disabled = running;
		const { usage, stats } = message;
		const facts = [usage?.completion && `${usage.completion} tokens`,
			stats?.rate && `${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tok/s`].filter(Boolean);
		if (facts.length) tools.append(h("span", { class: "facts" }, facts.join(" · ")));
		parts.push(tools);
		return parts;
	}
}
