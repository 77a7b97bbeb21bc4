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

/* Enumerations have 32 bits in C++ too, so that an out-of-range value is not undefined behaviour. */
#ifdef __cplusplus
#define LLAISYS_INT32_ENUM : int32_t
#else
#define LLAISYS_INT32_ENUM
#endif

/* Incremented whenever a struct, a code or a signature changes. The Python mirror requires
 * equality. */
#define LLAISYS_ABI_VERSION 18

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
    /* Weights only, in GGUF's blocks of 32 or (K) 256 values along the last dimension. Such
     * tensors can be created, mapped and given to a model. */
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
    /* Weights of GPTQ, AWQ and compressed-tensors checkpoints, value s * (q - z): a block is s as
     * f32, z as f16 (an integer), then q with 4 bits (0 to 15, even values in the low half of a
     * byte) or 8 bits (-128 to 127), for 32 or 128 values. */
    LLAISYS_DTYPE_I4_G32 = 19,
    LLAISYS_DTYPE_I4_G128 = 20,
    LLAISYS_DTYPE_I8_G32 = 21,
    LLAISYS_DTYPE_I8_G128 = 22,
    LLAISYS_DTYPE_F8_E4M3 = 23, /* OCP e4m3: 448 is the largest value, no infinity */
    /* Weights of FP8 checkpoints, value s * q: a block is s as f32, then 128 values q in e4m3. On
     * CUDA only. */
    LLAISYS_DTYPE_F8_G128 = 24,
    /* Weights of W8A8 checkpoints, value s * q: a block is s as f32, then 32 values q as int8. All
     * blocks of a row have the same s. Products may round activations to 8 bits with one scale per
     * row. On CPUs only. */
    LLAISYS_DTYPE_I8_CHANNEL = 25,
    LLAISYS_DTYPE_COUNT = 26
} llaisysDataType_t;

/* Return codes of calls whose header lists no others. */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_OK = 0,
    LLAISYS_ERROR_INVALID = -1,     /* invalid argument; nothing changed */
    LLAISYS_ERROR_MEMORY = -2,      /* out of memory; nothing changed */
    LLAISYS_ERROR_INTERNAL = -3,    /* internal error: destroy the handle */
    LLAISYS_ERROR_UNSUPPORTED = -4, /* valid, but not supported by this device or build */
    LLAISYS_ERROR_IO = -5           /* a file is missing, unreadable or too short */
} llaisysStatus_t;

/* Data types are stored in blocks: plain types have one element per block, quantised types
 * several. */
typedef struct {
    int32_t block_elements;
    int32_t block_bytes;
} LlaisysDataTypeTraits;

/* LLAISYS_ABI_VERSION of the library. */
LLAISYS_API uint32_t llaisysAbiVersion(void);

/* Error text of the last failed call of this thread; "" without one. Valid until the next failed
 * call of the thread. Never NULL. */
LLAISYS_API const char *llaisysLastError(void);
/* Its llaisysStatus_t; for calls that return a handle instead of a code. */
LLAISYS_API int32_t llaisysLastErrorCode(void);

/* "f32", "bf16", ...; "invalid" for a value outside the enumeration. Static storage. */
LLAISYS_API const char *llaisysDataTypeName(llaisysDataType_t dtype);

/* LLAISYS_ERROR_INVALID for an unknown type. */
LLAISYS_API int32_t llaisysDataTypeGetTraits(llaisysDataType_t dtype,
                                             LlaisysDataTypeTraits *traits);

#endif
