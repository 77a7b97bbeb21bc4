// Side bar list of chats: search, rename, delete with undo, switch.

import { byId, h, iconButton, toast } from "./dom.js";

const DAY = 86_400_000;

export class ChatList {
	#store;
	#chats;
	#sync;
	#onPick;
	#list = byId("chats");
	#search = byId("search");

	/** `onPick`: called after a chat is selected. */
	constructor(store, chats, serverSync, onPick) {
		this.#store = store;
		this.#chats = chats;
		this.#sync = serverSync;
		this.#onPick = onPick;
		this.#search.addEventListener("input", () => this.render());
		this.#search.addEventListener("keydown", (event) => {
			if (event.key === "Escape" && this.#search.value) {
				this.#search.value = "";
				this.render();
				event.stopPropagation();
			} else if (event.key === "Enter" || event.key === "ArrowDown") {
				event.preventDefault();
				this.#list.querySelector("button.chat")?.focus();
			}
		});
		this.#list.addEventListener("keydown", (event) => this.#key(event));
		store.on("list", () => this.render());
		store.on("active", () => this.render());
		chats.on("state", () => this.render());
	}

	focusSearch() {
		this.#search.focus();
		this.#search.select();
	}

	render() {
		if (this.#list.querySelector("input")) return; // a name is being typed
		const focused = this.#list.contains(document.activeElement)
			? document.activeElement.closest("li")?.dataset.id : null;
		const words = this.#search.value.toLowerCase().split(/\s+/).filter(Boolean);
		const chats = this.#store.all().filter((chat) => matches(chat, words)
			&& (chat.messages.length || chat.id === this.#store.activeId));
		const groups = Map.groupBy(chats, ({ updated }) => ageOf(updated));
		this.#list.replaceChildren(...[...groups].map(([name, group]) => section(name, group.map((chat) => this.#row(chat)))));
		const remote = this.#sync.remote.filter(({ title }) => words.every((word) => title.toLowerCase().includes(word)));
		if (remote.length) this.#list.append(section("On the server", remote.map((session) => this.#remoteRow(session))));
		if (!chats.length && !remote.length) this.#list.append(h("p", { class: "hint" }, "No chat matches."));
		if (focused) this.#list.querySelector(`[data-id="${focused}"] button`)?.focus();
	}

	#row(chat) {
		const active = chat.id === this.#store.activeId;
		const running = this.#chats.isRunning(chat);
		const open = h("button", { class: "chat", title: chat.title,
			onclick: () => { this.#store.activate(chat.id); this.#onPick(); },
			ondblclick: () => this.#rename(chat), "aria-current": active ? "page" : null },
		h("span", { class: "chat-title" }, chat.title),
		running ? h("span", { class: "pulse", role: "img", "aria-label": "answering" }) : null);
		return h("li", { data: { id: chat.id }, class: active ? "active" : "" }, open,
			iconButton("edit", `Rename “${chat.title}”`, () => this.#rename(chat)),
			iconButton("trash", `Delete “${chat.title}”`, () => this.#delete(chat)));
	}

	#remoteRow(session) {
		const title = session.title || "New chat";
		return h("li", { data: { id: session.id } }, h("button", { class: "chat", title,
			onclick: async () => { await this.#sync.open(session); this.#onPick(); } },
		h("span", { class: "chat-title" }, title)));
	}

	#rename(chat) {
		const row = this.#list.querySelector(`[data-id="${chat.id}"]`);
		const field = h("input", { value: chat.title, class: "rename", maxLength: 200, "aria-label": "Name of the chat" });
		let done = false;
		const close = (keep) => {
			if (done) return;
			done = true;
			const title = field.value.trim();
			if (keep && title && title !== chat.title) {
				Object.assign(chat, { title, named: true });
				this.#store.save(chat);
				this.#store.emit("changed", chat);
			}
			field.remove();
			this.#store.emit("list");
			this.#list.querySelector(`[data-id="${chat.id}"] button`)?.focus();
		};
		field.addEventListener("keydown", (event) => {
			event.stopPropagation();
			if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
			event.preventDefault(); // otherwise Enter presses the button that gets the focus
			close(event.key === "Enter");
		});
		field.addEventListener("blur", () => close(true));
		row.replaceChildren(field);
		field.select();
	}

	#delete(chat) {
		this.#chats.stop(chat);
		this.#store.remove(chat.id);
		this.#sync.forget(chat);
		toast(`“${chat.title.slice(0, 40)}” was deleted`, "Undo", () => {
			this.#store.add(chat);
			this.#store.activate(chat.id);
			this.#sync.sync(chat);
		});
		byId("prompt").focus();
	}

	/** Arrow keys move the focus in the list. */
	#key(event) {
		const row = event.target.closest("li");
		const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
		if (!step) return;
		event.preventDefault();
		const rows = [...this.#list.querySelectorAll("li")];
		rows[rows.indexOf(row) + step]?.firstChild.focus();
	}
}

const section = (name, rows) => h("section", {}, h("h2", {}, name), h("ul", {}, ...rows));

function matches(chat, words) {
	if (!words.length) return true;
	const text = [chat.title, ...chat.messages.map(({ content }) => content)].join("\n").toLowerCase();
	return words.every((word) => text.includes(word));
}

function ageOf(time) {
	const today = new Date().setHours(0, 0, 0, 0);
	if (time >= today) return "Today";
	if (time >= today - DAY) return "Yesterday";
	return time >= today - 7 * DAY ? "Last 7 days" : "Older";
}
