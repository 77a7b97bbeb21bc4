// Fields of chats and messages, and their normalisation from storage, files or the server.
//
// A chat: {id, title, named, created, updated, settings, messages, draft, files, session, failure}; `files`:
// attachments of the next message; `session`: its id on the server or null.
// A user message: {role, content, files: [{name, text}], versions}.
// An answer: {role, content, calls, finish, usage, stats, failure, edited, versions}; `finish` is null during
// generation. `versions` is null or a list of alternative messages, each with the messages after it (`tail`);
// the entry of the shown message is null.

import { fromWireCalls, normaliseCalls, normaliseTools, toWireCalls, toWireResults } from "./tool_calls.js";

const ROLES = ["user", "assistant"];

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

/** A chat with exactly the fields above. */
export function normaliseChat(raw) {
	const now = Date.now();
	return {
		id: /^[\w-]{1,64}$/.test(raw.id) ? raw.id : newId(),
		title: String(raw.title ?? "New chat").slice(0, 200),
		named: Boolean(raw.named),
		created: Number(raw.created) || now,
		updated: Number(raw.updated) || now,
		settings: { ...raw.settings, ...(raw.settings?.tools && { tools: normaliseTools(raw.settings.tools) }) },
		messages: normaliseMessages(raw.messages),
		draft: String(raw.draft ?? ""),
		files: normaliseFiles(raw.files),
		session: /^[\w.-]{1,64}$/.test(raw.session ?? "") ? raw.session : null,
		failure: raw.failure ?? null,
	};
}

function normaliseMessages(raw) {
	return (Array.isArray(raw) ? raw : []).filter((message) => ROLES.includes(message?.role)).map((message) =>
		({ ...normaliseMessage(message), versions: normaliseVersions(message.versions, message.role) }));
}

/** A message without its versions. */
const normaliseMessage = (raw) => raw.role === "user"
	? { role: "user", content: String(raw.content ?? ""), files: normaliseFiles(raw.files) } : normaliseAnswer(raw);

function normaliseAnswer(raw) {
	return {
		role: "assistant",
		content: String(raw.content ?? ""),
		finish: raw.finish ?? null,
		usage: numbers(raw.usage),
		stats: numbers(raw.stats),
		failure: raw.failure ?? null,
		edited: Boolean(raw.edited),
		calls: normaliseCalls(raw.calls),
		truncated: Boolean(raw.truncated),
	};
}

/** The fields of an object that are numbers, or null. */
function numbers(raw) {
	return raw ? Object.fromEntries(Object.entries(raw).filter(([, value]) => Number.isFinite(value))) : null;
}

function normaliseVersions(raw, role) {
	if (!Array.isArray(raw) || raw.filter((version) => !version).length !== 1) return null;
	return raw.map((version) => version && { ...normaliseMessage({ ...version, role }), tail: normaliseMessages(version.tail) });
}

function normaliseFiles(raw) {
	return (Array.isArray(raw) ? raw : []).map(({ name, text }) =>
		({ name: String(name ?? "file").slice(0, 200), text: String(text ?? "") }));
}

/** An empty answer. */
export const newAnswer = () => ({ ...normaliseAnswer({}), versions: null });

/** The message at `index` and the messages after it as a version. */
function asVersion(messages, index) {
	const { versions: _, ...message } = messages[index];
	return { ...message, tail: messages.slice(index + 1) };
}

/** The versions of the message at `index` plus an entry for a new one; null when the message is empty. */
export function withAnotherVersion(messages, index) {
	const message = messages[index];
	if (!message?.content && !message?.files?.length) return null;
	return [...(message.versions ?? [null]).map((version) => version ?? asVersion(messages, index)), null];
}

/** The messages with version `number` of the message at `index`. */
export function showVersion(messages, index, number) {
	const { versions } = messages[index];
	const { tail, ...message } = versions[number];
	const others = versions.map((version, i) => i === number ? null : version ?? asVersion(messages, index));
	return [...messages.slice(0, index), { ...message, versions: others }, ...tail];
}

/** The versions of all messages as a text, null without any; `withVersions` adds them to the same messages. */
export function versionsOf(messages) {
	const found = messages.map(({ versions }) => versions ?? 0);
	return found.some(Boolean) ? JSON.stringify({ versions: found }) : null;
}

/** The messages of a session with the versions in `text`; unreadable text adds none. */
export function withVersions(messages, text) {
	let versions = [];
	try {
		versions = JSON.parse(text)?.versions ?? [];
	} catch { /* written by another client */ }
	return messages.map((message, i) => ({ ...message, versions: versions[i] }));
}

/** The content sent to the model: attached files, then the text. */
function contentOf({ content, files }) {
	return [...(files ?? []).map(fenced), content].filter(Boolean).join("\n\n");
}

/** The system prompt and messages in the server's format: results of tool calls are messages of their own. */
export const toWireMessages = ({ settings: { system } }, messages) => [
	...(system ? [{ role: "system", content: system }] : []),
	...messages.flatMap((message) => [{
		role: message.role, content: contentOf(message),
		...(message.calls?.length && { tool_calls: toWireCalls(message.calls) }),
	}, ...toWireResults(message.calls ?? [])])];

/** Messages of the server as messages of a chat, except system messages: results belong to their calls. */
export function fromWireMessages(messages) {
	const found = [];
	for (const { role, content, tool_calls: calls, tool_call_id: id } of messages) {
		if (role === "tool") {
			const call = found.at(-1)?.calls?.find((made) => made.id === id && made.result === null);
			if (call) call.result = content ?? "";
		} else if (ROLES.includes(role)) {
			found.push({ role, content, calls: fromWireCalls(calls ?? []) });
		}
	}
	return found;
}

function fenced({ name, text }) {
	const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
	const fence = "`".repeat(longest + 1);
	return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export function chatAsMarkdown(chat) {
	const names = { user: "You", assistant: "Assistant" };
	const system = chat.settings.system ? [`> ${chat.settings.system.replaceAll("\n", "\n> ")}`] : [];
	return [`# ${chat.title}`, ...system,
		...chat.messages.map((message) => `## ${names[message.role]}\n\n${contentOf(message)}`)].join("\n\n") + "\n";
}
