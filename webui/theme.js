// Runs before the first paint, so that a chosen theme does not flash. `auto`: no attribute.
{
	let theme = null;
	try {
		theme = localStorage.getItem("llaisys:theme");
	} catch { /* storage is disabled: follow the system */ }
	if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
