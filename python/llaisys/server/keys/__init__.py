"""API keys: a key and its name (`api_key`), its usage limits (`budget`), lookup by the
Authorization header (`ring`)."""
