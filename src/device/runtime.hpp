// What a device must be able to do: memory, copies, streams, events. One table per kind of device;
// callers use the table (or the small owners below). Operators choose their kernels by the kind; who
// else asks for it wants to know whether memory is the host's.
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

// How long memory is wanted. What passes lies by itself where the device packs blocks together: in
// between those that last it would leave a hole.
enum class Lifetime { lasting, passing };

// What kernels are held against; LlaisysProbe.
enum class Probe {
    read_bandwidth, // bytes a second, from memory
    f32,            // f32 operations a second; a fused multiply-add counts as two
    f16,            // the same in f16
    i8,             // the same for int8 products summed in int32, of tiles where kernels use them
    bf16            // the same for tiles of bf16 summed in f32
};

enum class CopyKind { host_to_host, host_to_device, device_to_host, device_to_device };

struct Runtime {
    DeviceType type;
    const char *name;

    int (*device_count)();

    // Zeroed memory aligned to at least 64 bytes, never null; throws LLAISYS_ERROR_MEMORY.
    void *(*allocate)(int device_id, size_t bytes, Lifetime lifetime);
    void (*release)(int device_id, void *memory, size_t bytes, Lifetime lifetime);

    // In order with the work of `stream`: what is read from the host has been read when it returns,
    // the rest is done after synchronize(stream). stream null: done when it returns, in order with
    // nothing else.
    void (*copy)(void *dst, const void *src, size_t bytes, CopyKind kind, void *stream);

    // n_threads is for devices whose streams are made of threads; others ignore it.
    void *(*create_stream)(int device_id, int n_threads);
    void (*destroy_stream)(void *stream);
    void (*synchronize)(void *stream);
    void *(*handle_of)(void *stream); // by which libraries of the device's maker know it

    // An event is done once all work that was on its stream when it was recorded is done.
    void *(*create_event)(int device_id);
    void (*destroy_event)(void *event);
    void (*record_event)(void *event, void *stream);
    void (*wait_event)(void *event, void *stream); // the stream waits, not the caller
    bool (*query_event)(void *event);

    // Host memory that the device copies to and from while the host goes on; throws MEMORY.
    void *(*allocate_host)(size_t bytes);
    void (*release_host)(void *memory);

    DeviceMemory (*memory)(int device_id);
    std::string (*describe)(int device_id); // for people

    // Graphs: the work queued between begin and end is not done but kept, and done again at each
    // launch, on the same memory. All null where the device has none.
    void (*begin_capture)(void *stream) = nullptr;
    void *(*end_capture)(void *stream) = nullptr;
    void (*launch_graph)(void *graph, void *stream) = nullptr;
    void (*destroy_graph)(void *graph) = nullptr;
    // Launches a graph once and then `repeats` times; the seconds of one time by the device's clock.
    double (*time_graph)(void *graph, int repeats, void *stream) = nullptr;

    // A limit of the device; null on the CPU, whose probes want its threads (device/cpu/probes.hpp).
    double (*measure)(void *stream, Probe probe) = nullptr;
    // From now on no result of an operator on the stream depends on how many rows or tokens it was
    // given with. Null where that is so anyway.
    void (*make_exact)(void *stream) = nullptr;
    // Whether the first operator of a shape on the stream may take its time to try several ways of doing
    // it; at first it may. Null where nothing is tried.
    void (*allow_trials)(void *stream, bool are_allowed) = nullptr;
};

// Throws LLAISYS_ERROR_UNSUPPORTED for a device that this build does not have, INVALID for no such.
const Runtime &runtime_of(DeviceType type);
bool has_runtime(DeviceType type);

const Runtime &cpu_runtime();
const Runtime &cuda_runtime(); // in a build with CUDA

// For tests: runtime_of(type) is this table from now on; null: what the build has. Not to be called
// while anything of that device is alive.
void use_runtime(DeviceType type, const Runtime *runtime);

// Owns one stream of one device. Not copyable; work on it is ordered.
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
