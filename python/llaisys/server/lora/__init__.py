"""LoRA adapters in the API: their names, and routes that load and unload them."""
