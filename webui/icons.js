// Line icons on a 24-unit grid; the path after a | is filled.

const PATHS = {
	star: "|M12 2c1.1 6.2 3.8 8.9 10 10-6.2 1.1-8.9 3.8-10 10-1.1-6.2-3.8-8.9-10-10 6.2-1.1 8.9-3.8 10-10z",
	plus: "M12 5v14M5 12h14",
	side: "M4 5h16v14H4zM9.5 5v14",
	search: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM20 20l-4.9-4.9",
	edit: "M4 20l1-4.2L16 4.8 19.2 8 8.2 19z",
	trash: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7",
	copy: "M9 9h10.5v11H9zM15 9V4.5H4.5V15H9",
	check: "M5 12.5l4.5 4.5L19 7.5",
	refresh: "M19.5 12a7.5 7.5 0 1 1-2.3-5.4M19.5 3.5v4.2h-4.2",
	branch: "M7 8.5v7M7 4a2.2 2.2 0 1 0 .1 0zM7 15.5a2.2 2.2 0 1 0 .1 0zM17 6.5a2.2 2.2 0 1 0 .1 0zM17 11c0 3-3 3.5-6 3.5-2 0-4 .3-4 1",
	play: "M8 5.5l10 6.5-10 6.5z",
	send: "M12 19.5V5M5.5 11.5L12 5l6.5 6.5",
	stop: "|M7.5 7.5h9v9h-9z",
	down: "M12 5v14M5.5 12.5L12 19l6.5-6.5",
	left: "M14.5 6l-6 6 6 6",
	right: "M9.5 6l6 6-6 6",
	clip: "M18.5 11l-7 7a4.2 4.2 0 0 1-6-6l8-8a2.8 2.8 0 0 1 4 4l-7.5 7.5a1.4 1.4 0 0 1-2-2l6.5-6.5",
	chance: "M5 19V9M12 19V5M19 19v-6",
	close: "M6 6l12 12M18 6L6 18",
	share: "M12 4v11M7.5 8.5L12 4l4.5 4.5M5 15v5h14v-5",
	tune: "M4 8h9M19 8h1M16 5.8a2.2 2.2 0 1 0 .1 0zM4 16h1M11 16h9M8 13.8a2.2 2.2 0 1 0 .1 0z",
	warning: "M12 4.5l8.5 15h-17zM12 10v4.5M12 17v.2",
	auto: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16z|M12 4a8 8 0 0 1 0 16z",
	light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
	dark: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
};

const svg = (tag, attributes, ...children) => {
	const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	element.append(...children);
	return element;
};

/** A decorative icon; its container needs an accessible name. */
export function icon(name) {
	const [lines, solid] = PATHS[name].split("|");
	return svg("svg", { class: `icon i-${name}`, viewBox: "0 0 24 24", "aria-hidden": "true" },
		svg("path", { d: lines }), ...(solid ? [svg("path", { d: solid, class: "solid" })] : []));
}
