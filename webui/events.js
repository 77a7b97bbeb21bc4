// Who wants to know what: the one way in which modules tell each other that something changed.

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
