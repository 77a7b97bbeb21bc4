// Settings of the active chat. An empty field means the server's default.

import * as api from "./api.js";
import { byId, h, toast } from "./dom.js";
import { writeDefaults } from "./store.js";
import { ToolsPanel } from "./tools_panel.js";

// name, label, type, attributes, hint
const FIELDS = [
	["model", "Model", "select", {}, ""],
	["system", "System prompt", "text", { rows: 3 }, ""],
	["temperature", "Temperature", "number", { min: 0, max: 100, step: "any" }, "0 = greedy"],
	["top_p", "Top-p", "number", { min: 0.0001, max: 1, step: "any" }, "1 = off"],
	["top_k", "Top-k", "integer", { min: -1, max: 2147483647 }, "0 = off"],
	["min_p", "Min-p", "number", { min: 0, max: 1, step: "any" }, "0 = off"],
	["repetition_penalty", "Repetition penalty", "number", { min: 0.01, max: 2, step: "any" }, "1 = off"],
	["presence_penalty", "Presence penalty", "number", { min: -2, max: 2, step: "any" }, "0 = off"],
	["frequency_penalty", "Frequency penalty", "number", { min: -2, max: 2, step: "any" }, "0 = off"],
	["max_tokens", "Max tokens", "integer", { min: 0, max: 2147483647 }, "Per answer, then Continue is offered; 0 = no limit"],
	["seed", "Seed", "integer", { min: 0, max: Number.MAX_SAFE_INTEGER }, "Makes answers reproducible"],
	["stop", "Stop strings", "lines", { rows: 2 }, "One per line; \\n is a line break"],
	["custom", "Custom parameters", "json", { rows: 2 }, "A JSON object, sent unchanged"],
	["stream", "Stream the answer", "switch", {}, ""],
	["reuse_prefix", "Prefix caching", "switch", {}, ""],
	["probabilities", "Show the probability of each token", "option", {}, ""],
	["keep", "Store this chat on the server", "option", {}, "Other browsers with the same API key can open it"],
];

// Sampling parameters with a recommended value, in the order in which they are shown.
const SAMPLING = Object.fromEntries(FIELDS.slice(2, 9).map(([name, label]) => [name, label.toLowerCase()]));
const MULTILINE = ["text", "lines", "json"];

export class Settings {
	#store;
	#dialog = byId("settings");
	#inputs = new Map();
	#picker = byId("model-picker"); // in the header, over the name of the model
	#recommended = h("p", { class: "hint" });
	#tools = new ToolsPanel(() => this.#store.active.settings.tools ?? [], (tools) => this.#save({ ...this.#store.active.settings, tools }));
	#models = [];
	#ready;

	/** `ready`: called when the list of models is loaded. */
	constructor(store, ready) {
		this.#store = store;
		this.#ready = ready;
		byId("settings-fields").append(...FIELDS.map((field) => this.#field(...field)));
		byId("settings-fields").append(this.#tools.element);
		byId("set-temperature").parentNode.before(this.#recommended);
		byId("settings-open").addEventListener("click", () => this.open());
		byId("sampling").addEventListener("click", () => this.open("max_tokens"));
		byId("settings-close").addEventListener("click", () => this.#dialog.close());
		byId("settings-reset").addEventListener("click", () => {
			this.#save({});
			this.#fill();
			this.#tools.show();
		});
		byId("settings-default").addEventListener("click", () => {
			writeDefaults(store.active.settings);
			toast("New chats will use these settings");
		});
		this.#dialog.addEventListener("change", () => this.#read());
		this.#dialog.addEventListener("click", (event) => event.target === this.#dialog && this.#dialog.close());
		byId("key-form").addEventListener("submit", (event) => {
			event.preventDefault();
			this.#saveKey();
		});
		byId("key-change").addEventListener("click", () => this.askForKey());
		byId("key-close").addEventListener("click", () => byId("key").close());
		byId("key-change").hidden = !localStorage.getItem("llaisys:key");
		api.setApiKey(localStorage.getItem("llaisys:key") ?? "");
		this.#picker.addEventListener("focus", () => this.#showStates());
		this.#picker.addEventListener("change", () => {
			const { model: _, ...others } = store.active.settings;
			const { value: model } = this.#picker;
			this.#save(model === this.#models[0].id ? others : { ...others, model });
		});
		store.on("active", () => this.#title());
	}

	/** `name`: the field that gets the focus. */
	open(name) {
		this.#fill();
		this.#dialog.showModal();
		if (name) this.#inputs.get(name).input.focus();
		this.#showStates();
		this.#tools.show();
	}

	/** Updates the load state of each model; the selection stays. */
	async #showStates() {
		const models = await api.models().catch(() => []);
		if (!models.length) return;
		this.#models = models;
		for (const option of [...this.#inputs.get("model").input.options, ...this.#picker.options]) {
			const model = models.find(({ id }) => id === option.value);
			if (model) option.textContent = modelLabel(model);
		}
	}

	/** Loads the list of models. While the server loads, shows its progress and polls. */
	async loadModels() {
		let shown;
		try {
			const progress = await api.loading();
			this.#models = progress ? [] : await api.models();
			if (this.#models.length) {
				this.#title();
				return this.#ready();
			}
			shown = `${progress?.stage ?? "loading the model"}…`;
			if (progress?.percent != null) shown += ` ${progress.percent} %`;
		} catch (error) {
			if (error.status === 401) return this.askForKey(true);
			shown = error.status ? error.message : "no connection";
		}
		byId("model-name").textContent = shown;
		setTimeout(() => this.loadModels(), 1000);
	}

	/** `rejected`: the server rejected the stored key, or requires one. */
	askForKey(rejected = false) {
		const key = localStorage.getItem("llaisys:key") ?? "";
		byId("key-change").hidden = false;
		byId("key-error").textContent = rejected && key ? "The server does not accept this key." : "";
		if (byId("key").open) return;
		byId("key-input").value = key;
		byId("key").showModal();
		byId("key-input").select();
	}

	#saveKey() {
		const key = byId("key-input").value.trim();
		if (key) localStorage.setItem("llaisys:key", key);
		else localStorage.removeItem("llaisys:key");
		api.setApiKey(key);
		byId("key").close();
		this.loadModels();
	}

	get #model() {
		const { model } = this.#store.active.settings;
		return this.#models.find(({ id }) => id === model) ?? this.#models[0];
	}

	#title() {
		byId("model-name").textContent = this.#model?.id ?? "";
		this.#picker.hidden = this.#models.length < 2;
		this.#picker.replaceChildren(...this.#options());
		this.#picker.value = this.#model?.id ?? "";
		const { settings } = this.#store.active;
		const used = { ...this.#model?.defaults, ...settings, ...settings.custom };
		const limit = used.max_completion_tokens ?? used.max_tokens;
		const sampling = samplingOf(used);
		byId("sampling").hidden = !this.#model;
		byId("sampling").title = ["Sampling and token limit of this chat", ...sampling].join("\n");
		byId("sampling").replaceChildren(h("span", {}, [...sampling.slice(0, 2), ""].join(" · ")),
			limit ? `max ${limit.toLocaleString("en")} tokens` : "no token limit");
	}

	#options() {
		return this.#models.map((model) => h("option", { value: model.id }, modelLabel(model)));
	}

	#field(name, label, type, attributes, hint) {
		const id = `set-${name}`;
		const input = type === "select" ? h("select", { id })
			: MULTILINE.includes(type) ? h("textarea", { id, ...attributes })
				: type === "switch" || type === "option" ? h("input", { id, type: "checkbox" })
					: h("input", { id, type: "number", ...attributes });
		this.#inputs.set(name, { input, type });
		const help = hint ? h("small", { id: `${id}-hint` }, hint) : null;
		if (help) input.setAttribute("aria-describedby", help.id);
		return h("div", { class: `field ${type}` }, h("label", { htmlFor: id }, label), input, help);
	}

	#fill() {
		const { settings } = this.#store.active;
		const defaults = this.#model?.defaults ?? {};
		const recommended = samplingOf(defaults).join(", ");
		this.#recommended.hidden = !recommended;
		this.#recommended.textContent = `Recommended for this model, and used where a field is empty: ${recommended}.`;
		this.#inputs.get("model").input.replaceChildren(...this.#options());
		for (const [name, { input, type }] of this.#inputs) {
			const value = settings[name];
			if (type === "switch") input.checked = value !== false;
			else if (type === "option") input.checked = value === true;
			else if (type === "json") input.value = value ? JSON.stringify(value, null, 1) : "";
			else if (type === "select") input.value = this.#model?.id ?? "";
			else if (type === "lines") input.value = (value ?? []).map(escapeLine).join("\n");
			else input.value = value ?? "";
			input.placeholder = MULTILINE.includes(type) ? "" : String(defaults[name] ?? "default");
		}
	}

	/** Saves valid fields; the browser marks invalid ones. */
	#read() {
		const { model, tools } = this.#store.active.settings;
		const settings = { ...(tools && { tools }), ...(model && !this.#models.length && { model }) };
		for (const [name, { input, type }] of this.#inputs) {
			const value = input.value;
			if (type === "json") input.setCustomValidity(objectIn(value) ? "" : "This must be a JSON object.");
			if (!input.checkValidity()) continue;
			if (type === "switch") {
				if (!input.checked) settings[name] = false;
			} else if (type === "option") {
				if (input.checked) settings[name] = true;
			} else if (type === "json") {
				const custom = objectIn(value);
				if (Object.keys(custom).length) settings[name] = custom;
			} else if (type === "lines") {
				const lines = value.split("\n").filter(Boolean).map(unescapeLine);
				if (lines.length) settings[name] = lines;
			} else if (value.trim() && !(type === "select" && value === this.#models[0]?.id)) {
				settings[name] = type === "number" || type === "integer" ? Number(value) : value;
			}
		}
		this.#save(settings);
	}

	#save(settings) {
		const chat = this.#store.active;
		chat.settings = settings;
		this.#store.save(chat);
		this.#store.emit("changed", chat);
		this.#title();
	}
}

const escapeLine = (text) => text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\t", "\\t");
const unescapeLine = (text) => text.replace(/\\([\\nt])/g, (_, char) => ({ n: "\n", t: "\t" })[char] ?? "\\");

/** The JSON object in a text; empty text gives {}, anything else null. */
function objectIn(text) {
	try {
		const value = JSON.parse(text.trim() || "{}");
		return value && typeof value === "object" && !Array.isArray(value) ? value : null;
	} catch {
		return null;
	}
}

/** Sampling parameters as texts. */
const samplingOf = (values) => Object.entries(SAMPLING).filter(([name]) => Number.isFinite(values[name]))
	.map(([name, label]) => `${label}\u00a0${values[name]}`);

/** The id of a model, with its state unless it is ready. */
function modelLabel({ id, state }) {
	return state === "ready" ? id : `${id} (${state})`;
}
