/* Devices and streams. */
#ifndef LLAISYS_RUNTIME_H
#define LLAISYS_RUNTIME_H

#include "llaisys/types.h"

/* An ordered queue of work on one device. On a CPU it is a thread pool, and calls are
 * synchronous. */
typedef struct LlaisysStream *llaisysStream_t;

/* Number of usable devices of this type; 0 when the build or the machine has none. */
LLAISYS_API int32_t llaisysDeviceCount(llaisysDeviceType_t device);

/* Free and total bytes of device memory. */
LLAISYS_API int32_t llaisysDeviceMemory(llaisysDeviceType_t device, int32_t device_id,
                                        int64_t *free_bytes, int64_t *total_bytes);

/* A human-readable description of the device. Writes at most capacity bytes including the final
 * 0. */
LLAISYS_API int32_t llaisysDeviceDescribe(llaisysDeviceType_t device, int32_t device_id, char *text,
                                          size_t capacity);

/* Instruction set of the CPU kernels: "portable", "avx2", "avx512" or "neon". Chosen once, by
 * detection or by the environment variable LLAISYS_CPU_ISA. Static storage. */
LLAISYS_API const char *llaisysCpuIsa(void);

/* n_threads includes the calling thread; 0: one per core that the affinity mask and the CPU quota
 * allow. The total over all streams of the process is limited to four times the number of cores: a
 * stream may get fewer threads, but at least one. */
LLAISYS_API int32_t llaisysStreamCreate(llaisysDeviceType_t device, int32_t device_id,
                                        int32_t n_threads, llaisysStream_t *stream);
LLAISYS_API void llaisysStreamDestroy(llaisysStream_t stream);
LLAISYS_API int32_t llaisysStreamSynchronize(llaisysStream_t stream);

/* Makes later operators on this stream batch-invariant: results do not depend on other rows or
 * tokens. A CPU stream always is. */
LLAISYS_API int32_t llaisysStreamMakeExact(llaisysStream_t stream);

/* Threads of this stream, including the caller. */
LLAISYS_API int32_t llaisysStreamThreads(llaisysStream_t stream, int32_t *n_threads);

/* Hardware limits that kernels are compared with (for `llaisys bench ops`). */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_PROBE_READ_BANDWIDTH = 0, /* bytes per second */
    LLAISYS_PROBE_F32 = 1,            /* operations per second, a multiply-add counts as two */
    LLAISYS_PROBE_F16 = 2,
    LLAISYS_PROBE_I8 = 3,  /* of AMX tiles, where kernels use them */
    LLAISYS_PROBE_BF16 = 4 /* of AMX tiles; 0 where kernels do not use them */
} LlaisysProbe;

/* Measures one limit of a stream's device (a CPU: with all threads of the stream); 0 without an
 * instruction for it. F16 of a GPU is a large bf16 GEMM, 0 without cuBLASLt; I8 is 0. Takes up to
 * two seconds. */
LLAISYS_API int32_t llaisysBenchProbe(llaisysStream_t stream, LlaisysProbe probe, double *value);

/* Seconds of `count` empty parallel regions on this stream (for `llaisys bench ops`). */
LLAISYS_API int32_t llaisysBenchParallelRegion(llaisysStream_t stream, int32_t count,
                                               double *seconds);

/* Times work without host overhead (for `llaisys bench ops`) on devices with graph capture: calls
 * after Record are captured; Replay ends the capture, runs it once and then `repeats` times, at
 * least 1, and returns the seconds of one run by the device's clock. The work must have run once
 * before. UNSUPPORTED without graph capture. */
LLAISYS_API int32_t llaisysBenchRecord(llaisysStream_t stream);
LLAISYS_API int32_t llaisysBenchReplay(llaisysStream_t stream, int32_t repeats, double *seconds);

#endif
