// Statistics of the last answer, and server metrics while the panel is open.

import * as api from "./api.js";
import { byId, h } from "./dom.js";

const PERIOD = 2000; // ms between two polls of the server

export class StatsPanel {
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
			this.#start();
		});
		document.addEventListener("visibilitychange", () => this.#start());
		store.on("active", () => this.#render());
		chats.on("state", () => this.#render());
		chats.on("progress", ({ chat }) => {
			if (chat === store.active) this.#frame ||= requestAnimationFrame(() => this.#render());
		});
		this.#start();
	}

	#start() {
		clearTimeout(this.#timer);
		if (this.#bar.open && !document.hidden) this.#poll();
		this.#render();
	}

	async #poll() {
		try {
			this.#server = await api.metrics();
		} catch {
			this.#server = null; // shown as dashes; the chat shows the error
		}
		this.#render();
		clearTimeout(this.#timer);
		if (this.#bar.open && !document.hidden) this.#timer = setTimeout(() => this.#poll(), PERIOD);
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
			["Prefix cache hits", queries ? percent((server.prefix_cache_hits_total ?? 0) / queries) : null],
			["Running", count(server.num_requests_running)],
			["Waiting", count(server.num_requests_waiting)],
			["KV cache used", server.kv_cache_usage_perc === undefined ? null : percent(server.kv_cache_usage_perc)],
		];
		if (drafts) facts.splice(6, 0, ["Draft acceptance", percent((server.spec_decode_num_accepted_tokens_total ?? 0) / drafts)], ["Tokens per step", acceptedLength(server)], ["Acceptance per position", acceptancePerPosition(server)]);
		const memory = server.gpu_memory_total_bytes; // absent on a CPU
		if (memory) facts.push(["GPU memory", percent(server.gpu_memory_used_bytes / memory)]);
		if (server.gpu_usage_perc !== undefined) facts.push(["GPU utilization", percent(server.gpu_usage_perc)]);
		this.#facts.replaceChildren(...facts.map(([name, value]) =>
			h("div", {}, h("dt", {}, name), h("dd", {}, value ?? "–"))));
	}
}

const time = (ms) => ms === undefined || ms === null ? null : ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(2)} s`;
const count = (value, unit = "") => Number.isFinite(value) ? `${value} ${unit}`.trim() : null;
const percent = (part) => Number.isFinite(part) ? `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %` : "0 %";

/** Mean tokens per request and verification step, the sampled one included. */
function acceptedLength(server) {
	const drafts = server.spec_decode_num_drafts_total;
	return drafts ? (1 + (server.spec_decode_num_accepted_tokens_total ?? 0) / drafts).toFixed(2) : null;
}

/** Acceptance rate of the first, second, ... draft token; positions without accepted tokens are omitted. */
function acceptancePerPosition(server) {
	const drafts = server.spec_decode_num_drafts_total, rates = [];
	for (let position = 0; drafts; position++) {
		const accepted = server[`spec_decode_num_accepted_tokens_per_pos_total.${position}`];
		if (!accepted) break;
		rates.push(Math.round(100 * accepted / drafts));
	}
	return rates.length ? `${rates.join(" · ")} %` : null;
}
