// Chats in localStorage, one key per chat, so that saving one never affects another.

import { Emitter } from "./events.js";
import { normaliseChat, newId } from "./chat_schema.js";

const CHAT = "llaisys:chat:";
const VERSION = 1;

/** Emits `list` (titles, order), `active` (chat switched), `changed` (chat edited by the user), `trouble` (text). */
export class Store extends Emitter {
	#chats = new Map();
	#timers = new Map();
	#leaving = false;
	busy = new Set(); // ids of chats with a run in this tab: changes of other tabs are ignored

	constructor() {
		super();
		for (let i = 0; i < localStorage.length; i++) {
			const key = localStorage.key(i);
			if (key.startsWith(CHAT)) this.#read(localStorage.getItem(key), true);
		}
		this.activeId = localStorage.getItem("llaisys:active");
		if (!this.#chats.has(this.activeId)) this.activeId = this.all()[0]?.id ?? this.create().id;
		// Another tab wrote or deleted a chat.
		addEventListener("storage", ({ key, newValue }) => {
			if (!key?.startsWith(CHAT)) return;
			const id = key.slice(CHAT.length);
			if (this.busy.has(id)) return;
			if (newValue) this.#read(newValue, false);
			else this.#chats.delete(id);
			this.emit("list");
			if (id === this.activeId) this.#ensureActive();
		});
		// The browser aborts the requests of a page that it leaves; that state must not be saved.
		addEventListener("pagehide", () => {
			this.flush();
			this.#leaving = true;
		});
		addEventListener("pageshow", () => { this.#leaving = false; });
		document.addEventListener("visibilitychange", () => document.hidden && this.flush());
	}

	/** `atStart`: no run exists, so an unfinished answer was interrupted. */
	#read(text, atStart) {
		try {
			const chat = normaliseChat(JSON.parse(text));
			const last = chat.messages.at(-1);
			if (atStart && last?.finish === null) {
				last.finish = "interrupted";
				if (!last.content) chat.messages.pop();
			}
			const mine = this.#chats.get(chat.id);
			if (mine) Object.assign(chat, { draft: mine.draft, files: mine.files }); // this tab's input wins
			this.#chats.set(chat.id, chat);
		} catch { /* foreign or damaged entry: ignored, not deleted */ }
	}

	get active() {
		return this.#chats.get(this.activeId);
	}

	get(id) {
		return this.#chats.get(id);
	}

	/** All chats, latest first. */
	all() {
		return [...this.#chats.values()].sort((a, b) => b.updated - a.updated || b.created - a.created);
	}

	/** Returns an empty chat, an existing one if possible. Saved only once it has content. */
	create(settings = {}) {
		const empty = this.all().find((chat) => !chat.messages.length && !chat.draft && !chat.files.length && !chat.named);
		const chat = empty ?? normaliseChat({ id: newId(), settings });
		chat.settings = { ...settings };
		chat.updated = Date.now();
		this.#chats.set(chat.id, chat);
		return chat;
	}

	activate(id) {
		if (!this.#chats.has(id)) return;
		this.activeId = id;
		this.#write("llaisys:active", id);
		this.emit("active");
	}

	#ensureActive() {
		if (this.active) this.emit("active");
		else this.activate(this.all()[0]?.id ?? this.create().id);
	}

	remove(id) {
		clearTimeout(this.#timers.get(id));
		this.#timers.delete(id);
		this.#chats.delete(id);
		localStorage.removeItem(CHAT + id);
		this.emit("list");
		if (id === this.activeId) this.#ensureActive();
	}

	/** Adds or restores a chat. */
	add(chat) {
		this.#chats.set(chat.id, chat);
		this.save(chat);
		this.emit("list");
	}

	/** Saves now. `touch`: update its time. */
	save(chat, touch = false) {
		if (this.#leaving || !this.#chats.has(chat.id)) return; // deleted during a run
		clearTimeout(this.#timers.get(chat.id));
		this.#timers.delete(chat.id);
		if (touch) chat.updated = Date.now();
		this.#write(CHAT + chat.id, JSON.stringify(chat));
	}

	/** Saves within a second; for changes per token or key press. */
	saveSoon(chat) {
		if (this.#timers.has(chat.id)) return;
		this.#timers.set(chat.id, setTimeout(() => this.save(chat), 1000));
	}

	flush() {
		for (const id of [...this.#timers.keys()]) this.save(this.#chats.get(id));
	}

	#write(key, value) {
		try {
			localStorage.setItem(key, value);
		} catch {
			this.emit("trouble", "The browser's storage is full: this chat is not saved. Export it, or delete old ones.");
		}
	}

	// ---- export and import

	/** JSON of the given chats, or of all chats and the default settings. */
	export(chats) {
		const all = this.all().filter((chat) => chat.messages.length);
		return JSON.stringify({ format: "llaisys-chats", version: VERSION, chats: chats ?? all,
			defaults: chats ? undefined : readDefaults() }, null, 2);
	}

	/** Adds the chats of an export, with new ids where they exist. Returns their number. */
	import(text) {
		const data = JSON.parse(text);
		if (data?.format !== "llaisys-chats" || !Array.isArray(data.chats)) {
			throw new Error("this is not an export of this page");
		}
		const chats = data.chats.map(normaliseChat);
		for (const chat of chats) {
			if (this.#chats.has(chat.id)) chat.id = newId();
			this.add(chat);
		}
		if (data.defaults && !Object.keys(readDefaults()).length) writeDefaults(data.defaults);
		return chats.length;
	}
}

/** Settings of new chats. */
export function readDefaults() {
	try {
		return JSON.parse(localStorage.getItem("llaisys:defaults")) ?? {};
	} catch {
		return {};
	}
}

export function writeDefaults(settings) {
	localStorage.setItem("llaisys:defaults", JSON.stringify(settings));
}
