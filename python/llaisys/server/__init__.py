"""The OpenAI-compatible server: one API process in front of one engine process.

`http_server.serve` starts everything and `lifecycle` follows it from the first heartbeat to the
exit status; `app` puts the routes together; `service` is what routes share (engine, admission,
metrics, sessions). `http/` knows connections: the protocol's limits, the guards (`security`), how
exceptions become answers (`faults`), event streams, who gets in (`limits`), the web chat's files.
`generation/` is a request from its prompt to its end, whatever door it came in by; `openai/`,
`llamacpp/`, `responses/`, `anthropic/` and `ollama/` are the doors: schemas, and answers in their
own JSON. `sessions/` is conversations on disk, their open turns, and responses that are kept.
`keys/` is who may ask, and for how much; `models/` which of several models are in memory.
`engine_client/` is the way to the engine: the process and its start, the messages, the link that
watches it, and `AsyncLLMEngine`, which the rest of the server talks to. `config` is everything that
`serve` needs, `options` the command line and the file that fill it.
"""
