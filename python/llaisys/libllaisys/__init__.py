"""The ctypes mirror of `include/llaisys`, one module per header; the only place that knows ctypes.

`lib()` loads the native library on first use. `check(code)` turns its codes and texts into the
exceptions of `llaisys.common.errors`. `handles` and `model_handle` own native objects and free them
in `close()`.
"""

from llaisys.libllaisys.library import check, last_error, lib, library_path

__all__ = ["check", "last_error", "lib", "library_path"]
