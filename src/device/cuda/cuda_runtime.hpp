// CUDA side of the runtime table: the stream state that kernels use, and error checks.
#pragma once

#include "device/runtime.hpp"

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

namespace llaisys::device {

class CublasLtGemm;

// Throws LLAISYS_ERROR_INTERNAL (or MEMORY) with `call` and the CUDA error text unless status is
// 0. Clears the last error, so that the next call reports its own.
void cuda_check(cudaError_t status, const char *call);
#define LLAISYS_CUDA(call) ::llaisys::device::cuda_check((call), #call)

// Device memory that only grows. Earlier pointers stay valid (a captured graph may hold them)
// until the stream is destroyed. Zeroed on allocation.
class GrowingMemory {
public:
    explicit GrowingMemory(int device_id) : device_id_(device_id) {}
    ~GrowingMemory();
    GrowingMemory(const GrowingMemory &) = delete;
    GrowingMemory &operator=(const GrowingMemory &) = delete;

    void *at_least(size_t bytes) { return bytes <= capacity_ ? blocks_.back() : grow(bytes); }

private:
    void *grow(size_t bytes);
    int device_id_;
    size_t capacity_ = 0;
    std::vector<void *> blocks_;
    std::vector<size_t> sizes_;
};

// Target of Stream::native() for a CUDA stream.
struct CudaStream {
    explicit CudaStream(int device_id);
    ~CudaStream();
    CudaStream(const CudaStream &) = delete;
    CudaStream &operator=(const CudaStream &) = delete;

    int device_id;
    int device_major;  // compute capability
    int compute_major; // of the loaded kernels; a newer device may run older code
    int n_sms;
    int max_shared_bytes;  // opt-in maximum per block
    bool is_exact = false; // batch-invariant: results do not depend on the number of rows or tokens
    bool has_trials = true; // the first GEMM of a shape may time several algorithms
    bool has_pdl;           // kernels for 9 and above: programmatic dependent launch
    bool allows_pdl = true; // false: kernels start after the one before has ended
    cudaStream_t stream;    // non-blocking
    std::unique_ptr<CublasLtGemm> products; // null without cuBLASLt
    GrowingMemory scratch;                  // valid until the next operator
    GrowingMemory counters;                 // zero between operators
    // Memory of converted weights; the last is in use, captured graphs may hold the others.
    std::vector<std::shared_ptr<void>> panels;
};

inline CudaStream &cuda_stream_of(const Stream &stream) {
    return *static_cast<CudaStream *>(stream.native());
}

} // namespace llaisys::device
