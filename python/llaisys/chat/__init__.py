"""Tools, tool calls and reasoning in chats.

`ChatStyle` describes the tool and reasoning formats of a model's template; `ToolSet` is the tools
of a request. Both are used to write the prompt (`history`) and to parse the answer (`reader`).
Independent of HTTP and the engine: shared by every protocol adapter and `LLM.chat`.
"""
