"""The models of a server: one that is always loaded, or several, which `manager` loads on demand
and unloads within a memory budget."""
