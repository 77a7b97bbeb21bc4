"""The OpenAI-compatible server: one API process in front of one engine process.

- `http_server.serve` starts the engine process and the event loop; `lifecycle` handles readiness,
  drain and exit status. `app` assembles the routes. `service` holds what routes share: engine,
  admission, metrics, sessions. `thread_pool` runs blocking work beside the event loop.
- `http/`: connection limits, middleware (`security`), exceptions to error responses
  (`error_handlers`), event streams, admission (`limits`), the files of the web chat.
- `generation/`: a request from its prompt to its last event, independent of the API.
- `openai/`, `embeddings/`, `llamacpp/`, `responses/`, `anthropic/`, `ollama/`: protocol adapters,
  each with its schemas and response formats.
- `sessions/`: conversations on disk, their open turns, stored responses.
- `keys/`: API keys and their budgets. `models/`: one model, or several that share a memory budget.
- `engine_client/`: the engine process, its messages, the watchdog, and `AsyncLLMEngine`, the
  interface for the rest of the server. `replicas/`: data parallel engines.
- `config`: the configuration of `serve`; `options` and `config_file` fill it.
"""
