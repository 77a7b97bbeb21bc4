// Text attachments of the next message: chosen, dropped or pasted. Stored with the chat until sent.

import { byId, h, iconButton, toast } from "./dom.js";

const MAX_BYTES = 256 << 10; // per file
const MAX_FILES = 10; // per message

export class Attachments {
	#store;
	#list = byId("files");
	#changed;

	/** `changed`: called when the attachments change. */
	constructor(store, changed) {
		this.#store = store;
		this.#changed = changed;
		const input = byId("file-input");
		byId("attach").addEventListener("click", () => input.click());
		input.addEventListener("change", async () => {
			await this.#add([...input.files]);
			input.value = "";
		});
		const dock = byId("dock");
		for (const kind of ["dragover", "drop", "paste"]) {
			dock.addEventListener(kind, (event) => {
				const { files, types } = event.dataTransfer ?? event.clipboardData;
				if (!types.includes("Files")) return;
				event.preventDefault();
				if (kind !== "dragover") this.#add([...files]);
			});
		}
	}

	/** Shows the files of the active chat. */
	show() {
		const chat = this.#store.active;
		this.#list.hidden = !chat.files.length;
		this.#list.replaceChildren(...chat.files.map((file) => h("li", { class: "file" },
			h("span", {}, `${file.name} · ${size(file.text)}`),
			iconButton("close", `Remove ${file.name}`, () => this.#keep(chat, chat.files.filter((other) => other !== file))))));
	}

	async #add(files) {
		const chat = this.#store.active;
		for (const file of files) {
			const { text, trouble } = await read(file, chat.files.length);
			if (trouble) toast(`${file.name} was not attached: ${trouble}`);
			else this.#keep(chat, [...chat.files, { name: file.name, text }]);
		}
	}

	#keep(chat, files) {
		chat.files = files;
		this.#store.save(chat);
		if (chat !== this.#store.active) return;
		this.show();
		this.#changed();
	}
}

async function read(file, count) {
	if (count >= MAX_FILES) return { trouble: `a message may have ${MAX_FILES} files` };
	if (file.size > MAX_BYTES) return { trouble: `it has ${Math.ceil(file.size / 1024)} kB; the limit is ${MAX_BYTES / 1024} kB` };
	try {
		const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
		return text.includes("\0") ? { trouble: "it is not a text file" } : { text };
	} catch {
		return { trouble: "it is not a text file" };
	}
}

/** The files of a sent message, collapsed, above its text; null without files. */
export function sentFiles(files) {
	return files.length ? h("div", { class: "sent-files" }, ...files.map(({ name, text }) => h("details", { class: "sent-file" },
		h("summary", {}, `${name} · ${size(text)}`), h("pre", { tabIndex: 0, "aria-label": name }, text)))) : null;
}

function size(text) {
	const bytes = new Blob([text]).size;
	return bytes < 1024 ? `${bytes} bytes` : `${Math.round(bytes / 1024)} kB`;
}
