// HTTP client of the server. The only module with URLs, headers and wire names.

import { eventData } from "./sse.js";

const ROOT = new URL(".", document.baseURI);
const PREFIX = "llaisys:"; // of metric names
const PARAMETERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop",
	"repetition_penalty", "presence_penalty", "frequency_penalty", "reuse_prefix", "model"];
const TOP_LOGPROBS = 5; // alternatives shown beside the sampled token
const MAX_TOKENS = 1024; // of an answer, unless the settings or the server have another limit
// Ends an answer that loops; "Custom" of the settings may replace it.
const REPETITION = { max_pattern_size: 64, min_pattern_size: 4, min_count: 6 };
let defaults = {}; // model id -> default sampling parameters; "": of the first model

/** A failed request, with a message for the user. `status` 0: no response. */
export class ApiError extends Error {
	constructor(message, fields = {}) {
		super(message);
		this.status = fields.status ?? 0;
		this.code = fields.code ?? null;
		this.param = fields.param ?? null;
		this.requestId = fields.requestId ?? null;
		this.retryAfter = fields.retryAfter ?? null; // seconds
	}
}

let apiKey = "";

export function setApiKey(key) {
	apiKey = key;
}

export function newRequestId() {
	const words = crypto.getRandomValues(new Uint32Array(2));
	return "web-" + Array.from(words, (word) => word.toString(16).padStart(8, "0")).join("");
}

async function call(path, { method, body, signal, requestId } = {}) {
	const headers = {};
	if (body) headers["Content-Type"] = "application/json";
	if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
	if (requestId) headers["X-Request-Id"] = requestId;
	let response;
	try {
		response = await fetch(new URL(path, ROOT), {
			method: method ?? (body ? "POST" : "GET"),
			headers,
			body: body ? JSON.stringify(body) : undefined,
			signal,
			cache: "no-store",
			credentials: "same-origin",
		});
	} catch (error) {
		throw signal?.aborted ? error : unreachable(requestId);
	}
	if (!response.ok) throw await errorFrom(response, requestId);
	return response;
}

function unreachable(requestId) {
	return new ApiError(navigator.onLine === false
		? "You are offline."
		: "The server cannot be reached. Is it still running?", { requestId });
}

async function errorFrom(response, requestId) {
	const fields = { status: response.status, requestId: response.headers.get("x-request-id") ?? requestId };
	const wait = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
	if (wait >= 0) fields.retryAfter = wait;
	let message = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
	try {
		const { error } = await response.json();
		if (error?.message) message = error.message;
		fields.code = error?.code;
		fields.param = error?.param;
	} catch { /* not JSON, such as a proxy's error page: report the status */ }
	return new ApiError(message, fields);
}

/** null when the model is loaded, else {stage, percent}; unknown values are null. */
export async function loading() {
	const response = await fetch(new URL("health", ROOT), { cache: "no-store" }).catch(() => {
		throw unreachable();
	});
	const { status, stage, progress } = await response.json().catch(() => ({}));
	if (status !== "loading") return null;
	return { stage: stage ?? null, percent: Number.isFinite(progress) ? Math.floor(100 * progress) : null };
}

/** [{id, state, defaults}]; `defaults`: the server's default sampling parameters, and a token limit. */
export async function models() {
	const { data } = await (await call("v1/models")).json();
	const found = data.map((card) => ({
		id: card.id,
		state: card.state ?? "ready",
		defaults: { max_tokens: maxTokens(card.max_model_len), ...card.default_sampling_params },
	}));
	defaults = Object.fromEntries(found.map((model) => [model.id, model.defaults]));
	defaults[""] = found[0]?.defaults;
	return found;
}

/** Default token limit: prompts keep three quarters of the context. */
const maxTokens = (length) => length ? Math.min(MAX_TOKENS, Math.ceil(length / 4)) : MAX_TOKENS;

// ---- sessions: chats stored on the server

/** [{id, title, updated}], latest first. */
export async function sessions() {
	const { data } = await (await call("v1/sessions")).json();
	return data.map(({ id, title, updated }) => ({ id, title, updated: 1000 * updated }));
}

/** {title, messages: [{role, content}], client_state}; `client_state`: a text of the page, or null. */
export const readSession = async (id) => (await call(`v1/sessions/${id}`)).json();

/** Replaces the content of a session, as `readSession` returns it. */
export const writeSession = (id, content) => call(`v1/sessions/${id}`, { method: "PUT", body: content });

export const deleteSession = (id) => call(`v1/sessions/${id}`, { method: "DELETE" });

/** Metric name without prefix -> sum over labels; with a label `position` also name.position. No histogram buckets. */
export async function metrics() {
	const text = await (await call("metrics")).text();
	const values = {};
	for (const line of text.split("\n")) {
		if (!line.startsWith(PREFIX) || line.includes("_bucket{")) continue;
		const end = line.search(/[{ ]/);
		const name = line.slice(PREFIX.length, end);
		const value = Number(line.slice(line.lastIndexOf(" ") + 1));
		const position = /[{,]position="(\d+)"/.exec(line)?.[1];
		for (const key of position === undefined ? [name] : [name, `${name}.${position}`]) values[key] = (values[key] ?? 0) + value;
	}
	return values;
}

/**
 * Yields {text, reasoning, calls, tokens, finish, usage, truncated} per chunk; one chunk when `settings.stream` is false.
 * `messages`: [{role, content}]. A final assistant message is continued.
 * Throws ApiError, or AbortError when `signal` fires.
 */
export async function* generate(messages, settings, { signal, requestId }) {
	const parameters = { max_tokens: (defaults[settings.model ?? ""] ?? {}).max_tokens ?? MAX_TOKENS, repetition_detection: REPETITION };
	for (const name of PARAMETERS) if (settings[name] !== undefined) parameters[name] = settings[name];
	if (!parameters.max_tokens || settings.custom?.max_completion_tokens) delete parameters.max_tokens; // 0: no limit
	if (settings.tools?.length) parameters.tools = settings.tools.map(toWireTool);
	if (settings.probabilities) Object.assign(parameters, { logprobs: true, top_logprobs: TOP_LOGPROBS });
	Object.assign(parameters, settings.custom);
	parameters.stream = settings.stream !== false;
	if (parameters.stream) parameters.stream_options = { include_usage: true };
	const resume = messages.at(-1).role === "assistant"
		? { continue_final_message: true, add_generation_prompt: false } : { drop_old_turns: true };
	yield* answer({ ...parameters, ...resume, messages }, { signal, requestId });
}

async function* answer(body, options) {
	const response = await call("v1/chat/completions", { ...options, body });
	const requestId = response.headers.get("x-request-id") ?? options.requestId;
	try {
		if (response.headers.get("content-type")?.includes("json")) {
			yield part(await response.json());
			return;
		}
		let finished = false;
		for await (const data of eventData(response.body)) {
			if (data === "[DONE]") break;
			const chunk = JSON.parse(data);
			if (chunk.error) throw new ApiError(chunk.error.message, { ...chunk.error, requestId });
			const next = part(chunk);
			finished ||= Boolean(next.finish);
			yield next;
		}
		if (!finished) throw new ApiError("The connection closed before the answer was complete.", { requestId });
	} catch (error) {
		if (error instanceof ApiError || options.signal?.aborted) throw error;
		throw error instanceof SyntaxError
			? new ApiError("The server sent something that is not JSON.", { requestId })
			: new ApiError("The connection was lost before the answer was complete.", { requestId });
	}
}

function part(response) {
	const choice = response.choices?.[0];
	const delta = choice?.delta ?? choice?.message ?? {};
	return {
		text: delta.content ?? "",
		reasoning: delta.reasoning_content ?? "",
		calls: delta.tool_calls ?? [], // whole calls or deltas
		tokens: (choice?.logprobs?.content ?? []).map((token) => ({ ...likelihood(token), others: (token.top_logprobs ?? []).map(likelihood) })),
		finish: choice?.stop_reason === "repetition_detected" ? "repetition" : choice?.finish_reason ?? null,
		truncated: Boolean(response.context_truncated),
		usage: response.usage && {
			prompt: response.usage.prompt_tokens,
			completion: response.usage.completion_tokens,
			cached: response.usage.prompt_tokens_details?.cached_tokens ?? 0,
		},
	};
}

const toWireTool = ({ name, description, schema }) => ({ type: "function", function: { name, description, parameters: schema } });
const likelihood = ({ token, logprob }) => ({ text: token, probability: Math.exp(logprob) });
