"""The OpenAI-compatible server: one API process in front of one engine process.

From the top down; a part uses only the levels below (`scripts/layer_tables.py`):

1. `__main__`; `route/`: an HTTP router in front of several servers.
2. `http_server.serve` starts the engine process and the event loop.
3. `app` assembles routes and middleware; `lifecycle` handles readiness, drain and exit status.
4. Protocol adapters, each with its routes and response formats: `openai/` (also vLLM's routes,
   embeddings, sessions, LoRA), `responses/`, `anthropic/`, `ollama/`, `llamacpp/`. `models/`: one
   model, or several that share a memory budget.
5. `generation/`: a request from its prompt to its last event, independent of the API. `service`
   holds what routes share.
6. `http/`: connection limits, middleware, request and response bodies, errors, admission, budgets
   of API keys, the files of the web chat. `engine_client/`: the engine process, its messages, its
   replicas, and `AsyncLLMEngine`, the interface for the rest of the server. `sessions/`:
   conversations on disk, their open turns, stored responses. `options` fill the configuration.
7. `config`: the configuration of `serve`. `thread_pool`: blocking work beside the event loop.
8. `schemas/`: fields of request bodies for all protocols. `errors`, `metrics`, `tracing`,
   `api_keys`, `model_entries`.
"""
