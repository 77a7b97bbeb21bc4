// What the server tells apart, reasoning and answer, as the one text that a chat keeps: the way models
// write it, with the reasoning between tags. So it can be edited, copied, continued and sent again.

const OPEN = "<think>\n";
const CLOSE = "\n</think>\n\n";

/** Of one run. */
export class Said {
	#open = false; // reasoning has come, and no answer yet

	/** What a part adds to `before`, the text so far. */
	addition(before, { reasoning, text }) {
		let added = "";
		if (reasoning) {
			added = (before ? "" : OPEN) + reasoning;
			this.#open = true;
		}
		if (text && this.#open) {
			added += CLOSE;
			this.#open = false;
		}
		return added + text;
	}
}
