/* Tensors: a view {offset, shape, strides} on storage that is owned or a memory-mapped file. */
#ifndef LLAISYS_TENSOR_H
#define LLAISYS_TENSOR_H

#include "llaisys/types.h"

#define LLAISYS_MAX_DIMS 6

typedef struct LlaisysTensor *llaisysTensor_t;

/* Memory that the tensor owns, zeroed. shape[ndim], 0 <= ndim <= LLAISYS_MAX_DIMS. */
LLAISYS_API int32_t llaisysTensorCreate(const int64_t *shape, int32_t ndim, llaisysDataType_t dtype,
                                        llaisysDeviceType_t device, int32_t device_id,
                                        llaisysTensor_t *tensor);

/* The bytes [offset, offset + size of the tensor) of a file, mapped read-only and used in place.
 * Fails with LLAISYS_ERROR_IO when the file is shorter than that. Tensors of one file share one
 * mapping, which goes with the last of them. An offset that is not a multiple of the element size
 * gives a tensor with a copy of the bytes. */
LLAISYS_API int32_t llaisysTensorMap(const char *path, uint64_t offset, const int64_t *shape,
                                     int32_t ndim, llaisysDataType_t dtype,
                                     llaisysTensor_t *tensor);

/* Ends this handle; the storage goes with its last view. NULL is nothing to end. A handle that a
 * model holds is the model's to end: LLAISYS_ERROR_INVALID, and nothing has changed. */
LLAISYS_API int32_t llaisysTensorDestroy(llaisysTensor_t tensor);

/* The first element; NULL for a tensor without elements or a NULL handle. */
LLAISYS_API void *llaisysTensorData(llaisysTensor_t tensor);
LLAISYS_API int32_t llaisysTensorNdim(llaisysTensor_t tensor);                      /* -1: NULL */
LLAISYS_API int32_t llaisysTensorShape(llaisysTensor_t tensor, int64_t *shape);     /* [ndim] */
LLAISYS_API int32_t llaisysTensorStrides(llaisysTensor_t tensor, int64_t *strides); /* elements */
LLAISYS_API llaisysDataType_t llaisysTensorDataType(llaisysTensor_t tensor);
LLAISYS_API llaisysDeviceType_t llaisysTensorDevice(llaisysTensor_t tensor);
LLAISYS_API int32_t llaisysTensorIsContiguous(llaisysTensor_t tensor); /* 1, 0; -1: NULL */
LLAISYS_API int32_t llaisysTensorIsMapped(llaisysTensor_t tensor);     /* 1, 0; -1: NULL */

/* Copies n_bytes of host memory in, or out; n_bytes must be the size of the tensor, which must be
 * contiguous. Done when it returns; work of a stream on the tensor is the caller's to wait for.
 * Loading into a mapped tensor is refused. */
LLAISYS_API int32_t llaisysTensorLoad(llaisysTensor_t tensor, const void *data, size_t n_bytes);
LLAISYS_API int32_t llaisysTensorStore(llaisysTensor_t tensor, void *data, size_t n_bytes);

/* Each makes a new handle on the same storage. View needs a layout that the new shape can describe
 * without copying; slice takes [start, end) of one dimension; order is a permutation of 0..ndim-1. */
LLAISYS_API int32_t llaisysTensorView(llaisysTensor_t tensor, const int64_t *shape, int32_t ndim,
                                      llaisysTensor_t *view);
LLAISYS_API int32_t llaisysTensorSlice(llaisysTensor_t tensor, int32_t dim, int64_t start,
                                       int64_t end, llaisysTensor_t *view);
LLAISYS_API int32_t llaisysTensorPermute(llaisysTensor_t tensor, const int32_t *order,
                                         llaisysTensor_t *view);

/* The same values without gaps: another handle on the same storage if it has none already,
 * otherwise a copy. */
LLAISYS_API int32_t llaisysTensorContiguous(llaisysTensor_t tensor, llaisysTensor_t *result);

#endif
