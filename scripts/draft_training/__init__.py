"""Modules of scripts/train_draft_head.py: prompts, the model in torch, the head, training."""
