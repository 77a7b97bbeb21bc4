// Chats that are kept on the server too, when their settings ask for it. The browser's copy is the one that is
// worked on; after every change the server gets it whole. What other browsers left there can be opened.

import * as api from "./api.js";
import { toast } from "./dom.js";
import { cleanChat, contentOf } from "./records.js";

export class Kept {
	#store;
	#chats;
	#last = new Map(); // session -> the write that is under way: one after the other
	remote = []; // [{id, title, updated}] that this browser has no copy of

	constructor(store, chats) {
		this.#store = store;
		this.#chats = chats;
		chats.on("state", (chat) => this.sync(chat));
		store.on("changed", (chat) => this.sync(chat));
	}

	/** Asks what the server has. A server that keeps nothing, or is not there, has nothing. */
	async look() {
		const own = new Set(this.#store.all().map(({ session }) => session));
		this.remote = (await api.sessions().catch(() => [])).filter(({ id }) => !own.has(id));
		if (this.remote.length) this.#store.emit("list");
	}

	/** Brings the server's copy of a chat up to date: written, or deleted when it is no longer wanted. */
	sync(chat) {
		if (this.#chats.isRunning(chat)) return;
		if (chat.settings.keep && chat.messages.length) {
			chat.session ??= `web-${chat.id}`;
			this.#store.save(chat);
			const system = chat.settings.system ? [{ role: "system", content: chat.settings.system }] : [];
			const messages = chat.messages.map((message) => ({ role: message.role, content: contentOf(message) }));
			this.#then(chat.session, () => api.writeSession(chat.session, chat.title.slice(0, 200), [...system, ...messages]));
		} else if (!chat.settings.keep && chat.session) {
			this.forget(chat);
		}
	}

	/** The chat is gone from here, or no longer kept. */
	forget(chat) {
		const { session } = chat;
		if (!session) return;
		chat.session = null;
		this.#store.save(chat);
		this.#then(session, () => api.deleteSession(session).catch((error) => {
			if (error.status !== 404) throw error;
		}));
	}

	/** A chat of this browser with what the server has. */
	async open({ id }) {
		try {
			const { title, messages } = await api.readSession(id);
			const first = messages[0];
			const settings = { keep: true, ...(first?.role === "system" && { system: first.content }) };
			const finished = messages.map((message) => ({ ...message, finish: "stop" }));
			const chat = cleanChat({ title: title || "New chat", named: Boolean(title), settings, messages: finished, session: id });
			this.remote = this.remote.filter((other) => other.id !== id);
			this.#store.add(chat);
			this.#store.activate(chat.id);
		} catch (error) {
			toast(`The chat could not be read: ${error.message}`);
		}
	}

	#then(session, write) {
		const done = (this.#last.get(session) ?? Promise.resolve()).then(write)
			.catch((error) => toast(`The server's copy of this chat is not up to date: ${error.message}`));
		this.#last.set(session, done);
	}
}
