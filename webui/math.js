// Formulas: common TeX as MathML. Unsupported input is shown as source.

const SPACE = "http://www.w3.org/1998/Math/MathML";
const MAX_DEPTH = 50; // of nested groups and arguments
const MAX_TOKENS = 1000; // layout of a formula takes time per element
const TOKEN = /\\(?:[a-zA-Z]+|[^])|\d+(?:\.\d+)?|\s+|[^]/gu;

const has = Object.hasOwn;
const words = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split(":")));

const LETTERS = words(`alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ
	vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ pi:π rho:ρ sigma:σ tau:τ upsilon:υ phi:ϕ varphi:φ
	chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Phi:Φ Psi:Ψ Omega:Ω
	infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ emptyset:∅ varnothing:∅ aleph:ℵ Re:ℜ Im:ℑ top:⊤ bot:⊥ angle:∠`);
const OPERATORS = words(`times:× div:÷ cdot:⋅ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗
	le:≤ leq:≤ ge:≥ geq:≥ ne:≠ neq:≠ ll:≪ gg:≫ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝
	in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ cup:∪ cap:∩ setminus:∖ mid:∣ parallel:∥ perp:⊥
	forall:∀ exists:∃ neg:¬ lnot:¬ land:∧ wedge:∧ lor:∨ vee:∨ to:→ rightarrow:→ leftarrow:← gets:←
	Rightarrow:⇒ Leftarrow:⇐ leftrightarrow:↔ Leftrightarrow:⇔ implies:⟹ iff:⟺ mapsto:↦ uparrow:↑ downarrow:↓
	ldots:… dots:… cdots:⋯ vdots:⋮ ddots:⋱ prime:′ colon:: therefore:∴ because:∵
	langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lbrace:{ rbrace:} lvert:| rvert:| vert:| Vert:‖ backslash:\\`);
const LARGE = words("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂");
const INTEGRALS = words("int:∫ iint:∬ iiint:∭ oint:∮");
const LIMITS = new Set("lim limsup liminf max min sup inf argmax argmin".split(" "));
const NAMES = new Set([...LIMITS, ..."sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker gcd deg arg Pr mod".split(" ")]);
const ACCENTS = words("hat:^ widehat:^ bar:¯ overline:¯ vec:→ tilde:~ widetilde:~ dot:˙ ddot:¨ check:ˇ");
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", "!": "-.17em", " ": ".25em", quad: "1em", qquad: "2em" };
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{" };
const TABLES = new Set([...Object.keys(FENCES), ..."matrix smallmatrix array aligned align align* gathered split".split(" ")]);
const UPRIGHT = new Set("text mathrm operatorname textrm textit textbf mathsf mathtt".split(" "));
// Code points of A, a and 0 in each alphabet; letters that Unicode has elsewhere.
const ALPHABETS = {
	mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}], boldsymbol: [0x1d400, 0x1d41a, 0x1d7ce, {}], bm: [0x1d400, 0x1d41a, 0x1d7ce, {}],
	mathbb: [0x1d538, 0x1d552, 0x1d7d8, words("C:ℂ H:ℍ N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ")],
	mathcal: [0x1d49c, 0, 0, words("B:ℬ E:ℰ F:ℱ H:ℋ I:ℐ L:ℒ M:ℳ R:ℛ")],
	mathfrak: [0x1d504, 0x1d51e, 0, words("C:ℭ H:ℌ I:ℑ R:ℜ Z:ℨ")],
};

/** An element for an inline formula or, with `display`, a block formula. */
export function formula(source, display = false) {
	let content;
	try {
		content = new Parser(source).all();
	} catch (error) {
		if (!(error instanceof FormulaError)) throw error;
		const code = document.createElement("code");
		code.textContent = source;
		return code;
	}
	const root = m("math", [m("semantics", [content, m("annotation", [source], { encoding: "application/x-tex" })])]);
	if (display) root.setAttribute("display", "block");
	return root;
}

class FormulaError extends Error {}

function m(tag, children = [], attributes = {}) {
	const element = document.createElementNS(SPACE, tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	element.append(...children);
	return element;
}

/** An operator; brackets stretch after \left and \right only. */
const operator = (char) => m("mo", [char], /[()[\]{}|‖⟨⟩⌊⌋⌈⌉]/.test(char) ? { stretchy: "false" } : {});
const row = (parts) => parts.length === 1 ? parts[0] : m("mrow", parts);
const fence = (char) => m("mo", char && char !== "." ? [char] : [], { stretchy: "true", fence: "true" });

class Parser {
	#tokens;
	#at = 0;
	#depth = 0;

	constructor(source) {
		this.#tokens = source.match(TOKEN) ?? [];
		if (this.#tokens.length > MAX_TOKENS) throw new FormulaError("too long");
	}

	all() {
		const parts = this.#row(() => false);
		if (this.#at < this.#tokens.length) throw new FormulaError("unbalanced end");
		return m("mrow", parts);
	}

	#peek() {
		while (/^\s/.test(this.#tokens[this.#at] ?? "")) this.#at += 1;
		return this.#tokens[this.#at];
	}

	#next() {
		const token = this.#peek();
		if (token === undefined) throw new FormulaError("ends too early");
		this.#at += 1;
		return token;
	}

	/** Every recursion enters here. */
	#enter() {
		if (++this.#depth > MAX_DEPTH) throw new FormulaError("too deep");
	}

	/** Parses up to a token for which `ends` is true; that token stays unread. */
	#row(ends) {
		this.#enter();
		const parts = [];
		for (let token = this.#peek(); token !== undefined && token !== "}" && !ends(token); token = this.#peek()) {
			parts.push(this.#scripted());
		}
		this.#depth -= 1;
		return parts;
	}

	/** An atom with its superscript and subscript. */
	#scripted() {
		const token = this.#peek();
		const base = token === "^" || token === "_" ? m("mrow") : this.#atom();
		const over = [];
		let under = null;
		for (let mark = this.#peek(); mark === "^" || mark === "_" || mark === "'"; mark = this.#peek()) {
			if (mark === "_") {
				this.#next();
				if (under) throw new FormulaError("two indices");
				under = this.#argument();
			} else if (mark === "^") {
				this.#next();
				over.push(this.#argument());
			} else {
				let primes = "";
				for (; this.#peek() === "'"; this.#at += 1) primes += "′";
				over.push(m("mo", [primes]));
			}
		}
		if (!over.length && !under) return base;
		const stacked = base.hasAttribute("data-limits");
		const [both, above, below] = stacked ? ["munderover", "mover", "munder"] : ["msubsup", "msup", "msub"];
		if (over.length && under) return m(both, [base, under, row(over)]);
		return over.length ? m(above, [base, row(over)]) : m(below, [base, under]);
	}

	/** A group in braces, or an atom. */
	#argument() {
		this.#enter();
		const part = this.#peek() === "{" ? this.#group() : this.#atom();
		this.#depth -= 1;
		return part;
	}

	#group() {
		this.#expect("{");
		const parts = this.#row(() => false);
		this.#expect("}");
		return row(parts);
	}

	#expect(token) {
		if (this.#next() !== token) throw new FormulaError(`${token} is missing`);
	}

	/** The characters of a group, including spaces. */
	#raw() {
		this.#expect("{");
		let text = "";
		for (let open = 1; ; this.#at += 1) {
			const token = this.#tokens[this.#at];
			if (token === undefined) throw new FormulaError("} is missing");
			if (token === "{") open += 1;
			else if (token === "}" && --open === 0) break;
			else text += token;
		}
		this.#at += 1;
		return text;
	}

	#atom() {
		const token = this.#next();
		if (token === "{") {
			this.#at -= 1;
			return this.#group();
		}
		if (token[0] === "\\" && token.length > 1) return this.#command(token.slice(1));
		if (/^\d/.test(token)) return m("mn", [token]);
		if (/^\p{L}/u.test(token)) return m("mi", [token]);
		if (token === "}" || token === "&" || token === "\\") throw new FormulaError(`${token} out of place`);
		return operator({ "-": "−", "*": "∗" }[token] ?? token);
	}

	#command(name) {
		if (has(LETTERS, name)) return m("mi", [LETTERS[name]]);
		if (has(OPERATORS, name)) return operator(OPERATORS[name]);
		if (has(LARGE, name)) return m("mo", [LARGE[name]], { "data-limits": "", movablelimits: "true" });
		if (has(INTEGRALS, name)) return m("mo", [INTEGRALS[name]]);
		if (NAMES.has(name)) {
			const text = name.replace(/^(arg|lim)(?=m|s|i)/, "$1 ");
			return LIMITS.has(name) ? m("mo", [text], { "data-limits": "", movablelimits: "true" })
				: m("mi", [text], { mathvariant: "normal" });
		}
		if (has(SPACES, name)) return m("mspace", [], { width: SPACES[name] });
		if (has(ACCENTS, name)) {
			return m("mover", [this.#argument(), m("mo", [ACCENTS[name]], { stretchy: String(/over|wide/.test(name)) })],
				{ accent: "true" });
		}
		if (UPRIGHT.has(name)) return m("mtext", [this.#raw()]);
		if (has(ALPHABETS, name)) return m("mi", [letters(this.#raw(), ALPHABETS[name])], { mathvariant: "normal" });
		if (/^[dtc]?frac$/.test(name)) return m("mfrac", [this.#argument(), this.#argument()]);
		switch (name) {
		case "binom": return m("mrow", [fence("("),
			m("mfrac", [this.#argument(), this.#argument()], { linethickness: "0" }), fence(")")]);
		case "sqrt": return this.#root();
		case "underline": return m("munder", [this.#argument(), m("mo", ["_"], { stretchy: "true" })]);
		case "boxed": return m("mrow", [this.#argument()], { class: "boxed" });
		case "left": return this.#fenced();
		case "begin": return this.#table();
		case "displaystyle": case "textstyle": case "limits": case "nolimits": case "big": case "Big": case "bigl":
		case "bigr": case "Bigl": case "Bigr": return m("mrow");
		case "|": return operator("‖");
		case "{": case "}": case "$": case "%": case "&": case "#": case "_": return operator(name);
		default: throw new FormulaError(`\\${name} is not known`);
		}
	}

	#root() {
		if (this.#peek() !== "[") return m("msqrt", [this.#argument()]);
		this.#next();
		const degree = row(this.#row((token) => token === "]"));
		this.#expect("]");
		return m("mroot", [this.#argument(), degree]);
	}

	#delimiter() {
		const token = this.#next();
		const name = token.slice(1);
		return token[0] !== "\\" || token.length === 1 ? token : name === "|" ? "‖" : has(OPERATORS, name) ? OPERATORS[name] : name;
	}

	#fenced() {
		const open = this.#delimiter();
		const inside = this.#row((token) => token === "\\right");
		this.#expect("\\right");
		return m("mrow", [fence(open), ...inside, fence(this.#delimiter())]);
	}

	#table() {
		const name = this.#raw();
		if (!TABLES.has(name)) throw new FormulaError(`${name} is not known`);
		if (name === "array") this.#raw(); // column alignment
		const rows = [[]];
		for (;;) {
			rows.at(-1).push(m("mtd", this.#row((token) => ["&", "\\\\", "\\end"].includes(token))));
			const token = this.#next();
			if (token === "\\end") break;
			if (token === "\\\\") rows.push([]);
			else if (token !== "&") throw new FormulaError("\\end is missing");
		}
		if (this.#raw() !== name) throw new FormulaError(`\\end{${name}} is missing`);
		if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].childNodes.length) rows.pop();
		const kind = /^align|split/.test(name) ? "aligned" : name === "cases" ? "cases" : "";
		const table = m("mtable", rows.map((cells) => m("mtr", cells)), { class: kind });
		const [open, close] = has(FENCES, name) ? FENCES[name] : "";
		return open ? m("mrow", [fence(open), table, ...(close ? [fence(close)] : [])]) : table;
	}
}

function letters(text, [upper, lower, digit, exceptions]) {
	return Array.from(text, (char) => {
		if (has(exceptions, char)) return exceptions[char];
		const [first, base] = /[A-Z]/.test(char) ? ["A", upper] : /[a-z]/.test(char) ? ["a", lower] : ["0", /\d/.test(char) && digit];
		return base ? String.fromCodePoint(base + char.codePointAt(0) - first.codePointAt(0)) : char;
	}).join("");
}
