// What the model writes: its thoughts, folded, and its answer.

import { h } from "./dom.js";
import { Markdown } from "./markdown.js";

const OPEN = "<think>";
const CLOSE = "</think>";

/** Takes the text in pieces; only the end of what is shown changes. */
export class Answer {
	#root;
	#state = "start"; // -> think -> answer; some models leave out the first tag, some have neither
	#held = ""; // may be half of a tag
	#lineStart = true;
	#thoughts = null;
	#body = null;
	#markdown = null;

	constructor(root) {
		this.#root = root;
	}

	push(text) {
		this.#held += text;
		while (this.#step());
	}

	end() {
		if (this.#state === "start" && this.#held) this.#begin();
		if (this.#held) this.#markdown.push(this.#held);
		this.#held = "";
		this.#markdown?.end();
		this.#thoughtsEnd();
	}

	#thoughtsEnd() {
		this.#root.classList.remove("thinking");
		if (this.#thoughts) this.#thoughts.firstChild.lastChild.textContent = "Thoughts";
	}

	/** Uses some of what is held; false when it has to wait for more. */
	#step() {
		if (this.#state === "start") {
			const text = this.#held.trimStart();
			if (OPEN.startsWith(text)) return false;
			if (!text.startsWith(OPEN)) {
				this.#begin();
				return true;
			}
			this.#held = text.slice(OPEN.length).replace(/^\s+/, "");
			this.#state = "think";
			this.#think();
			return true;
		}
		const end = this.#held.indexOf(CLOSE);
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
		this.#emit(this.#held.length - overlap(this.#held, CLOSE));
		return false;
	}

	#emit(length) {
		if (!length) return;
		this.#lineStart = this.#held[length - 1] === "\n";
		this.#markdown.push(this.#held.slice(0, length));
		this.#held = this.#held.slice(length);
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
		this.#held = this.#held.slice(CLOSE.length).replace(/^\s+/, "");
		this.#thoughtsEnd();
		this.#begin();
	}

	/** `</think>` without a beginning: what was shown so far were the thoughts. Happens once. */
	#foldAnswer() {
		const written = this.#body;
		this.#markdown.end();
		this.#think();
		this.#thoughts.lastChild.append(...written.childNodes);
		written.remove();
		this.#leaveThoughts();
	}
}

/** How many characters at the end of `text` may be the beginning of `tag`. */
function overlap(text, tag) {
	for (let length = Math.min(text.length, tag.length - 1); length > 0; length--) {
		if (tag.startsWith(text.slice(-length))) return length;
	}
	return 0;
}
