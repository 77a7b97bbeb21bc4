// Numbers for the curious: of the last answer, and of the server while the bar is open.

import * as api from "./api.js";
import { byId, h } from "./dom.js";

const PERIOD = 2000; // ms between two looks at the server

export class DebugBar {
	#store;
	#bar = byId("debug");
	#facts = byId("debug-facts");
	#server = null; // the latest metrics
	#timer = 0;
	#frame = 0;

	constructor(store, chats) {
		this.#store = store;
		this.#bar.open = localStorage.getItem("llaisys:debug") === "open";
		this.#bar.addEventListener("toggle", () => {
			localStorage.setItem("llaisys:debug", this.#bar.open ? "open" : "");
			this.#watch();
		});
		document.addEventListener("visibilitychange", () => this.#watch());
		store.on("active", () => this.#render());
		chats.on("state", () => this.#render());
		chats.on("progress", ({ chat }) => {
			if (chat === store.active) this.#frame ||= requestAnimationFrame(() => this.#render());
		});
		this.#watch();
	}

	#watch() {
		clearTimeout(this.#timer);
		if (this.#bar.open && !document.hidden) this.#look();
		this.#render();
	}

	async #look() {
		try {
			this.#server = await api.metrics();
		} catch {
			this.#server = null; // shown as dashes; the chat itself says what is wrong
		}
		this.#render();
		clearTimeout(this.#timer);
		if (this.#bar.open && !document.hidden) this.#timer = setTimeout(() => this.#look(), PERIOD);
	}

	#render() {
		this.#frame = 0;
		const message = this.#store.active?.messages.findLast(({ role }) => role === "assistant");
		const { stats, usage } = message ?? {};
		const rate = stats?.rate ? `${stats.rate.toFixed(1)} tok/s` : null;
		byId("debug-brief").textContent = stats
			? [`first token ${time(stats.firstToken)}`, rate].filter(Boolean).join(" · ") : "";
		if (!this.#bar.open) return;
		const server = this.#server ?? {};
		const queries = server.prefix_cache_queries_total;
		const drafts = server.spec_decode_num_draft_tokens_total;
		const facts = [
			["First token", time(stats?.firstToken)],
			["Speed", rate],
			["Answer", count(usage?.completion ?? stats?.tokens, "tokens")],
			["Prompt", count(usage?.prompt, "tokens")],
			["Cached", usage && `${usage.cached} (${percent(usage.cached / usage.prompt)})`],
			["Prefix hits", queries ? percent((server.prefix_cache_hits_total ?? 0) / queries) : null],
			["Drafts right", drafts ? percent((server.spec_decode_num_accepted_tokens_total ?? 0) / drafts) : null],
			["Running", count(server.num_requests_running)],
			["Waiting", count(server.num_requests_waiting)],
			["KV in use", server.kv_cache_usage_perc === undefined ? null : percent(server.kv_cache_usage_perc)],
		];
		if (drafts) facts.splice(7, 0, ["Tokens of a step", lengths(server)], ["Right by place", places(server)]);
		const memory = server.gpu_memory_total_bytes; // nothing of it on a CPU
		if (memory) facts.push(["GPU memory", percent(server.gpu_memory_used_bytes / memory)]);
		if (server.gpu_usage_perc !== undefined) facts.push(["GPU busy", percent(server.gpu_usage_perc)]);
		this.#facts.replaceChildren(...facts.map(([name, value]) =>
			h("div", {}, h("dt", {}, name), h("dd", {}, value ?? "–"))));
	}
}

const time = (ms) => ms === undefined || ms === null ? null : ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(2)} s`;
const count = (value, unit = "") => Number.isFinite(value) ? `${value} ${unit}`.trim() : null;
const percent = (part) => Number.isFinite(part) ? `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %` : "0 %";

/** Tokens that a step with drafts brings a request, the drawn one included. */
function lengths(server) {
	const asked = server.spec_decode_num_drafts_total;
	return asked ? (1 + (server.spec_decode_num_accepted_tokens_total ?? 0) / asked).toFixed(2) : null;
}

/** How many of the drafts were right up to their first, second .. token; places that none reached are left out. */
function places(server) {
	const asked = server.spec_decode_num_drafts_total, shares = [];
	for (let place = 0; asked; place++) {
		const accepted = server[`spec_decode_num_accepted_tokens_per_pos_total.${place}`];
		if (!accepted) break;
		shares.push(Math.round(100 * accepted / asked));
	}
	return shares.length ? `${shares.join(" · ")} %` : null;
}
