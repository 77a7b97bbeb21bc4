// The device interface: memory, copies, streams, events, graphs. One function table per device
// type. Operators select kernels by the type; other code checks it only for host memory.
#pragma once

#include "base/dtype.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace llaisys::device {

struct DeviceMemory {
    int64_t free; // bytes
    int64_t total;
};

// Expected lifetime of an allocation. Temporary blocks get their own mapping where the device packs
// blocks together, because they would leave holes.
enum class Lifetime { persistent, temporary };

// Machine limits that kernels are compared with; LlaisysProbe.
enum class Probe {
    read_bandwidth, // bytes per second, from DRAM
    f32,            // f32 operations per second; a fused multiply-add counts as two
    f16,            // the same in f16
    i8,             // int8 products summed in int32, by tiles where kernels use them
    bf16            // bf16 tile products summed in f32
};

// Where to find device memory that another rank of this machine has allocated.
struct SharedMemory {
    void *address; // in the process that allocated it
    int64_t process;
    int64_t device_id;
    std::byte handle[64]; // for other processes
};

enum class CopyKind { host_to_host, host_to_device, device_to_host, device_to_device };

struct Runtime {
    DeviceType type;
    const char *name;

    int (*device_count)();

    // Zeroed memory aligned to at least 64 bytes, never null; throws LLAISYS_ERROR_MEMORY.
    void *(*allocate)(int device_id, size_t bytes, Lifetime lifetime);
    void (*release)(int device_id, void *memory, size_t bytes, Lifetime lifetime);

    // Copy in stream order. Host sources have been read on return; the copy is complete after
    // synchronize(stream). A null stream: complete on return, unordered.
    void (*copy)(void *dst, const void *src, size_t bytes, CopyKind kind, void *stream);

    // n_threads: for devices whose streams are thread pools; ignored by others.
    void *(*create_stream)(int device_id, int n_threads);
    void (*destroy_stream)(void *stream);
    void (*synchronize)(void *stream);
    void *(*handle_of)(void *stream); // native handle, e.g. cudaStream_t

    // An event is complete when all work queued on its stream before the record is complete.
    void *(*create_event)(int device_id);
    void (*destroy_event)(void *event);
    void (*record_event)(void *event, void *stream);
    void (*wait_event)(void *event, void *stream); // the stream waits, the caller does not
    bool (*query_event)(void *event);

    // Pinned host memory for asynchronous copies; throws MEMORY.
    void *(*allocate_host)(size_t bytes);
    void (*release_host)(void *memory);

    DeviceMemory (*memory)(int device_id);
    std::string (*describe)(int device_id); // human-readable

    // Graphs: work queued between begin and end is captured instead of executed, and executed at
    // each launch on the same memory. All null where the device has no graphs.
    void (*begin_capture)(void *stream) = nullptr;
    void *(*end_capture)(void *stream) = nullptr;
    void (*launch_graph)(void *graph, void *stream) = nullptr;
    void (*destroy_graph)(void *graph) = nullptr;
    // Launches a graph once to warm up, then `repeats` times; returns device seconds per launch.
    double (*time_graph)(void *graph, int repeats, void *stream) = nullptr;

    // Measures a limit of the device; null on the CPU, whose probes need threads
    // (device/cpu/probes.hpp).
    double (*measure)(void *stream, Probe probe) = nullptr;
    // Zeroed device memory that other ranks can map; null where the device has none. `map_shared`
    // returns the address for kernels of `device_id`, and throws UNSUPPORTED when the two devices
    // cannot access each other's memory. Unmap before the owner releases.
    SharedMemory (*allocate_shared)(int device_id, size_t bytes) = nullptr;
    void (*release_shared)(const SharedMemory &memory) = nullptr;
    void *(*map_shared)(int device_id, const SharedMemory &memory) = nullptr;
    void (*unmap_shared)(void *mapped, const SharedMemory &memory) = nullptr;
    // Makes all operators on the stream batch-invariant. Null where they always are.
    void (*make_exact)(void *stream) = nullptr;
    // Whether the first operator of a shape on the stream may benchmark several algorithms
    // (default: yes). Null where there is nothing to choose.
    void (*allow_trials)(void *stream, bool are_allowed) = nullptr;
};

// Throws LLAISYS_ERROR_UNSUPPORTED for a device that this build lacks, INVALID for an unknown one.
const Runtime &runtime_of(DeviceType type);
bool has_runtime(DeviceType type);

const Runtime &cpu_runtime();
const Runtime &cuda_runtime(); // in a build with CUDA

// For tests: replaces the table of a device type; null restores the build's. Must not be called
// while objects of that device exist.
void use_runtime(DeviceType type, const Runtime *runtime);

// Owner of one stream of one device. Work on it is ordered.
class Stream {
public:
    Stream(DeviceType type, int device_id, int n_threads);
    ~Stream();
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    const Runtime &runtime() const { return *runtime_; }
    DeviceType type() const { return runtime_->type; }
    int device_id() const { return device_id_; }
    void *native() const { return native_; }
    void synchronize() const { runtime_->synchronize(native_); }
    void make_exact() {
        if (runtime_->make_exact != nullptr) {
            runtime_->make_exact(native_);
        }
    }

private:
    const Runtime *runtime_;
    int device_id_;
    void *native_;
};

} // namespace llaisys::device
