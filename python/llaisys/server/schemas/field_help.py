"""Descriptions of the fields of request bodies, for /openapi.json and the reference pages.

`FIELD_HELP` has a line for each field, under its name, or under SCHEMA.FIELD where the name has
another meaning there. Sampling fields are described by SamplingParams.
"""

from __future__ import annotations

from llaisys.common.sampling import FIELDS

NO_EFFECT = "Accepted, no effect"
WITHOUT_EFFECT = (
    "insecure username password include_obfuscation truncate shift Reasoning.context keep_alive "
    "verbosity max_tool_calls signature summary generate_summary display lora_int_id service_tier "
    "inference_geo safety_identifier prompt_cache_key prompt_cache_retention cache_control "
    "citations allowed_callers caller eager_input_streaming input_examples ShowRequest.system "
    "ShowRequest.template ShowRequest.options ShowRequest.verbose"
).split()

UNSUPPORTED = ("source", "title", "context", "content", "citations")  # of UnsupportedBlock

FIELD_HELP = {
    **dict.fromkeys(WITHOUT_EFFECT, NO_EFFECT),
    **{f"UnsupportedBlock.{name}": "Not supported" for name in UNSUPPORTED},
    # conversations and prompts
    "model": "Model name",
    "messages": "Conversation",
    "BatchChatRequest.messages": "Conversations",
    "prompt": "Text, token ids, or a list of either",
    "GenerateRequest.prompt": "Text",
    "EmbeddingsRequest.prompt": "Text",
    "input": "Text, token ids, or a list of either",
    "ResponsesRequest.input": "Text or a list of items",
    "EmbedRequest.input": "Text or a list of texts",
    "ToolUseBlock.input": "Arguments of the call",
    "suffix": "Text after the insertion, for fill-in-the-middle models",
    "system": "System prompt",
    "instructions": "System prompt",
    "role": "Author of the message",
    "content": "Text or a list of text parts",
    "ToolResultBlock.content": "Result of the call",
    "TokenizeRequest.content": "Text, as in llama.cpp",
    "LlamaEmbeddingRequest.content": "Text, token ids, or a list of either",
    "name": "Name",
    "ShowRequest.name": "Another name of model",
    "PullRequest.name": "Another name of model",
    "PullRequest.stream": "Report progress as lines of JSON (default: true)",
    "reasoning_content": "Reasoning text of an assistant message",
    "reasoning": "Another name of reasoning_content",
    "ResponsesRequest.reasoning": "Reasoning options",
    "ChatCompletionRequest.reasoning": "Reasoning options (OpenRouter)",
    "ReasoningField.max_tokens": "Maximum reasoning tokens",
    "thinking": "Reasoning options",
    "OllamaMessage.thinking": "Reasoning text of an assistant message",
    "ThinkingBlock.thinking": "Reasoning text",
    "text": "Text",
    "ResponsesRequest.text": "Output format",
    "images": "Not supported; must be empty",
    "type": "Kind of the object",
    "id": "Id of the call",
    # output
    "stream": "Stream the output as server-sent events",
    "ChatRequest.stream": "Stream the output as lines of JSON (default: true)",
    "GenerateRequest.stream": "Stream the output as lines of JSON (default: true)",
    "stream_options": "Options of a stream",
    "include_usage": "Send usage in a last chunk",
    "continuous_usage_stats": "Send usage so far in every chunk (vLLM)",
    "max_completion_tokens": "Another name of max_tokens",
    "max_output_tokens": "Maximum tokens to generate",
    "max_tokens": "Maximum tokens to generate; -1: up to the context length",
    "logprobs": "Return logprobs of the sampled tokens",
    "CompletionRequest.logprobs": "Logprobs of the sampled token and of the k most likely ones",
    "top_logprobs": "Logprobs of the k most likely tokens, with logprobs",
    "ResponsesRequest.top_logprobs": "Logprobs of the k most likely tokens of the text",
    "n_probs": "Probabilities of the n most likely tokens (llama.cpp)",
    "echo": "Return the prompt before the output",
    "ChatCompletionRequest.echo": "Return the last assistant message before its continuation",
    "truncate_prompt_tokens": "Keep this many tokens of the prompt; -1: as many as fit (vLLM)",
    "use_beam_search": "Return the n most likely of best_of beams (vLLM); no streams",
    "length_penalty": "Exponent of the length in the score of a beam (vLLM)",
    "best_of": "Choices or beams to compute; the n most likely are returned",
    "id_slot": "Slot whose prefix cache is used, with --slot-save-path; -1: any (llama.cpp)",
    "truncation_side": "Side at which the prompt is cut: left (default) or right",
    "seed": "Random seed; -1: random",
    "return_token_ids": "Return token ids of prompt and output (vLLM)",
    "return_tokens": "Return token ids of the output (llama.cpp)",
    "return_tokens_as_token_ids": "Write tokens of logprobs as token_id:ID (vLLM)",
    "timings_per_token": "Send timings in every chunk (llama.cpp)",
    "return_progress": "Send the progress of the prefill (llama.cpp)",
    "response_fields": "Fields of the answer to return (llama.cpp)",
    "stop_sequences": "Stop strings",
    "truncation": "auto: drop the oldest turns of an input that exceeds the context",
    "options": "Sampling options (Ollama)",
    "raw": "Complete the prompt without a chat template",
    "context": "Token ids of an earlier answer to continue",
    "template": "Not supported; must be empty",
    # structured output
    "response_format": "Output format: text, json_object, json_schema or structural_tag",
    "format": "Output format: json or a JSON schema",
    "output_format": "Output format with a JSON schema",
    "output_config": "Output format and effort",
    "json_schema": "JSON schema of the output (llama.cpp)",
    "schema": "JSON schema",
    "strict": "Enforce the schema",
    "grammar": "GBNF or Lark grammar of the output (llama.cpp)",
    "guided_json": "JSON schema of the output (vLLM)",
    "guided_regex": "Regular expression of the output (vLLM)",
    "guided_choice": "Possible outputs (vLLM)",
    "guided_grammar": "Grammar of the output (vLLM)",
    # tools
    "tools": "Functions that the model may call",
    "tool_choice": "Whether and which function is called",
    "parallel_tool_calls": "Allow several calls in one answer",
    "disable_parallel_tool_use": "Allow one call only",
    "tool_calls": "Calls of an assistant message",
    "functions": "Another name of tools, with calls in function_call",
    "function_call": "Whether and which function is called, with functions",
    "ChatMessage.function_call": "Call of an assistant message, with functions",
    "allowed_tools": "Tools of the request that may be called",
    "mode": "auto, or required for at least one call",
    "tool_call_id": "Id of the call that a tool message answers",
    "tool_use_id": "Id of the call that is answered",
    "tool_name": "Name of the function that a tool message answers",
    "function": "Function",
    "arguments": "Arguments as JSON text",
    "parameters": "JSON schema of the arguments",
    "input_schema": "JSON schema of the arguments",
    "description": "Description for the model",
    "is_error": "The call failed",
    # reasoning
    "reasoning_effort": "Reasoning effort; none disables reasoning",
    "effort": "Reasoning effort",
    "include_reasoning": "Return the reasoning text (vLLM)",
    "enable_thinking": "Reasoning on or off, for the chat template",
    "enabled": "Reasoning on or off",
    "exclude": "Leave the reasoning text out of the answer",
    "think": "Reasoning on or off, or its effort",
    "budget_tokens": "Maximum reasoning tokens",
    "data": "Content of a redacted reasoning block",
    # chat template
    "add_generation_prompt": "Start an assistant message after the conversation",
    "continue_final_message": "Continue the last message in place of a new one",
    "chat_template_kwargs": "Variables of the chat template",
    "add_special_tokens": "Add the special tokens of the tokenizer",
    # sessions and requests
    "session_id": "Session to continue and store",
    "SessionRequest.session_id": "Id of the new session (default: generated)",
    "title": "Title",
    "client_state": "Text of the client, stored with the session and exported unchanged",
    "request_id": "Id of the request in logs and for cancellation",
    "previous_response_id": "Response to continue",
    "store": "Store the response",
    "background": "Generate without a connection; poll or stream the response by its id",
    "include": "Further parts of the response",
    "enable_response_messages": "Return prompt and answer before they are parsed (vLLM)",
    "kv_transfer_params": "prompt_token_ids: the prompt in place of the messages (vLLM)",
    "drop_old_turns": "Drop the oldest turns of a conversation that exceeds the context",
    "lora": "LoRA adapter: its name, or llama.cpp's list of ids and scales (0 or 1)",
    "LoraScale.id": "Index of a LoRA adapter in GET /lora-adapters",
    "LoraScale.scale": "1: use it, 0: do not",
    "lora_name": "Name of the LoRA adapter",
    "lora_path": "PEFT directory or GGUF file below a directory of --allowed-lora-path",
    "load_inplace": "Replace the loaded LoRA adapter of that name (vLLM)",
    "base_model_name": "Model that the LoRA adapter belongs to (default: the first)",
    "cache_salt": "Share cached prefixes only with requests of the same salt (vLLM)",
    "reuse_prefix": "Use the prefix cache (default: true)",
    "user": "User name for logs",
    "user_id": "User name for logs",
    "metadata": "Returned with the response",
    "MessagesRequest.metadata": "User id of the request",
    # tokens
    "tokens": "Token ids",
    "add_special": "Add special tokens, with content",
    "parse_special": "No effect; text never becomes special tokens",
    "with_pieces": "Return the text of each token (llama.cpp)",
    "return_token_strs": "Return the text of each token (vLLM)",
    # infill
    "input_prefix": "Text before the insertion",
    "input_suffix": "Text after the insertion",
    "input_extra": "Further files as context",
    "InfillRequest.prompt": "Text after input_prefix",
    "filename": "Name of the file",
    "t_max_predict_ms": "Milliseconds after which the output ends at a line break",
    # embeddings
    "dimensions": "Length of the returned embeddings",
    "encoding_format": "float or base64",
    "normalize": "Scale embeddings to length 1 (default: true)",
    "embd_normalize": "2: scale embeddings to length 1, -1: as computed (llama.cpp)",
    "documents": "Texts to rank",
    "texts": "Another name of documents",
    "query": "Text that documents are compared with",
    "top_n": "Number of results; 0: all",
    "return_documents": "Return the texts of the results",
    "return_text": "Another name of return_documents",
    "text_1": "Text or a list of texts",
    "text_2": "Text or a list of texts",
    "verbose": "Return the prompt and the sampling parameters in __verbose (llama.cpp)",
}


def help_of_field(schema: str, field: str) -> str | None:
    """The description of a field, or None."""
    found = FIELD_HELP.get(f"{schema}.{field}") or FIELD_HELP.get(field)
    if found is None and field in FIELDS:
        return FIELDS[field].help
    return found
