// Loaded before the page is painted, so that a chosen theme does not flash. `auto` = no attribute.
{
	let theme = null;
	try {
		theme = localStorage.getItem("llaisys:theme");
	} catch { /* storage is switched off: follow the system */ }
	if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
