// The CUDA side of the runtime table: what kernels need of a stream, and errors that name the call.
#pragma once

#include "device/runtime.hpp"

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

namespace llaisys::device {

class MatrixProducts;

// Throws LLAISYS_ERROR_INTERNAL (or MEMORY) with `call` and CUDA's own words unless status is 0.
// The error is taken off the runtime, so that the next call reports its own.
void cuda_check(cudaError_t status, const char *call);
#define LLAISYS_CUDA(call) ::llaisys::device::cuda_check((call), #call)

// Device memory that only grows. What was handed out before stays valid (a captured graph may hold
// it) until the stream goes. Zeroed when it is taken.
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

// What Stream::native() points to for a CUDA stream.
struct CudaStream {
    explicit CudaStream(int device_id);
    ~CudaStream();
    CudaStream(const CudaStream &) = delete;
    CudaStream &operator=(const CudaStream &) = delete;

    int device_id;
    int device_major;  // of the compute capability
    int compute_major; // of what the kernels were compiled for; a newer device may run older code
    int n_processors;
    int max_shared_bytes;   // that a block can ask for
    bool is_exact = false;  // no result depends on how many rows or tokens an operator is given
    bool has_trials = true; // the first product of a shape may try several algorithms
    bool has_early_launch;  // code for 9 and above: programmatic dependent launch
    cudaStream_t stream;    // does not wait for the default stream
    std::unique_ptr<MatrixProducts> products; // cuBLASLt, when it can be loaded
    GrowingMemory scratch;                    // of one operator, until the next
    GrowingMemory counters;                   // zero between operators
};

inline CudaStream &cuda_stream_of(const Stream &stream) {
    return *static_cast<CudaStream *>(stream.native());
}

} // namespace llaisys::device
