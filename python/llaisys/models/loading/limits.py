"""Upper limits of config values, far above real models, against damaged or hostile files."""

from __future__ import annotations

MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 28
MAX_PARAMETERS = 1 << 42
