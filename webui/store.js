// Chats in localStorage, one key each, so that saving one never touches another.

import { Emitter } from "./events.js";
import { cleanChat, newId } from "./records.js";

const CHAT = "llaisys:chat:";
const VERSION = 1;

/** Emits `list` (titles, order), `active` (another chat is shown), `changed` (a chat, by hand), `trouble` (text). */
export class Store extends Emitter {
	#chats = new Map();
	#timers = new Map();
	#leaving = false;
	busy = new Set(); // ids of chats that this tab is writing: no other tab's version replaces them

	constructor() {
		super();
		for (let i = 0; i < localStorage.length; i++) {
			const key = localStorage.key(i);
			if (key.startsWith(CHAT)) this.#read(localStorage.getItem(key), true);
		}
		this.activeId = localStorage.getItem("llaisys:active");
		if (!this.#chats.has(this.activeId)) this.activeId = this.all()[0]?.id ?? this.create().id;
		// Another tab wrote, or deleted, a chat.
		addEventListener("storage", ({ key, newValue }) => {
			if (!key?.startsWith(CHAT)) return;
			const id = key.slice(CHAT.length);
			if (this.busy.has(id)) return;
			if (newValue) this.#read(newValue, false);
			else this.#chats.delete(id);
			this.emit("list");
			if (id === this.activeId) this.#ensureActive();
		});
		// The browser breaks off the requests of a page that it leaves; that is not to be saved.
		addEventListener("pagehide", () => {
			this.flush();
			this.#leaving = true;
		});
		addEventListener("pageshow", () => { this.#leaving = false; });
		document.addEventListener("visibilitychange", () => document.hidden && this.flush());
	}

	/** `cut`: nobody is writing it any more, so an open answer is one that was interrupted. */
	#read(text, cut) {
		try {
			const chat = cleanChat(JSON.parse(text));
			const last = chat.messages.at(-1);
			if (cut && last?.finish === null) {
				last.finish = "interrupted";
				if (!last.content) chat.messages.pop();
			}
			const mine = this.#chats.get(chat.id);
			if (mine) Object.assign(chat, { draft: mine.draft, files: mine.files }); // what is being typed here stays
			this.#chats.set(chat.id, chat);
		} catch { /* not ours, or damaged: left where it is, not shown */ }
	}

	get active() {
		return this.#chats.get(this.activeId);
	}

	get(id) {
		return this.#chats.get(id);
	}

	/** The latest first. */
	all() {
		return [...this.#chats.values()].sort((a, b) => b.updated - a.updated || b.created - a.created);
	}

	/** An empty chat; the one that is empty already, if there is. Not saved until it has something. */
	create(settings = {}) {
		const empty = this.all().find((chat) => !chat.messages.length && !chat.draft && !chat.files.length && !chat.named);
		const chat = empty ?? cleanChat({ id: newId(), settings });
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

	/** Puts a chat (back) in. */
	add(chat) {
		this.#chats.set(chat.id, chat);
		this.save(chat);
		this.emit("list");
	}

	/** Saves now. `touch`: it becomes the latest. */
	save(chat, touch = false) {
		if (this.#leaving || !this.#chats.has(chat.id)) return; // or deleted while it was being written
		clearTimeout(this.#timers.get(chat.id));
		this.#timers.delete(chat.id);
		if (touch) chat.updated = Date.now();
		this.#write(CHAT + chat.id, JSON.stringify(chat));
	}

	/** Saves within a second; for what changes with every token or key. */
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

	/** Some chats, or all of them and the defaults. */
	export(chats) {
		const all = this.all().filter((chat) => chat.messages.length);
		return JSON.stringify({ format: "llaisys-chats", version: VERSION, chats: chats ?? all,
			defaults: chats ? undefined : readDefaults() }, null, 2);
	}

	/** Adds the chats of an export; ids that exist already get new ones. Returns how many. */
	import(text) {
		const data = JSON.parse(text);
		if (data?.format !== "llaisys-chats" || !Array.isArray(data.chats)) {
			throw new Error("this is not an export of this page");
		}
		const chats = data.chats.map(cleanChat);
		for (const chat of chats) {
			if (this.#chats.has(chat.id)) chat.id = newId();
			this.add(chat);
		}
		if (data.defaults && !Object.keys(readDefaults()).length) writeDefaults(data.defaults);
		return chats.length;
	}
}

/** Settings that new chats begin with. */
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
