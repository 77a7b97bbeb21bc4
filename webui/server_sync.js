// Synchronisation of chats to the server, if their setting `keep` is on. The browser's copy is the primary one;
// after every change the whole chat is written to the server. Sessions of other browsers can be opened.

import * as api from "./api.js";
import { toast } from "./dom.js";
import { fromWireMessages, normaliseChat, toWireMessages, versionsOf, withVersions } from "./chat_schema.js";

export class ServerSync {
	#store;
	#chats;
	#last = new Map(); // session -> promise of its last write; writes of a session are sequential
	remote = []; // [{id, title, updated}] without a copy in this browser

	constructor(store, chats) {
		this.#store = store;
		this.#chats = chats;
		chats.on("state", (chat) => this.sync(chat));
		store.on("changed", (chat) => this.sync(chat));
	}

	/** Updates `remote`; empty when the server stores no sessions or is unreachable. */
	async listRemote() {
		const own = new Set(this.#store.all().map(({ session }) => session));
		this.remote = (await api.sessions().catch(() => [])).filter(({ id }) => !own.has(id));
		if (this.remote.length) this.#store.emit("list");
	}

	/** Writes the server's copy of a chat, or deletes it when `keep` is off. */
	sync(chat) {
		if (this.#chats.isRunning(chat)) return;
		if (chat.settings.keep && chat.messages.length) {
			chat.session ??= `web-${chat.id}`;
			this.#store.save(chat);
			const messages = toWireMessages(chat, chat.messages);
			const content = { title: chat.title.slice(0, 200), messages, client_state: versionsOf(chat.messages) };
			this.#enqueue(chat.session, () => api.writeSession(chat.session, content));
		} else if (!chat.settings.keep && chat.session) {
			this.forget(chat);
		}
	}

	/** Deletes the server's copy of a chat. */
	forget(chat) {
		const { session } = chat;
		if (!session) return;
		chat.session = null;
		this.#store.save(chat);
		this.#enqueue(session, () => api.deleteSession(session).catch((error) => {
			if (error.status !== 404) throw error;
		}));
	}

	/** Creates a local chat from a session of the server. */
	async open({ id }) {
		try {
			const { title, messages, client_state: state } = await api.readSession(id);
			const first = messages[0];
			const settings = { keep: true, ...(first?.role === "system" && { system: first.content }) };
			const finished = withVersions(fromWireMessages(messages), state).map((message) => ({ ...message, finish: "stop" }));
			const chat = normaliseChat({ title: title || "New chat", named: Boolean(title), settings, messages: finished, session: id });
			this.remote = this.remote.filter((other) => other.id !== id);
			this.#store.add(chat);
			this.#store.activate(chat.id);
		} catch (error) {
			toast(`The chat could not be read: ${error.message}`);
		}
	}

	#enqueue(session, write) {
		const done = (this.#last.get(session) ?? Promise.resolve()).then(write)
			.catch((error) => toast(`The server's copy of this chat is not up to date: ${error.message}`));
		this.#last.set(session, done);
	}
}
