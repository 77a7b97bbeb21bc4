// The active conversation: messages, empty state, failures, scroll position.

import { announce, byId, offer } from "./dom.js";
import { toolOf } from "./chat.js";
import { failureCard } from "./failure.js";
import { messageView } from "./message.js";
import { showVersion } from "./chat_schema.js";
import { hasResults } from "./tool_calls.js";

const NEAR = 80; // pixels from the end within which the view follows new text

export class Thread {
	#store;
	#chats;
	#submit; // sends a text, or the draft of the composer
	#views = new Map(); // message -> view
	#frame = 0;
	#follow = true;
	#top = 0; // scroll position
	#scroller = byId("thread");
	#list = byId("messages");
	#end = byId("thread-end");
	#jump = byId("jump");

	constructor(store, chats, submit) {
		this.#store = store;
		this.#chats = chats;
		this.#submit = submit;
		store.on("active", () => this.show());
		chats.on("progress", ({ chat }) => chat === store.active && this.#later());
		chats.on("state", (chat) => {
			if (chat !== store.active) return;
			const running = chats.isRunning(chat);
			announce(running ? "Answering" : chat.failure ? "" : "The answer is complete");
			if (running) this.#follow = true;
			this.#update();
		});
		this.#scroller.addEventListener("scroll", () => this.#onScroll(), { passive: true });
		this.#jump.addEventListener("click", () => {
			this.#follow = true;
			this.#scrollToEnd();
		});
		new ResizeObserver(() => this.#scrollToEnd()).observe(this.#scroller);
		for (const button of byId("empty").querySelectorAll("[data-prompt]")) {
			button.addEventListener("click", () => this.#submit(button.textContent));
		}
	}

	/** Shows the end of the active chat. */
	show() {
		this.#views.clear();
		this.#follow = true;
		this.#update();
	}

	/** Opens the editor of the last user message; false when there is none to edit. */
	editLast() {
		const chat = this.#store.active;
		const last = chat.messages.findLast(({ role }) => role === "user");
		if (!last || this.#chats.isRunning(chat)) return false;
		this.#views.get(last).edit(last.content);
		return true;
	}

	#later() {
		this.#frame ||= requestAnimationFrame(() => {
			this.#frame = 0;
			const chat = this.#store.active;
			const message = this.#chats.writing(chat);
			if (!message) return;
			this.#views.get(message)?.sync({ running: true, writing: true, last: true });
			this.#scrollToEnd();
		});
	}

	#update() {
		const chat = this.#store.active;
		const running = this.#chats.isRunning(chat);
		const writing = this.#chats.writing(chat);
		const views = new Map();
		for (const message of chat.messages) {
			const view = this.#views.get(message) ?? messageView(message, this.#actions(chat));
			view.sync({ running, writing: message === writing, last: message === chat.messages.at(-1) });
			views.set(message, view);
		}
		this.#views = views;
		const elements = [...views.values()].map(({ element }) => element);
		for (const old of [...this.#list.children]) if (!elements.includes(old)) old.remove();
		elements.forEach((element, i) => {
			if (this.#list.children[i] !== element) this.#list.insertBefore(element, this.#list.children[i] ?? null);
		});
		byId("empty").hidden = Boolean(chat.messages.length || chat.failure);
		this.#end.replaceChildren(...this.#ending(chat, running));
		this.#scrollToEnd();
	}

	#ending(chat, running) {
		if (running) return [];
		const { failure, messages } = chat;
		if (failure) {
			const again = { send: () => this.#submit(), regenerate: () => this.#chats.regenerate(chat, failure.again.index) };
			return [failureCard(failure, failure.again && again[failure.again.kind])];
		}
		const last = messages.at(-1);
		if (!last || (last.role !== "user" && !hasResults(last))) return [];
		return [offer("No answer yet.", "Answer", () => this.#chats.regenerate(chat, messages.length))];
	}

	#actions(chat) {
		const indexOf = (message) => chat.messages.indexOf(message);
		return {
			edit: (message, text) => {
				const index = indexOf(message);
				this.#chats.edit(chat, index, text,
					(back) => queueMicrotask(() => this.#views.get(chat.messages[index])?.edit(back)));
			},
			rewrite: (message, text) => {
				const changed = { ...message, content: text, edited: true };
				this.#change(chat, chat.messages.map((other) => other === message ? changed : other));
			},
			regenerate: (message) => this.#chats.regenerate(chat, indexOf(message)),
			show: (message, number) => this.#show(chat, indexOf(message), number),
			resume: () => this.#chats.resume(chat),
			toolOf: (call) => toolOf(chat, call),
			runTools: () => this.#chats.runTools(chat),
			fork: (message) => {
				const messages = structuredClone(chat.messages.slice(0, indexOf(message) + 1));
				const copy = this.#store.create(chat.settings);
				Object.assign(copy, { messages, title: chat.title, named: true });
				this.#store.save(copy, true);
				this.#store.emit("list");
				this.#store.activate(copy.id);
			},
		};
	}

	/** Shows another version of a message. The scroll position and the keyboard focus stay at the message. */
	#show(chat, index, number) {
		const { ariaLabel: label } = document.activeElement;
		this.#follow = false;
		this.#change(chat, showVersion(chat.messages, index, number));
		const steps = [...this.#list.children[index].querySelectorAll("[aria-label$=version]:enabled")];
		(steps.find(({ ariaLabel }) => ariaLabel === label) ?? steps[0])?.focus({ preventScroll: true });
	}

	#change(chat, messages) {
		chat.messages = messages;
		this.#store.save(chat, true);
		this.#store.emit("changed", chat);
		if (chat === this.#store.active) this.#update();
	}

	#onScroll() {
		const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
		const isNear = scrollHeight - scrollTop - clientHeight < NEAR;
		if (isNear || scrollTop < this.#top) this.#follow = isNear; // growth of the content is not a move of the user
		this.#top = scrollTop;
		this.#jump.hidden = this.#follow;
	}

	#scrollToEnd() {
		if (this.#follow) this.#scroller.scrollTop = this.#scroller.scrollHeight;
		this.#onScroll(); // no scroll event follows when the content became shorter
	}
}
