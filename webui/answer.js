// Rendering of an answer: collapsed reasoning, then the answer as Markdown.

import { h } from "./dom.js";
import { Markdown } from "./markdown.js";

const OPEN = "<think>";
const CLOSE = "</think>";
const MAX_SPACE = 1000; // characters before <think>

/** Renders text incrementally: each piece changes only the end of the output. */
export class Answer {
	#root;
	#state = "start"; // -> think -> answer; models may omit the first tag or both
	#pending = ""; // possibly half of a tag
	#lineStart = true;
	#thoughts = null;
	#body = null;
	#markdown = null;

	constructor(root) {
		this.#root = root;
	}

	push(text) {
		this.#pending += text;
		while (this.#step());
	}

	end() {
		if (this.#state === "start" && this.#pending) this.#begin();
		if (this.#pending) this.#markdown.push(this.#pending);
		this.#pending = "";
		this.#markdown?.end();
		this.#thoughtsEnd();
	}

	#thoughtsEnd() {
		this.#root.classList.remove("thinking");
		if (this.#thoughts) this.#thoughts.firstChild.lastChild.textContent = "Thoughts";
	}

	/** Consumes pending text; false when more text is needed. */
	#step() {
		if (this.#state === "start") {
			const text = this.#pending.trimStart();
			if (OPEN.startsWith(text) && this.#pending.length < MAX_SPACE) return false;
			if (!text.startsWith(OPEN)) {
				this.#begin();
				return true;
			}
			this.#pending = text.slice(OPEN.length).replace(/^\s+/, "");
			this.#state = "think";
			this.#think();
			return true;
		}
		const end = this.#pending.indexOf(CLOSE);
		if (this.#state === "think" && end >= 0) {
			this.#emit(end);
			this.#leaveThoughts();
			return true;
		}
		if (this.#state === "answer" && !this.#thoughts && end >= 0) {
			this.#emit(end);
			if (this.#lineStart) this.#foldAnswer();
			else this.#emit(CLOSE.length);
			return true;
		}
		this.#emit(this.#pending.length - overlap(this.#pending, CLOSE));
		return false;
	}

	#emit(length) {
		if (!length) return;
		this.#lineStart = this.#pending[length - 1] === "\n";
		this.#markdown.push(this.#pending.slice(0, length));
		this.#pending = this.#pending.slice(length);
	}

	#begin() {
		this.#state = "answer";
		this.#body = h("div", { class: "prose" });
		this.#root.append(this.#body);
		this.#markdown = new Markdown(this.#body);
	}

	#think() {
		const inside = h("div", { class: "prose thoughts-text" });
		this.#thoughts = h("details", { class: "thoughts" },
			h("summary", {}, h("span", {}, "Thinking")), inside);
		this.#root.append(this.#thoughts);
		this.#root.classList.add("thinking");
		this.#markdown = new Markdown(inside);
	}

	#leaveThoughts() {
		this.#markdown.end();
		this.#pending = this.#pending.slice(CLOSE.length).replace(/^\s+/, "");
		this.#thoughtsEnd();
		this.#begin();
	}

	/** `</think>` without `<think>`: the text shown so far is reasoning. Happens once. */
	#foldAnswer() {
		const written = this.#body;
		this.#markdown.end();
		this.#think();
		while (written.firstChild) this.#thoughts.lastChild.append(written.firstChild);
		written.remove();
		this.#leaveThoughts();
	}
}

/** Length of the longest end of `text` that is a prefix of `tag`. */
function overlap(text, tag) {
	for (let length = Math.min(text.length, tag.length - 1); length > 0; length--) {
		if (tag.startsWith(text.slice(-length))) return length;
	}
	return 0;
}
