// What a chat and its messages are, whatever came in from storage, a file or the server.
//
// A chat: {id, title, named, created, updated, settings, messages, draft, files, session, failure}; `files`
// go with the next message, `session` is its name on the server or null.
// A message of the user: {role, content, files}, a file being {name, text}.
// An answer: {role, content, calls, finish, usage, stats, failure, edited, versions}; `finish` is null while it is
// being written. `versions` is null or a list of answers to the same question, each with the messages that
// followed it (`tail`); the one that is shown is null in its place.

import { cleanCalls } from "./calls.js";

const ROLES = ["user", "assistant"];

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

/** A chat with all its fields and nothing else. */
export function cleanChat(raw) {
	const now = Date.now();
	return {
		id: /^[\w-]{1,64}$/.test(raw.id) ? raw.id : newId(),
		title: String(raw.title ?? "New chat").slice(0, 200),
		named: Boolean(raw.named),
		created: Number(raw.created) || now,
		updated: Number(raw.updated) || now,
		settings: { ...raw.settings },
		messages: cleanMessages(raw.messages),
		draft: String(raw.draft ?? ""),
		files: cleanFiles(raw.files),
		session: /^[\w.-]{1,64}$/.test(raw.session ?? "") ? raw.session : null,
		failure: raw.failure ?? null,
	};
}

function cleanMessages(raw) {
	return (raw ?? []).filter(({ role }) => ROLES.includes(role)).map((message) => message.role === "user"
		? { role: "user", content: String(message.content ?? ""), files: cleanFiles(message.files) }
		: { ...cleanAnswer(message), versions: cleanVersions(message.versions) });
}

function cleanAnswer(raw) {
	return {
		role: "assistant",
		content: String(raw.content ?? ""),
		finish: raw.finish ?? null,
		usage: raw.usage ?? null,
		stats: raw.stats ?? null,
		failure: raw.failure ?? null,
		edited: Boolean(raw.edited),
		calls: cleanCalls(raw.calls),
		truncated: Boolean(raw.truncated),
	};
}

function cleanVersions(raw) {
	if (!Array.isArray(raw) || raw.filter((version) => !version).length !== 1) return null;
	return raw.map((version) => version && { ...cleanAnswer(version), tail: cleanMessages(version.tail) });
}

function cleanFiles(raw) {
	return (Array.isArray(raw) ? raw : []).map(({ name, text }) =>
		({ name: String(name ?? "file").slice(0, 200), text: String(text ?? "") }));
}

/** An answer that is about to be written. */
export const newAnswer = () => ({ ...cleanAnswer({}), versions: null });

/** The answer at `index`, and what followed it, as one of its versions. */
function asVersion(messages, index) {
	const { versions: _, ...answer } = messages[index];
	return { ...answer, tail: messages.slice(index + 1) };
}

/** The versions of the answer at `index` with room for another one; null when there is none to keep. */
export function withAnotherVersion(messages, index) {
	const answer = messages[index];
	if (!answer?.content) return null;
	return [...(answer.versions ?? [null]).map((version) => version ?? asVersion(messages, index)), null];
}

/** The messages when version `number` of the answer at `index` is shown instead. */
export function showVersion(messages, index, number) {
	const { versions } = messages[index];
	const { tail, ...answer } = versions[number];
	const kept = versions.map((version, i) => i === number ? null : version ?? asVersion(messages, index));
	return [...messages.slice(0, index), { ...answer, versions: kept }, ...tail];
}

/** What the model reads: the files of a message before its text. */
export function contentOf({ content, files }) {
	return [...(files ?? []).map(fenced), content].filter(Boolean).join("\n\n");
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
