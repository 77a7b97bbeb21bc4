// View of one message; `sync` updates it from its message object.

import { Answer } from "./answer.js";
import { callsView } from "./tool_calls.js";
import { copyButton, h, iconButton, offer } from "./dom.js";
import { failureCard } from "./failure.js";
import { sentFiles } from "./files.js";
import { jsonBlock } from "./json_block.js";
import { hasTokens, tokenView } from "./probabilities.js";

/** `actions`: {edit, rewrite, regenerate, show, resume, fork, runTools}, each called with the message; `toolOf(call)`. */
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
		this.versions = h("div", { class: "tools versions" });
		this.element = h("article", { class: "message user", "aria-label": "You" },
			sentFiles(message.files), this.text, this.tools, this.versions);
		this.text.hidden = !message.content;
	}

	sync({ running }) {
		this.tools.firstChild.disabled = running;
		this.versions.replaceChildren(...versionSteps(this, running));
	}

	/** Opens an editor in place of the text. */
	edit(text) {
		if (this.element.classList.contains("editing")) return;
		this.element.classList.add("editing");
		editInPlace(this.text, {
			text, label: "Edit message", button: "Send",
			save: (changed) => this.actions.edit(this.message, changed),
			closed: () => {
				this.element.classList.remove("editing");
				this.tools.firstChild.focus();
			},
		});
	}
}

const NOTES = {
	length: "Cut off: token limit reached (Max tokens in the settings).",
	repetition: "Cut off: the answer repeated itself.",
	stopped: "Stopped.",
	abort: "Stopped by the server.",
	timeout: "Cut off: time limit reached.",
	interrupted: "Interrupted.",
};

class AnswerView {
	#rendered = 0; // characters
	#answer = null;
	#calls = ""; // rendered calls: names and lengths
	#state = null;

	constructor(message, actions) {
		this.message = message;
		this.actions = actions;
		this.body = h("div", { class: "answer" });
		this.calls = h("div", { class: "calls" });
		this.foot = h("div", { class: "foot" });
		this.element = h("article", { class: "message assistant", "aria-label": "Assistant" },
			this.body, this.calls, this.foot);
	}

	/** `running`: the chat has a run; `writing`: the run writes this message; `last`: last message of the chat. */
	sync({ running, writing, last }) {
		this.#render(writing);
		const { message } = this;
		const tools = message.calls.map((call) => this.#isPending(call));
		const state = JSON.stringify([running, writing, last, message.finish, message.failure, tools]);
		if (state === this.#state) return;
		this.#state = state;
		this.element.classList.toggle("writing", writing);
		this.element.classList.toggle("last", last);
		this.element.setAttribute("aria-busy", String(writing));
		this.foot.replaceChildren(...(writing ? [] : this.#footer(running, last)));
	}

	#render(writing) {
		const { content } = this.message;
		if (!this.#answer || content.length < this.#rendered || (this.#state && this.ended && writing)) {
			this.body.replaceChildren();
			this.#answer = new Answer(this.body);
			this.#rendered = 0;
			this.ended = false;
		}
		const added = content.slice(this.#rendered);
		this.#rendered = content.length;
		const ends = !writing && !this.ended;
		try {
			if (added) this.#answer.push(added);
			if (ends) this.#answer.end();
			const json = ends ? jsonBlock(content) : null;
			if (json) this.body.replaceChildren(json);
		} catch (error) { // a bug of this page: the text must be readable anyway
			console.error(error);
			const text = h("div", { class: "plain" }, content);
			this.body.replaceChildren(text);
			this.#answer = { push: (more) => text.append(more), end: () => {} };
		}
		if (ends) this.ended = true;
		const calls = this.message.calls.map(({ name, arguments: given, result }) => `${name} ${given.length} ${result?.length}`).join() + writing;
		if (calls !== this.#calls) this.calls.replaceChildren(...callsView(this.message.calls, !writing, (call) => this.#isPending(call)));
		this.#calls = calls;
	}

	/** Whether a call can be run and was not. */
	#isPending(call) {
		return call.result === null && Boolean(this.actions.toolOf(call));
	}

	/** Opens an editor in place of the answer. */
	#edit() {
		this.foot.hidden = true;
		editInPlace(this.body, {
			text: this.message.content, label: "Edit answer", button: "Save",
			save: (changed) => this.actions.rewrite(this.message, changed),
			closed: () => { this.foot.hidden = false; },
		});
	}

	/** Switches between the answer and its token probabilities. */
	#toggleTokens(button) {
		const shown = this.element.querySelector(".tokens");
		button.setAttribute("aria-pressed", String(!shown));
		this.body.hidden = !shown;
		if (shown) shown.remove();
		else this.body.after(tokenView(this.message));
	}

	#footer(running, last) {
		const { message, actions } = this;
		const parts = [];
		const cut = NOTES[message.finish];
		if (message.failure) parts.push(failureCard(message.failure, null));
		if (last && (cut || message.failure)) {
			parts.push(offer(cut, "Continue", () => actions.resume(message), { disabled: running }));
		}
		const called = message.calls.filter((call) => this.#isPending(call));
		if (last && called.length) {
			const names = called.map((call) => `${call.name} (${new URL(actions.toolOf(call).url).host})`);
			parts.push(offer(`Run ${names.join(", ")} with these arguments?`, "Run", () => actions.runTools(message),
				{ class: "button", disabled: running }));
		}
		const tools = h("div", { class: "tools" }, ...versionSteps(this, running),
			copyButton("Copy answer", () => message.content),
			iconButton("refresh", "Regenerate answer", () => actions.regenerate(message), { disabled: running }),
			iconButton("edit", "Edit answer", () => this.#edit(), { disabled: running }),
			iconButton("branch", "Branch into a new chat", () => actions.fork(message)));
		if (hasTokens(message)) {
			const button = iconButton("chance", "Token probabilities", () => this.#toggleTokens(button));
			tools.append(button);
		}
		const { usage, stats } = message;
		const facts = [message.edited && "edited", message.truncated && "oldest messages omitted", usage?.completion && `${usage.completion} token${usage.completion === 1 ? "" : "s"}`,
			stats?.rate && `${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tok/s`].filter(Boolean);
		if (facts.length) tools.append(h("span", { class: "facts" }, facts.join(" · ")));
		parts.push(tools);
		return parts;
	}
}

/** Version number of a message and buttons to the previous and next version. */
function versionSteps({ message, actions }, running) {
	const { versions } = message;
	if (!versions) return [];
	const at = versions.indexOf(null);
	const step = (name, label, to) =>
		iconButton(name, label, () => actions.show(message, to), { disabled: running || !versions[to] });
	return [step("left", "Earlier version", at - 1), h("span", { class: "count" }, `${at + 1} / ${versions.length}`),
		step("right", "Later version", at + 1)];
}

/** Replaces the element `shown` by an editor: Enter saves, Escape cancels. Calls `save(text)` on save and `closed()` in any case. */
function editInPlace(shown, { text, label, button, save, closed }) {
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
