// Entry point: connects the modules; keyboard shortcuts, theme, side bar, export and import.

import { Conversations } from "./chat.js";
import { Composer } from "./composer.js";
import { StatsPanel } from "./stats_panel.js";
import { byId, download, icon, toast } from "./dom.js";
import { ServerSync } from "./server_sync.js";
import { chatAsMarkdown } from "./chat_schema.js";
import { ChatList } from "./chat_list.js";
import { Settings } from "./settings.js";
import { Store, readDefaults } from "./store.js";
import { Thread } from "./thread.js";

for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));

const narrow = matchMedia("(max-width: 760px)");
const store = new Store();
const chats = new Conversations(store);
const settings = new Settings(store, () => serverSync.listRemote());
const composer = new Composer(store, chats, () => thread.editLast());
const thread = new Thread(store, chats, (text) => composer.submit(text));
const serverSync = new ServerSync(store, chats);
const chatList = new ChatList(store, chats, serverSync, () => {
	if (narrow.matches) showSidebar(false);
	composer.focus();
});
new StatsPanel(store, chats);

function newChat() {
	store.activate(store.create(readDefaults()).id);
	if (narrow.matches) showSidebar(false);
	composer.focus();
}

// ---- side bar

function showSidebar(open) {
	document.body.classList.toggle("sidebar-open", open);
	document.body.classList.toggle("sidebar-closed", !open);
	byId("sidebar").inert = !open;
	byId("main").inert = open && narrow.matches;
	byId("sidebar-toggle").setAttribute("aria-expanded", String(open));
	if (open && narrow.matches) byId("new-chat").focus();
}

narrow.addEventListener("change", () => showSidebar(!narrow.matches));
byId("scrim").addEventListener("click", () => showSidebar(false));
byId("sidebar-toggle").addEventListener("click",
	() => showSidebar(!document.body.classList.contains("sidebar-open")));
byId("sidebar-close").addEventListener("click", () => {
	showSidebar(false);
	byId("sidebar-toggle").focus();
});
byId("new-chat").addEventListener("click", newChat);
byId("new-chat-top").addEventListener("click", newChat);

// ---- theme: system -> light -> dark

const THEMES = { auto: "system", light: "light", dark: "dark" };

function showTheme(theme) {
	if (theme === "auto") delete document.documentElement.dataset.theme;
	else document.documentElement.dataset.theme = theme;
	byId("theme").title = `Theme: ${THEMES[theme]}`;
	byId("theme").setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
	byId("theme").replaceChildren(icon(theme));
}

byId("theme").addEventListener("click", () => {
	const names = Object.keys(THEMES);
	const theme = names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
	localStorage.setItem("llaisys:theme", theme);
	showTheme(theme);
});

// ---- export and import

function save(name, type, text) {
	download(name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50) + type, type === ".md" ? "text/markdown" : "application/json", text);
}

const EXPORTS = {
	"export-markdown": () => save(store.active.title, ".md", chatAsMarkdown(store.active)),
	"export-json": () => save(store.active.title, ".json", store.export([store.active])),
	"export-all": () => save("chats", ".json", store.export()),
	import: () => byId("import-file").click(),
};
for (const [id, run] of Object.entries(EXPORTS)) {
	byId(id).addEventListener("click", () => {
		byId("menu").hidePopover();
		run();
	});
}
byId("import-file").addEventListener("change", async ({ target }) => {
	for (const file of target.files) {
		try {
			const count = store.import(await file.text());
			toast(count === 1 ? "1 chat was imported" : `${count} chats were imported`);
		} catch (error) {
			toast(`${file.name} was not imported: ${error.message}`);
		}
	}
	target.value = "";
});

// ---- keys

addEventListener("keydown", (event) => {
	const command = event.ctrlKey || event.metaKey;
	const key = event.key.toLowerCase();
	if (event.defaultPrevented || event.isComposing) return;
	if (event.key === "Escape") {
		if (document.querySelector("dialog[open], [popover]:popover-open")) return;
		if (narrow.matches && document.body.classList.contains("sidebar-open")) showSidebar(false);
		else if (!composer.cancel()) return;
	} else if (command && event.shiftKey && key === "o") newChat();
	else if (command && key === "k") {
		showSidebar(true);
		chatList.focusSearch();
	} else if (command && key === ",") settings.open();
	else if (key === "/" && !event.target.closest("input, textarea, select, dialog")) composer.focus();
	else return;
	event.preventDefault();
});

// ---- start

chats.on("unauthorized", () => settings.askForKey(true));
store.on("trouble", (text) => toast(text));
if (!store.active.messages.length && !Object.keys(store.active.settings).length) {
	store.active.settings = readDefaults();
}
showTheme(document.documentElement.dataset.theme ?? "auto");
showSidebar(!narrow.matches);
chatList.render();
thread.show();
composer.load();
if (!narrow.matches) composer.focus();
settings.loadModels();
