// Client of MCP servers (Streamable HTTP). The browser calls them directly, without credentials; the
// Content-Security-Policy of the page permits the origins of the option --mcp-origin only.

import { eventData } from "./sse.js";

const PROTOCOL = "2025-06-18";
const TIMEOUT = 60_000; // ms per request
const MAX_TOOLS = 200; // of a server
const MAX_RESULT = 100_000; // characters

/** Origins that the page may call; empty: the feature is off. */
export const allowedOrigins = document.querySelector("meta[name=mcp-origins]")?.content.split(" ").filter(Boolean) ?? [];

const servers = new Map(); // url -> McpServer

/** The tools of a server: [{url, name, description, schema}]. Throws with a message for the user. */
export async function listTools(url) {
	const tools = [];
	for (let cursor; ;) {
		const page = await serverAt(url).request("tools/list", cursor ? { cursor } : {});
		for (const { name, description, inputSchema } of page.tools ?? []) {
			tools.push({ url, name: String(name), description: String(description ?? ""), schema: inputSchema ?? { type: "object" } });
		}
		cursor = page.nextCursor;
		if (!cursor || tools.length >= MAX_TOOLS) return tools.slice(0, MAX_TOOLS);
	}
}

/** The result of a call as text; an error of the tool is a text, too. Throws when `signal` fires. */
export async function callTool({ url, name }, given, signal) {
	try {
		const result = await serverAt(url).request("tools/call", { name, arguments: JSON.parse(given || "{}") }, signal);
		const texts = (result.content ?? []).map((part) => part.type === "text" ? part.text : `[${part.type}]`);
		const text = texts.length ? texts.join("\n") : JSON.stringify(result.structuredContent ?? "");
		return (result.isError ? `Error: ${text}` : text).slice(0, MAX_RESULT);
	} catch (error) {
		signal?.throwIfAborted();
		return `Error: ${error.message}`;
	}
}

function serverAt(url) {
	if (!servers.has(url)) servers.set(url, new McpServer(url));
	return servers.get(url);
}

class McpServer {
	#url;
	#ready = null; // promise of the initialisation
	#session = null;
	#version = null; // negotiated protocol
	#id = 0;

	constructor(url) {
		this.#url = url;
	}

	/** The result of a JSON-RPC request. A session that the server has forgotten is opened again, once. */
	async request(method, params, signal) {
		for (let isRetry = false; ; isRetry = true) {
			this.#ready ??= this.#initialize().catch((error) => {
				this.#ready = null;
				throw error;
			});
			await this.#ready;
			const hadSession = this.#session !== null;
			try {
				return await this.#send(method, params, signal);
			} catch (error) {
				if (error.status !== 404 || !hadSession || isRetry) throw error;
				this.#ready = this.#session = this.#version = null;
			}
		}
	}

	async #initialize() {
		const clientInfo = { name: "NovaInfer web chat", version: "1" };
		const { protocolVersion } = await this.#send("initialize", { protocolVersion: PROTOCOL, capabilities: {}, clientInfo });
		this.#version = protocolVersion;
		await this.#post({ jsonrpc: "2.0", method: "notifications/initialized" });
	}

	async #send(method, params, signal) {
		const id = ++this.#id;
		const response = await this.#post({ jsonrpc: "2.0", id, method, params }, signal);
		const { result, error } = await answerTo(id, response);
		if (error) throw new Error(String(error.message ?? "the MCP server failed"));
		return result ?? {};
	}

	async #post(message, signal) {
		const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
		if (this.#session) headers["Mcp-Session-Id"] = this.#session;
		if (this.#version) headers["MCP-Protocol-Version"] = this.#version;
		const timeout = AbortSignal.timeout(TIMEOUT);
		let response;
		try {
			response = await fetch(this.#url, {
				method: "POST", headers, body: JSON.stringify(message), credentials: "omit", redirect: "error", cache: "no-store",
				signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
			});
		} catch (error) {
			throw signal?.aborted ? error : new Error(`${this.#url} cannot be reached: is it running, and does it allow this page (CORS)?`);
		}
		this.#session = response.headers.get("mcp-session-id") ?? this.#session;
		if (response.ok) return response;
		throw Object.assign(new Error(`${this.#url} answered ${response.status}.`), { status: response.status });
	}
}

/** The JSON-RPC response with this id, from a JSON body or an event stream. */
async function answerTo(id, response) {
	if (!response.headers.get("content-type")?.includes("event-stream")) return response.json();
	for await (const data of eventData(response.body)) {
		const message = JSON.parse(data);
		if (message.id === id && !message.method) return message;
	}
	throw new Error("the MCP server closed the connection without an answer");
}
