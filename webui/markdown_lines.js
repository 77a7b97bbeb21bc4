// Line patterns of Markdown blocks and containers.

export const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
export const HEADING = /^ {0,3}(#{1,6})\s+([^]*)$/;
export const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
export const MARKER = /^( *)([-+*]|\d{1,9}[.)])( +|$)/;
export const QUOTE = /^ {0,3}> ?/;
export const TASK = /^\[([ xX])\]( +|$)/;
export const TASK_BEGUN = /^\[(?:[ xX]\]?)?$/;
export const FORMULA = /^(\$\$|\\\[)(.*)$/;
export const FORMULA_BEGUN = /^[$\\]$/; // possibly half of a delimiter
export const FORMULA_ENDS = { "$$": "$$", "\\[": "\\]" };
export const SEPARATOR = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
// Lines whose kind does not depend on further text.
export const SETTLED = /^(?:[^\s#>\-+*\d`~_]|\d+[^\d.)]|(?:\*\*?|__?|`)[^\s*_`]|\d+[.)]\S|[-+]+[^\s\-+])/;

/** The rest of a line inside a container, or null when the line is not part of it. */
export function enter(container, rest, blank) {
	if (container.kind === "list") return rest;
	if (container.kind === "quote") return QUOTE.test(rest) ? rest.replace(QUOTE, "") : null;
	if (blank) return rest;
	const indent = rest.length - rest.trimStart().length;
	const nested = indent >= container.margin + 2 && MARKER.test(rest); // models indent by two, or four
	return indent >= container.indent || nested ? rest.slice(Math.min(indent, container.indent)) : null;
}

export function startsBlock(rest) {
	return [RULE, FENCE, HEADING, MARKER, QUOTE, FORMULA].some((pattern) => pattern.test(rest));
}

/** A line of code without the quote markers and indentation of its containers. */
export function codeText(line, containers, indent) {
	const depth = containers.reduce((sum, { indent: inner = 0 }) => sum + inner, indent);
	let text = line;
	for (const { kind } of containers) if (kind === "quote") text = text.replace(QUOTE, "");
	return text.slice(Math.min(depth, text.search(/[^ ]|$/)));
}
