// CUDA function table of the runtime. Work on a stream is asynchronous; a copy without a stream
// synchronizes the device before and after.
#include "device/cuda/cuda_runtime.hpp"

#include "device/cuda/allocator.hpp"
#include "device/cuda/cublaslt.hpp"
#include "device/cuda/cublaslt_gemm.hpp"
#include "device/cuda/kernel_arch.hpp"
#include "device/cuda/probes.hpp"
#include "device/cuda/shared_memory.hpp"
#include "device/cuda/uploader.hpp"

#include <algorithm>

namespace llaisys::device {

void cuda_check(cudaError_t status, const char *call) {
    if (status == cudaSuccess) {
        return;
    }
    cudaGetLastError();
    const llaisysStatus_t code =
        status == cudaErrorMemoryAllocation ? LLAISYS_ERROR_MEMORY : LLAISYS_ERROR_INTERNAL;
    fail(code, "CUDA: ", call, ": ", cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}

GrowingMemory::~GrowingMemory() {
    for (size_t i = 0; i < blocks_.size(); ++i) {
        CudaAllocator::of(device_id_).release(blocks_[i], sizes_[i]);
    }
}

void *GrowingMemory::grow(size_t bytes) {
    const size_t wanted = std::max(bytes, 2 * capacity_);
    blocks_.push_back(CudaAllocator::of(device_id_).allocate(wanted));
    sizes_.push_back(wanted);
    capacity_ = wanted;
    return blocks_.back();
}

CudaStream::CudaStream(int id) : device_id(id), scratch(id), counters(id) {
    LLAISYS_CUDA(cudaSetDevice(id));
    int major = 0;
    LLAISYS_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
    require(major >= 8, "GPU ", id, " has compute capability ", major,
            ".x; this build needs 8.0 or more");
    device_major = major;
    compute_major = std::min(major, kernel_arch_major());
    has_pdl = compute_major >= 9;
    LLAISYS_CUDA(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, id));
    LLAISYS_CUDA(
        cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
    LLAISYS_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    products = CublasLtGemm::open(id);
}

CudaStream::~CudaStream() {
    cudaSetDevice(device_id);
    cudaStreamSynchronize(stream);
    products.reset();
    cudaStreamDestroy(stream);
}

namespace {

cudaStream_t raw(void *stream) { return static_cast<CudaStream *>(stream)->stream; }

void use_device_of(void *stream) {
    LLAISYS_CUDA(cudaSetDevice(static_cast<CudaStream *>(stream)->device_id));
}

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) { // no driver, or too old
        cudaGetLastError();
        return 0;
    }
    return count;
}

void *allocate(int device_id, size_t bytes, Lifetime) {
    return CudaAllocator::of(device_id).allocate(bytes);
}

void release(int device_id, void *memory, size_t bytes, Lifetime) {
    CudaAllocator::of(device_id).release(memory, bytes);
}

int device_of(const void *memory) {
    cudaPointerAttributes attributes{};
    LLAISYS_CUDA(cudaPointerGetAttributes(&attributes, memory));
    return attributes.device;
}

cudaMemcpyKind kind_of(CopyKind kind) {
    switch (kind) {
    case CopyKind::host_to_host:
        return cudaMemcpyHostToHost;
    case CopyKind::host_to_device:
        return cudaMemcpyHostToDevice;
    case CopyKind::device_to_host:
        return cudaMemcpyDeviceToHost;
    default:
        return cudaMemcpyDeviceToDevice;
    }
}

void copy(void *dst, const void *src, size_t bytes, CopyKind kind, void *stream) {
    if (bytes == 0) {
        return;
    }
    if (stream != nullptr) {
        LLAISYS_CUDA(cudaMemcpyAsync(dst, src, bytes, kind_of(kind), raw(stream)));
        return;
    }
    const int device_id = device_of(kind == CopyKind::device_to_host ? src : dst);
    LLAISYS_CUDA(cudaSetDevice(device_id));
    LLAISYS_CUDA(cudaDeviceSynchronize());
    if (kind == CopyKind::host_to_device && bytes >= kStagedUploadMin) {
        upload_pageable(device_id, dst, src, bytes);
        return;
    }
    LLAISYS_CUDA(cudaMemcpy(dst, src, bytes, kind_of(kind)));
    LLAISYS_CUDA(cudaDeviceSynchronize());
}

void *create_stream(int device_id, int) { return new CudaStream(device_id); }
void destroy_stream(void *stream) { delete static_cast<CudaStream *>(stream); }
// Also sets the calling thread's device.
void synchronize(void *stream) {
    use_device_of(stream);
    LLAISYS_CUDA(cudaStreamSynchronize(raw(stream)));
}

void *handle_of(void *stream) { return raw(stream); }

void *create_event(int device_id) {
    LLAISYS_CUDA(cudaSetDevice(device_id));
    cudaEvent_t event = nullptr;
    LLAISYS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

void destroy_event(void *event) { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(void *event, void *stream) {
    LLAISYS_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), raw(stream)));
}

void wait_event(void *event, void *stream) {
    LLAISYS_CUDA(cudaStreamWaitEvent(raw(stream), static_cast<cudaEvent_t>(event), 0));
}

bool query_event(void *event) {
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    cuda_check(status, "cudaEventQuery");
    return true;
}

void *allocate_host(size_t bytes) {
    void *memory = nullptr;
    const cudaError_t status = cudaMallocHost(&memory, bytes == 0 ? 1 : bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        fail(LLAISYS_ERROR_MEMORY, bytes, " bytes of pinned host memory could not be allocated");
    }
    cuda_check(status, "cudaMallocHost");
    return memory;
}

void release_host(void *memory) { cudaFreeHost(memory); }

DeviceMemory memory(int device_id) {
    LLAISYS_CUDA(cudaSetDevice(device_id));
    size_t free = 0;
    size_t total = 0;
    LLAISYS_CUDA(cudaMemGetInfo(&free, &total));
    return {int64_t(free), int64_t(total)};
}

std::string describe(int device_id) {
    cudaDeviceProp properties{};
    LLAISYS_CUDA(cudaGetDeviceProperties(&properties, device_id));
    return text(properties.name, ", compute capability ", properties.major, ".", properties.minor,
                ", ", properties.multiProcessorCount, " SMs, ", properties.totalGlobalMem >> 20,
                " MiB", cublaslt::open() != nullptr ? "" : ", without cuBLASLt");
}

void begin_capture(void *stream) {
    use_device_of(stream);
    LLAISYS_CUDA(cudaStreamBeginCapture(raw(stream), cudaStreamCaptureModeThreadLocal));
}

void *end_capture(void *stream) {
    cudaGraph_t graph = nullptr;
    LLAISYS_CUDA(cudaStreamEndCapture(raw(stream), &graph));
    cudaGraphExec_t ready = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&ready, graph, 0);
    cudaGraphDestroy(graph);
    cuda_check(status, "cudaGraphInstantiate");
    return ready;
}

void launch_graph(void *graph, void *stream) {
    LLAISYS_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), raw(stream)));
}

void destroy_graph(void *graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

double time_graph(void *graph, int repeats, void *stream) {
    return cuda_seconds(*static_cast<CudaStream *>(stream), repeats,
                        [&] { launch_graph(graph, stream); });
}

double measure(void *stream, Probe probe) {
    return measure_cuda(*static_cast<CudaStream *>(stream), probe);
}

void make_exact(void *stream) { static_cast<CudaStream *>(stream)->is_exact = true; }

void allow_trials(void *stream, bool are_allowed) {
    static_cast<CudaStream *>(stream)->has_trials = are_allowed;
}

} // namespace

const Runtime &cuda_runtime() {
    static const Runtime runtime = [] {
        Runtime table;
        table.type = LLAISYS_DEVICE_NVIDIA;
        table.name = "nvidia";
        table.device_count = device_count;
        table.allocate = allocate;
        table.release = release;
        table.copy = copy;
        table.create_stream = create_stream;
        table.destroy_stream = destroy_stream;
        table.synchronize = synchronize;
        table.handle_of = handle_of;
        table.create_event = create_event;
        table.destroy_event = destroy_event;
        table.record_event = record_event;
        table.wait_event = wait_event;
        table.query_event = query_event;
        table.allocate_host = allocate_host;
        table.release_host = release_host;
        table.memory = memory;
        table.describe = describe;
        table.begin_capture = begin_capture;
        table.end_capture = end_capture;
        table.launch_graph = launch_graph;
        table.destroy_graph = destroy_graph;
        table.time_graph = time_graph;
        table.measure = measure;
        table.allocate_shared = allocate_shared;
        table.release_shared = release_shared;
        table.map_shared = map_shared;
        table.unmap_shared = unmap_shared;
        table.make_exact = make_exact;
        table.allow_trials = allow_trials;
        return table;
    }();
    return runtime;
}

} // namespace llaisys::device
