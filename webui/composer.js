// The message input. The draft belongs to its chat, so switching chats never loses or mixes text.

import { byId } from "./dom.js";
import { Attachments } from "./files.js";

export class Composer {
	#store;
	#chats;
	#area = byId("prompt");
	#send = byId("send");
	#stop = byId("stop");
	#editLast;
	#files;

	/** `editLast`: opens the last user message for editing, as ArrowUp does in an empty field. */
	constructor(store, chats, editLast) {
		this.#store = store;
		this.#chats = chats;
		this.#editLast = editLast;
		this.#files = new Attachments(store, () => this.#refresh());
		this.#area.addEventListener("input", () => {
			store.active.draft = this.#area.value;
			store.saveSoon(store.active);
			this.#refresh();
		});
		this.#area.addEventListener("keydown", (event) => this.#key(event));
		byId("composer").addEventListener("submit", (event) => {
			event.preventDefault();
			this.submit();
		});
		this.#stop.addEventListener("click", () => this.cancel());
		store.on("active", () => this.load());
		chats.on("state", (chat) => chat === store.active && this.load());
	}

	focus() {
		this.#area.focus();
	}

	/** Shows the draft of the active chat and whether it can be sent. */
	load() {
		const { draft } = this.#store.active;
		if (this.#area.value !== draft) this.#area.value = draft;
		this.#files.show();
		this.#refresh();
	}

	/** Sends `text` (default: the draft). Does nothing while the chat has a run. */
	submit(text = this.#area.value) {
		const chat = this.#store.active;
		if (!(text.trim() || chat.files.length) || this.#chats.isRunning(chat)) return;
		this.#chats.send(chat, text.trim());
		this.focus();
	}

	/** Stops the run of the active chat; false when there is none. */
	cancel() {
		const chat = this.#store.active;
		if (!this.#chats.isRunning(chat)) return false;
		this.#chats.stop(chat);
		this.focus();
		return true;
	}

	#key(event) {
		if (event.isComposing || event.keyCode === 229) return; // an input method is composing
		if (event.key === "Enter" && !event.shiftKey && !event.altKey) {
			event.preventDefault();
			this.submit();
		} else if (event.key === "ArrowUp" && !this.#area.value && this.#editLast()) {
			event.preventDefault();
		}
	}

	#refresh() {
		const running = this.#chats.isRunning(this.#store.active);
		this.#send.hidden = running;
		this.#stop.hidden = !running;
		this.#send.disabled = !(this.#area.value.trim() || this.#store.active.files.length);
		if (!CSS.supports("field-sizing", "content")) {
			this.#area.style.height = "auto";
			this.#area.style.height = `${this.#area.scrollHeight}px`;
		}
	}
}
