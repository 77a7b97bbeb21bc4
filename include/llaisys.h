/* NovaInfer: the public C API.
 *
 * Plain C11, without C++ types or exceptions. Conventions:
 *  - A function that can fail returns int32_t: LLAISYS_OK (0), or a code listed in its header.
 *    llaisysLastError() returns the error text of the calling thread.
 *  - A handle is freed by its Destroy call; Destroy(NULL) does nothing.
 *  - A handle is not thread-safe; different handles are independent.
 *  - Ranges are half open. Arrays are contiguous and row-major unless a stride is named.
 *  - Structs that may grow start with struct_size, which the caller sets to sizeof(the struct).
 */
#ifndef LLAISYS_H
#define LLAISYS_H

#include "llaisys/types.h"

#include "llaisys/runtime.h"
#include "llaisys/tensor.h"

#include "llaisys/ops.h"

#include "llaisys/runtime/infer_types.h"
#include "llaisys/runtime/kv_cache.h"

#include "llaisys/models/decoder.h"
#include "llaisys/models/draft_head.h"
#include "llaisys/models/model.h"
#include "llaisys/models/qwen2.h"

#endif
