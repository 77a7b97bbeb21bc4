/* Devices and streams. */
#ifndef LLAISYS_RUNTIME_H
#define LLAISYS_RUNTIME_H

#include "llaisys/types.h"

/* An ordered queue of work on one device. On a CPU it is a pool of threads, and every call on it
 * has finished when it returns. */
typedef struct LlaisysStream *llaisysStream_t;

/* How many devices of this kind can be used; 0 when the build or the machine has none. */
LLAISYS_API int32_t llaisysDeviceCount(llaisysDeviceType_t device);

/* Bytes of memory that are free and that the device has in all. */
LLAISYS_API int32_t llaisysDeviceMemory(llaisysDeviceType_t device, int32_t device_id,
                                        int64_t *free_bytes, int64_t *total_bytes);

/* A line about the device for people. Writes at most capacity bytes with the final 0. */
LLAISYS_API int32_t llaisysDeviceDescribe(llaisysDeviceType_t device, int32_t device_id, char *text,
                                          size_t capacity);

/* What the CPU kernels run on: "portable", "avx2", "avx512" or "neon". Chosen once, from the
 * machine or from the environment variable LLAISYS_CPU_ISA. Static storage. */
LLAISYS_API const char *llaisysCpuIsa(void);

/* n_threads counts the calling thread; 0 means one per core. The sum over all streams of the
 * process is capped (llaisysSetThreadLimit): a stream may get fewer than it asks for, never less
 * than one. */
LLAISYS_API int32_t llaisysStreamCreate(llaisysDeviceType_t device, int32_t device_id,
                                        int32_t n_threads, llaisysStream_t *stream);
LLAISYS_API void llaisysStreamDestroy(llaisysStream_t stream);
LLAISYS_API int32_t llaisysStreamSynchronize(llaisysStream_t stream);

/* From now on no result of an operator on this stream depends on how many rows or tokens it was given
 * with. A CPU's never do. */
LLAISYS_API int32_t llaisysStreamMakeExact(llaisysStream_t stream);

/* Threads that this stream really has, the caller included. */
LLAISYS_API int32_t llaisysStreamThreads(llaisysStream_t stream, int32_t *n_threads);

/* The cap on worker threads over all CPU streams that are created after this call; at least 1.
 * The default is four times the number of cores. */
LLAISYS_API int32_t llaisysSetThreadLimit(int32_t n_threads);

/* The limits of this machine that kernels are held against (for `llaisys bench ops`). */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_PROBE_READ_BANDWIDTH = 0, /* bytes a second */
    LLAISYS_PROBE_F32 = 1,            /* operations a second, a multiply-add counts as two */
    LLAISYS_PROBE_F16 = 2,
    LLAISYS_PROBE_I8 = 3,  /* of tile registers, where kernels use them */
    LLAISYS_PROBE_BF16 = 4 /* of tile registers; 0 where kernels do not use them */
} LlaisysProbe;

/* Measures one limit with all of a stream's device (a CPU: with all threads of the stream); 0 when
 * there is no instruction for it. A GPU's F16 is that of a large product of bf16 matrices, 0 without
 * cuBLASLt, and its I8 is 0. Takes up to a second or two. */
LLAISYS_API int32_t llaisysBenchProbe(llaisysStream_t stream, LlaisysProbe probe, double *value);

/* Seconds that `count` empty parallel regions took on this stream (for `llaisys bench ops`). */
LLAISYS_API int32_t llaisysBenchParallelRegion(llaisysStream_t stream, int32_t count,
                                               double *seconds);

/* Times work without the host (for `llaisys bench ops`), on devices that record work: what is called
 * on the stream after Record is kept instead of done; Replay ends that, does it all once and then
 * `repeats` times, at least 1, and gives the seconds of one time by the device's own clock. What is
 * recorded must have run once before. UNSUPPORTED where work cannot be recorded. */
LLAISYS_API int32_t llaisysBenchRecord(llaisysStream_t stream);
LLAISYS_API int32_t llaisysBenchReplay(llaisysStream_t stream, int32_t repeats, double *seconds);

#endif
