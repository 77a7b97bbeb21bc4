"""The models of a server: `single` for one model, `manager` for several, which are loaded on demand
and unloaded within a memory budget."""
