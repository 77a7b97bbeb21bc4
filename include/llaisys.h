/* NovaInfer: the whole public native surface.
 *
 * Plain C11. No C++ type, exception or container crosses it. Conventions that hold everywhere:
 *
 *  - A function that can fail returns int32_t: LLAISYS_OK (0), or a code of the list that its
 *    header names. The reason, in words, is llaisysLastError() of the calling thread.
 *  - A handle is created by one call and ended by its Destroy call; Destroy(NULL) does nothing.
 *  - A handle is not thread-safe; different handles are independent of each other.
 *  - Ranges are half open. Arrays are dense and row-major unless a stride is named.
 *  - Structs that may grow begin with struct_size, which the caller sets to sizeof(the struct).
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
