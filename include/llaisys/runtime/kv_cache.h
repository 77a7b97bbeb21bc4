/* Status codes, layouts and statistics of the KV cache. The calls are in models/model.h. */
#ifndef LLAISYS_RUNTIME_KV_CACHE_H
#define LLAISYS_RUNTIME_KV_CACHE_H

#include "llaisys/types.h"

typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_KV_OK = 0,
    LLAISYS_KV_OOM_SLOT = 1,      /* no free cell; nothing is evicted */
    LLAISYS_KV_INVALID_SEQ = 2,   /* the sequence id is negative or has no cell */
    LLAISYS_KV_INVALID_POS = 3,   /* a position is, or would become, out of range */
    LLAISYS_KV_EMPTY_RANGE = 4,   /* p0 >= p1, or no cell of the sequence is in [p0, p1) */
    LLAISYS_KV_INTERNAL_ERROR = 5 /* wrong layout or internal error: see last error */
} LlaisysKvStatus;

/* SLOT: the library allocates cells and tracks the sequences of each.
 * BLOCK: the caller allocates blocks of kv_cache_block_size slots; the library validates them. */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_KV_LAYOUT_SLOT = 0,
    LLAISYS_KV_LAYOUT_BLOCK = 1
} LlaisysKvLayout;

typedef struct {
    uint32_t struct_size;
    int32_t layout;          /* LlaisysKvLayout */
    int64_t capacity_slots;  /* all token slots */
    int64_t used_slots;      /* SLOT: cells in use. BLOCK: slots written by the last step */
    int64_t peak_used_slots; /* the largest used_slots since creation */
    int64_t n_sequences;     /* SLOT: sequences with a cell. BLOCK: of the last step */
    int64_t bytes;           /* memory of all keys and values */
    int32_t block_size;
    int32_t reserved;
} LlaisysKvStats;

#endif
