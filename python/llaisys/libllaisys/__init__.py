"""The ctypes mirror of `include/llaisys`; no other package uses ctypes.

`lib()` loads the native library on first use. `check(code)` raises the exceptions of
`llaisys.common.errors` for its status codes. `handles` and `model_handle` own native objects and
free them in `close()`.
"""

from llaisys.libllaisys.library import check, last_error, lib, library_path

__all__ = ["check", "last_error", "lib", "library_path"]
