/* Tensors: a view {offset, shape, strides} on owned memory or a memory-mapped file. */
#ifndef LLAISYS_TENSOR_H
#define LLAISYS_TENSOR_H

#include "llaisys/types.h"

#define LLAISYS_MAX_DIMS 6

typedef struct LlaisysTensor *llaisysTensor_t;

/* Allocates zeroed memory. shape[ndim], 0 <= ndim <= LLAISYS_MAX_DIMS. */
LLAISYS_API int32_t llaisysTensorCreate(const int64_t *shape, int32_t ndim, llaisysDataType_t dtype,
                                        llaisysDeviceType_t device, int32_t device_id,
                                        llaisysTensor_t *tensor);

/* The bytes [offset, offset + size of the tensor) of a file, mapped read-only. LLAISYS_ERROR_IO
 * when the file is too short. Tensors of one file share a mapping, which the last one unmaps. An
 * offset that is not a multiple of the element size copies the bytes. */
LLAISYS_API int32_t llaisysTensorMap(const char *path, uint64_t offset, const int64_t *shape,
                                     int32_t ndim, llaisysDataType_t dtype,
                                     llaisysTensor_t *tensor);

/* Destroys a handle; the last view frees the storage. NULL does nothing. LLAISYS_ERROR_INVALID
 * for a handle owned by a model. */
LLAISYS_API int32_t llaisysTensorDestroy(llaisysTensor_t tensor);

/* The first element; NULL for a tensor without elements or a NULL handle. */
LLAISYS_API void *llaisysTensorData(llaisysTensor_t tensor);
LLAISYS_API int32_t llaisysTensorNdim(llaisysTensor_t tensor);                      /* -1: NULL */
LLAISYS_API int32_t llaisysTensorShape(llaisysTensor_t tensor, int64_t *shape);     /* [ndim] */
LLAISYS_API int32_t llaisysTensorStrides(llaisysTensor_t tensor, int64_t *strides); /* elements */
LLAISYS_API llaisysDataType_t llaisysTensorDataType(llaisysTensor_t tensor);
LLAISYS_API int32_t llaisysTensorIsContiguous(llaisysTensor_t tensor); /* 1, 0; -1: NULL */
LLAISYS_API int32_t llaisysTensorIsMapped(llaisysTensor_t tensor);     /* 1, 0; -1: NULL */

/* Copy n_bytes from or to host memory; n_bytes must be the size of the tensor, which must be
 * contiguous. Synchronous, but not ordered with streams: the caller waits for work on the tensor.
 * Loading into a mapped tensor fails. */
LLAISYS_API int32_t llaisysTensorLoad(llaisysTensor_t tensor, const void *data, size_t n_bytes);
LLAISYS_API int32_t llaisysTensorStore(llaisysTensor_t tensor, void *data, size_t n_bytes);

/* Create a new handle on the same storage. View fails when the new shape needs a copy; slice
 * selects [start, end) of one dimension; order is a permutation of 0..ndim-1. */
LLAISYS_API int32_t llaisysTensorView(llaisysTensor_t tensor, const int64_t *shape, int32_t ndim,
                                      llaisysTensor_t *view);
LLAISYS_API int32_t llaisysTensorSlice(llaisysTensor_t tensor, int32_t dim, int64_t start,
                                       int64_t end, llaisysTensor_t *view);
LLAISYS_API int32_t llaisysTensorPermute(llaisysTensor_t tensor, const int32_t *order,
                                         llaisysTensor_t *view);

/* A contiguous tensor with the same values: a view if it is contiguous already, otherwise a copy. */
LLAISYS_API int32_t llaisysTensorContiguous(llaisysTensor_t tensor, llaisysTensor_t *result);

#endif
