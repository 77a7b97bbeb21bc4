/* Devices, data types, status codes, version and the last-error text. */
#ifndef LLAISYS_TYPES_H
#define LLAISYS_TYPES_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define LLAISYS_EXPORT __declspec(dllexport)
#else
#define LLAISYS_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
#define LLAISYS_API extern "C" LLAISYS_EXPORT
#else
#define LLAISYS_API LLAISYS_EXPORT
#endif

/* Enumerations are 32 bits wide for C++ too, so that a wrong value is an error and nothing worse. */
#ifdef __cplusplus
#define LLAISYS_INT32_ENUM : int32_t
#else
#define LLAISYS_INT32_ENUM
#endif

/* Raised whenever a struct, a code or a signature changes. The Python mirror compares it exactly. */
#define LLAISYS_ABI_VERSION 13

typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_DEVICE_CPU = 0,
    LLAISYS_DEVICE_NVIDIA = 1,
    LLAISYS_DEVICE_TYPE_COUNT = 2
} llaisysDeviceType_t;

typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_DTYPE_INVALID = 0,
    LLAISYS_DTYPE_F32 = 1,
    LLAISYS_DTYPE_F16 = 2,
    LLAISYS_DTYPE_BF16 = 3,
    LLAISYS_DTYPE_I64 = 4,
    LLAISYS_DTYPE_I32 = 5,
    LLAISYS_DTYPE_I8 = 6,
    LLAISYS_DTYPE_U8 = 7,
    /* Weights only, in blocks of 32 or (K) 256 values along the last dimension, as GGUF files hold
     * them: tensors of these can be made, mapped and given to a model. */
    LLAISYS_DTYPE_Q8_0 = 8,
    LLAISYS_DTYPE_Q4_0 = 9,
    LLAISYS_DTYPE_Q4_1 = 10,
    LLAISYS_DTYPE_Q5_0 = 11,
    LLAISYS_DTYPE_Q5_1 = 12,
    LLAISYS_DTYPE_Q4_K = 13,
    LLAISYS_DTYPE_Q5_K = 14,
    LLAISYS_DTYPE_Q6_K = 15,
    LLAISYS_DTYPE_Q2_K = 16,
    LLAISYS_DTYPE_Q3_K = 17,
    LLAISYS_DTYPE_IQ4_NL = 18,
    /* The same for weights that others have quantised (GPTQ, AWQ, compressed-tensors), value
     * s * (q - z): a block is s as f32, z as f16 (an integer), then q of 4 bits (0 to 15, the even
     * value in the low half of a byte) or 8 bits (-128 to 127), for 32 or 128 values. */
    LLAISYS_DTYPE_I4_G32 = 19,
    LLAISYS_DTYPE_I4_G128 = 20,
    LLAISYS_DTYPE_I8_G32 = 21,
    LLAISYS_DTYPE_I8_G128 = 22,
    LLAISYS_DTYPE_COUNT = 23
} llaisysDataType_t;

/* What a call returns unless its header gives a list of its own. */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_OK = 0,
    LLAISYS_ERROR_INVALID = -1,     /* an argument is wrong; nothing was changed */
    LLAISYS_ERROR_MEMORY = -2,      /* memory could not be had; nothing was changed */
    LLAISYS_ERROR_INTERNAL = -3,    /* a broken invariant: the handle should be destroyed */
    LLAISYS_ERROR_UNSUPPORTED = -4, /* valid, but not on this device or in this build */
    LLAISYS_ERROR_IO = -5           /* a file is missing, unreadable or too short */
} llaisysStatus_t;

/* A data type is stored in blocks: plain types have one element a block, quantised types many. */
typedef struct {
    int32_t block_elements;
    int32_t block_bytes;
} LlaisysDataTypeTraits;

/* The number the library was built with, to be compared with LLAISYS_ABI_VERSION. */
LLAISYS_API uint32_t llaisysAbiVersion(void);

/* Why the last failing call of this thread failed; "" when none has. Valid until the thread's next
 * failing call. Never NULL. */
LLAISYS_API const char *llaisysLastError(void);
/* Its llaisysStatus_t; for calls that return a handle instead of a code. */
LLAISYS_API int32_t llaisysLastErrorCode(void);

/* "f32", "bf16", ...; "invalid" for a value outside the enumeration. Static storage. */
LLAISYS_API const char *llaisysDataTypeName(llaisysDataType_t dtype);

/* LLAISYS_ERROR_INVALID for an unknown type. */
LLAISYS_API int32_t llaisysDataTypeGetTraits(llaisysDataType_t dtype,
                                             LlaisysDataTypeTraits *traits);

#endif
