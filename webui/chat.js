// Generation for any number of chats at once. A run writes only to its own message; the views follow
// the messages. After any outcome the chat can be used again.

import * as api from "./api.js";
import { appendCalls } from "./tool_calls.js";
import { Emitter } from "./events.js";
import { callTool } from "./mcp.js";
import { appendTokens } from "./probabilities.js";
import { newAnswer, toWireMessages, withAnotherVersion } from "./chat_schema.js";

const THINK = ["<think>\n", "\n</think>\n\n"];

/** Emits `progress` (chat, message), `state` (chat), `unauthorized`. */
export class Conversations extends Emitter {
	#store;
	#runs = new Map(); // chat id -> {controller, message}

	constructor(store) {
		super();
		this.#store = store;
	}

	isRunning(chat) {
		return this.#runs.has(chat.id);
	}

	/** The message that is being generated in a chat, or null. */
	writing(chat) {
		return this.#runs.get(chat.id)?.message ?? null;
	}

	send(chat, text) {
		const { messages: before, files } = chat;
		if (!chat.named && !before.length) chat.title = titleOf(text || files[0].name);
		chat.draft = "";
		chat.files = [];
		return this.#ask(chat, [...before, { role: "user", content: text, files, versions: null }], before, () => {
			chat.draft = [text, chat.draft].filter(Boolean).join("\n\n");
			chat.files = [...files, ...chat.files];
			return { kind: "send" };
		});
	}

	/** Generates message `index` again. The earlier answer and the messages after it become a version. */
	regenerate(chat, index) {
		const versions = withAnotherVersion(chat.messages, index);
		return this.#ask(chat, chat.messages.slice(0, index), chat.messages,
			() => ({ kind: "regenerate", index }), versions);
	}

	/** Replaces a user message; the earlier one and all messages after it become a version. On failure calls `onRestore`
	 * with the text. */
	edit(chat, index, text, onRestore) {
		const before = chat.messages;
		if (!chat.named && index === 0) chat.title = titleOf(text);
		const { files } = before[index];
		const message = { role: "user", content: text, files, versions: withAnotherVersion(before, index) };
		return this.#ask(chat, [...before.slice(0, index), message], before, () => onRestore(text));
	}

	/** Continues the last answer. */
	resume(chat) {
		const message = chat.messages.at(-1);
		return this.#run(chat, message, chat.messages, () => {}, { ...message });
	}

	/** Runs the tools that the last answer calls, then generates an answer with their results. */
	async runTools(chat) {
		const { messages } = chat;
		const { signal } = this.#begin(chat, null);
		const pending = messages.at(-1).calls.filter(({ result }) => result === null);
		await Promise.all(pending.map(async (call) => {
			const tool = toolOf(chat, call);
			call.result = tool ? await callTool(tool, call.arguments, signal).catch(() => null) : "Error: this tool is not allowed.";
		}));
		this.#end(chat);
		if (!signal.aborted) await this.regenerate(chat, messages.length);
	}

	stop(chat) {
		this.#runs.get(chat.id)?.controller.abort();
	}

	#ask(chat, messages, before, restoreInput, versions = null) {
		const message = { ...newAnswer(), versions };
		chat.messages = [...messages, message];
		return this.#run(chat, message, before, restoreInput, null);
	}

	/**
	 * A run without any output restores the messages `before` and calls `restoreInput`, which puts the typed
	 * text back and returns how to retry. `earlier`: a copy of the message that is continued.
	 */
	async #run(chat, message, before, restoreInput, earlier) {
		Object.assign(message, { finish: null, failure: null });
		const requestId = api.newRequestId();
		const { signal } = this.#begin(chat, message);
		// An unfinished answer is included only when it is continued.
		const prompt = toWireMessages(chat, earlier === null ? chat.messages.slice(0, -1) : chat.messages);

		const clock = new Clock(), reasoning = new ReasoningText();
		let failure = null;
		try {
			for await (const part of api.generate(prompt, chat.settings, { signal, requestId })) {
				if (signal.aborted) break;
				clock.note(part);
				message.content += reasoning.addition(message.content, part);
				appendCalls(message, part.calls);
				appendTokens(message, part.tokens);
				message.stats = clock.stats(message.stats);
				if (part.usage) message.usage = part.usage;
				if (part.finish) message.finish = part.finish;
				if (part.truncated) message.truncated = true;
				this.#store.saveSoon(chat);
				this.emit("progress", { chat, message });
			}
			if (message.finish === "error") throw new api.ApiError("The engine failed on this answer.", { requestId });
		} catch (error) {
			if (!signal.aborted) failure = describe(error, requestId);
		}
		if (signal.aborted) message.finish = "stopped";
		const nothing = message.content === (earlier?.content ?? "") && !message.calls.length;
		if ((failure || signal.aborted) && nothing) {
			if (earlier) Object.assign(message, earlier);
			chat.messages = before;
			const again = restoreInput() ?? null;
			if (failure) failure.again = again;
		}
		if (failure) {
			const failed = nothing && !earlier ? chat : message;
			failed.failure = failure;
			if (failed === message) message.finish = "error";
		}
		this.#end(chat);
		if (failure?.status === 401) this.emit("unauthorized");
	}

	/** Marks a chat as running, and returns the controller that `stop` uses. */
	#begin(chat, message) {
		if (this.#runs.has(chat.id)) throw new Error("this chat already has a run");
		const controller = new AbortController();
		this.#runs.set(chat.id, { controller, message });
		this.#store.busy.add(chat.id);
		chat.failure = null;
		this.#store.save(chat, true);
		this.emit("state", chat);
		return controller;
	}

	#end(chat) {
		this.#runs.delete(chat.id);
		this.#store.busy.delete(chat.id);
		this.#store.save(chat, true);
		this.emit("state", chat);
	}
}

/** The tool of an MCP server that a call names, or undefined. */
export const toolOf = (chat, { name }) => chat.settings.tools?.find((tool) => tool.name === name);

function describe(error, requestId) {
	const known = error instanceof api.ApiError;
	if (!known) console.error(error); // a bug of this page
	return {
		text: known ? error.message : `This page failed: ${error.message}`,
		status: known ? error.status : 0,
		requestId: error.requestId ?? requestId,
		retryAt: error.retryAfter === null || !known ? null : Date.now() + 1000 * error.retryAfter,
	};
}

function titleOf(text) {
	const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
	return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line || "New chat";
}

/** Time to first token and tokens per second after it, as observed by the page. */
class Clock {
	#start = performance.now();
	#first = null;
	#last = null;
	#parts = 0;
	#tokens = null; // the server's count, once received

	note({ text, reasoning, calls, usage }) {
		if (text || reasoning || calls.length) {
			this.#last = performance.now();
			this.#first ??= this.#last;
			this.#parts += 1; // nearly always one token
		}
		if (usage) this.#tokens = usage.completion;
	}

	stats(before) {
		if (this.#first === null) return before;
		const seconds = (this.#last - this.#first) / 1000;
		const tokens = this.#tokens ?? this.#parts;
		return {
			firstToken: Math.round(this.#first - this.#start), // ms
			rate: seconds > 0.02 && tokens > 1 ? (tokens - 1) / seconds : null, // tokens/s
			tokens,
		};
	}
}

/** Joins `reasoning_content` and `content` of a run to the single text that a chat stores, with the reasoning between
 * <think> tags. That text can be edited, copied, continued and sent again. */
class ReasoningText {
	#open = false; // inside of the reasoning

	/** The text that a chunk appends to `before`, the text so far. */
	addition(before, { reasoning, text }) {
		let added = "";
		if (reasoning) {
			added = (before ? "" : THINK[0]) + reasoning;
			this.#open = true;
		}
		if (text && this.#open) {
			added += THINK[1];
			this.#open = false;
		}
		return added + text;
	}
}
