// Server-sent events of a fetch body (EventSource supports neither POST nor request headers).

/** Yields the data of every event until the stream ends; rethrows its errors. */
export async function* eventData(body) {
	const reader = body.getReader();
	const decoder = new TextDecoder();
	let rest = "";
	let data = [];
	try {
		for (;;) {
			const { value, done } = await reader.read();
			rest += done ? decoder.decode() + "\n\n" : decoder.decode(value, { stream: true });
			// A \r at the end may be the first half of \r\n: it stays in `rest`.
			const lines = rest.split(/\r\n|\n|\r(?!$)/);
			rest = lines.pop();
			for (const line of lines) {
				if (line === "") {
					if (data.length) yield data.join("\n");
					data = [];
				} else if (line.startsWith("data:")) {
					data.push(line.slice(line[5] === " " ? 6 : 5));
				} // comments, ids and event names are not used
			}
			if (done) return;
		}
	} finally {
		reader.cancel().catch(() => {}); // the reader may have stopped before the end
	}
}
