"""Who may ask: API keys with names (`api_key`), what each may use (`budget`), and all of them
together, found by what a client sends (`ring`)."""
