// The text of a paragraph or heading that grows. Its beginning is frozen once further text cannot change it;
// the rest is parsed again with every piece, and nodes of unchanged tokens stay.

import { inlineTokens, MAX_LENGTH, nodeOf } from "./inline.js";

const FREEZE = 400; // characters that are parsed again without looking for a frozen part

/** Fields of an empty text: `frozen` characters in `frozenNodes` nodes are final. */
export const EMPTY = { text: "", painted: null, frozen: 0, frozenNodes: 0 };

/** Shows `leaf.text` in `leaf.el`. `tentative`: the last line may be rolled back, so little is frozen. */
export function paint(leaf, tentative) {
	while (leaf.painted !== leaf.text) {
		const source = leaf.text.slice(leaf.frozen, leaf.frozen + MAX_LENGTH);
		const full = source.length === MAX_LENGTH; // final even inside an open construct
		const { tokens, cut } = inlineTokens(source);
		const at = cut || (full ? MAX_LENGTH : 0);
		if (!full && (tentative || source.length < FREEZE || !at)) {
			show(leaf, tokens, source);
			leaf.painted = leaf.text;
			return;
		}
		show(leaf, inlineTokens(source.slice(0, at)).tokens, source);
		leaf.frozen += at;
		leaf.frozenNodes = leaf.el.childNodes.length;
	}
}

/** Replaces the nodes after the frozen ones. `el.shown`: their tokens, valid after a rollback too. */
function show({ el, frozen, frozenNodes }, tokens, source) {
	const shown = el.shown?.frozen === frozen ? el.shown.tokens : [];
	let same = 0;
	while (same < tokens.length && shown[same]?.raw === tokens[same].raw && shown[same].kind === tokens[same].kind) same += 1;
	while (el.childNodes.length > frozenNodes + same) el.lastChild.remove();
	for (const token of tokens.slice(same)) el.append(nodeOf(token, source));
	el.shown = { frozen, tokens };
}
