// Event emitter: the way in which modules notify each other of changes.

export class Emitter {
	#listeners = new Map();

	on(type, listener) {
		if (!this.#listeners.has(type)) this.#listeners.set(type, new Set());
		this.#listeners.get(type).add(listener);
	}

	emit(type, detail) {
		for (const listener of this.#listeners.get(type) ?? []) listener(detail);
	}
}
