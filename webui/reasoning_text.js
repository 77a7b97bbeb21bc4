// Joins `reasoning_content` and `content` of the server to the single text that a chat stores, with the
// reasoning between <think> tags. That text can be edited, copied, continued and sent again.

const OPEN = "<think>\n";
const CLOSE = "\n</think>\n\n";

/** State of one run. */
export class ReasoningText {
	#open = false; // inside of the reasoning

	/** The text that a chunk appends to `before`, the text so far. */
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
