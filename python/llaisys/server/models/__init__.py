"""Which models there are, and which of them are in memory: `one` for a server with a single model,
`directory` for several, which come and go within a budget (`memory`)."""
