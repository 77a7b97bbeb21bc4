// Part of the settings: MCP servers of this browser and the tools of them that a chat may use. Hidden unless the
// server of this page allows MCP servers.

import { h } from "./dom.js";
import { allowedOrigins, listTools } from "./mcp.js";

const KEY = "llaisys:mcp";

export class ToolsPanel {
	#urls = h("textarea", { id: "mcp-urls", rows: 2, spellcheck: false, placeholder: `${allowedOrigins[0]}/mcp` });
	#list = h("div", { class: "mcp-tools" });
	#chosen; // () -> tools of the chat
	#choose;
	element = h("div", { class: "field lines" }, h("label", { htmlFor: "mcp-urls" }, "MCP servers"), this.#urls,
		h("small", {}, `One URL per line, at ${allowedOrigins.join(" or ")}. Each call of a tool needs your consent.`), this.#list);

	/** `chosen()`: the tools of the chat; `choose(tools)`: replaces them. */
	constructor(chosen, choose) {
		this.#chosen = chosen;
		this.#choose = choose;
		this.element.hidden = !allowedOrigins.length;
		this.#urls.value = localStorage.getItem(KEY) ?? "";
		this.element.addEventListener("change", (event) => {
			event.stopPropagation();
			if (event.target !== this.#urls) return;
			localStorage.setItem(KEY, this.#urls.value);
			this.show();
		});
	}

	/** Asks every server for its tools. */
	show() {
		if (!allowedOrigins.length) return;
		const urls = this.#urls.value.split(/\s+/).filter(Boolean);
		this.#list.replaceChildren(...urls.map((url) => {
			const part = h("div", { role: "group", "aria-label": url }, h("small", {}, `${url}: connecting…`));
			listTools(url).then(
				(tools) => part.replaceChildren(h("small", {}, `${url}: ${tools.length} tools`), ...tools.map((tool) => this.#row(tool))),
				(error) => part.replaceChildren(h("small", { role: "alert" }, error.message)));
			return part;
		}));
	}

	#row(tool) {
		const isChosen = this.#chosen().some(({ url, name }) => url === tool.url && name === tool.name);
		const box = h("input", { type: "checkbox", checked: isChosen, onchange: () => {
			const others = this.#chosen().filter(({ name }) => name !== tool.name); // names are unique in a request
			this.#choose(box.checked ? [...others, tool] : others);
			this.show();
		} });
		return h("label", { class: "mcp-tool" }, box, h("span", {}, h("code", {}, tool.name), ` ${tool.description.slice(0, 300)}`));
	}
}
