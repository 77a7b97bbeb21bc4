// The subset of the cuBLASLt C interface that is used here. The library is opened at run time
// (from the toolkit or the nvidia-cublas wheel); its header is not needed to compile. Names,
// constants and layouts are those of versions 12 and 13.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace llaisys::device::cublaslt {

using Handle = struct HandleTag *;
using MatmulDesc = struct MatmulDescTag *;
using MatrixLayout = struct MatrixLayoutTag *;
using Preference = struct PreferenceTag *;

constexpr int kSuccess = 0;
constexpr int kCompute32F = 68;
constexpr int32_t kTransposed = 1;         // CUBLAS_OP_T
constexpr int kMatmulTransA = 3;           // CUBLASLT_MATMUL_DESC_TRANSA
constexpr int kMatmulScaleA = 17;          // CUBLASLT_MATMUL_DESC_A_SCALE_POINTER
constexpr int kMatmulScaleB = 18;          // CUBLASLT_MATMUL_DESC_B_SCALE_POINTER
constexpr int kMatmulFastAccum = 25;       // CUBLASLT_MATMUL_DESC_FAST_ACCUM
constexpr int kMatmulScaleModeA = 31;      // CUBLASLT_MATMUL_DESC_A_SCALE_MODE
constexpr int kMatmulScaleModeB = 32;      // CUBLASLT_MATMUL_DESC_B_SCALE_MODE
constexpr int32_t kScaleOuterVector = 3;   // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
constexpr int kPreferenceMaxWorkspace = 1; // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr int kPreferenceReductions = 3;   // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
constexpr uint32_t kNoReduction = 0;       // CUBLASLT_REDUCTION_SCHEME_NONE

struct Algorithm {
    uint64_t data[8];
};
struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

struct Library {
    size_t (*GetVersion)();
    int (*Create)(Handle *handle);
    int (*Destroy)(Handle handle);
    int (*Matmul)(Handle handle, MatmulDesc desc, const void *alpha, const void *a,
                  MatrixLayout a_layout, const void *b, MatrixLayout b_layout, const void *beta,
                  const void *c, MatrixLayout c_layout, void *d, MatrixLayout d_layout,
                  const Algorithm *algorithm, void *workspace, size_t workspace_bytes,
                  cudaStream_t stream);
    int (*MatmulAlgoGetHeuristic)(Handle handle, MatmulDesc desc, MatrixLayout a, MatrixLayout b,
                                  MatrixLayout c, MatrixLayout d, Preference preference,
                                  int query_full, HeuristicResult *results, int *count);
    int (*MatmulDescCreate)(MatmulDesc *desc, int compute_type, cudaDataType_t scale_type);
    int (*MatmulDescDestroy)(MatmulDesc desc);
    int (*MatmulDescSetAttribute)(MatmulDesc desc, int attribute, const void *value, size_t bytes);
    int (*MatmulPreferenceCreate)(Preference *preference);
    int (*MatmulPreferenceDestroy)(Preference preference);
    int (*MatmulPreferenceSetAttribute)(Preference preference, int attribute, const void *value,
                                        size_t bytes);
    int (*MatrixLayoutCreate)(MatrixLayout *layout, cudaDataType_t type, uint64_t rows,
                              uint64_t columns, int64_t ld);
    int (*MatrixLayoutDestroy)(MatrixLayout layout);
};

// Null when the library is not installed. Opened once, never closed.
const Library *open();

} // namespace llaisys::device::cublaslt
