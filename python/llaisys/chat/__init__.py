"""What a chat says beside plain text: tools and calls of them, and reasoning.

`ChatStyle` is what a model's template tells about its way to call tools and to reason; `ToolSet` is
what a request offers. Both together write the prompt (`history`) and read the answer (`reader`).
Nothing here knows HTTP or the engine: every door and `LLM.chat` use the same pieces.
"""
