"""What scripts/train_draft_head.py is made of: prompts, the model in torch, the head, training."""
