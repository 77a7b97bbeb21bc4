#include "capi/guard.hpp"
#include "device/cpu/cpu_runtime.hpp"
#include "device/cpu/isa.hpp"
#include "device/cpu/probes.hpp"

#include <chrono>

using namespace llaisys;
using namespace llaisys::capi;

int32_t llaisysDeviceCount(llaisysDeviceType_t device) {
    return device::has_runtime(device) ? device::runtime_of(device).device_count() : 0;
}

namespace {

// The runtime of a device; throws when it does not exist.
const device::Runtime &runtime_of(llaisysDeviceType_t device, int32_t device_id) {
    const device::Runtime &runtime = device::runtime_of(device);
    const int count = runtime.device_count();
    require(device_id >= 0 && device_id < count, "device_id must be in [0, ", count, "), got ",
            device_id);
    return runtime;
}

} // namespace

int32_t llaisysDeviceMemory(llaisysDeviceType_t device, int32_t device_id, int64_t *free_bytes,
                            int64_t *total_bytes) {
    return guard([&] {
        not_null(free_bytes, "free_bytes");
        not_null(total_bytes, "total_bytes");
        const device::DeviceMemory memory = runtime_of(device, device_id).memory(device_id);
        *free_bytes = memory.free;
        *total_bytes = memory.total;
    });
}

int32_t llaisysDeviceDescribe(llaisysDeviceType_t device, int32_t device_id, char *text,
                              size_t capacity) {
    return guard([&] {
        not_null(text, "text");
        require(capacity > 0, "capacity must be at least 1, got 0");
        write_text(runtime_of(device, device_id).describe(device_id), text, capacity);
    });
}

const char *llaisysCpuIsa(void) {
    const char *name = "";
    guard([&] { name = device::name_of(device::cpu_isa()); });
    return name;
}

int32_t llaisysStreamCreate(llaisysDeviceType_t device, int32_t device_id, int32_t n_threads,
                            llaisysStream_t *stream) {
    return guard([&] {
        *not_null(stream, "stream") = nullptr;
        *stream = new LlaisysStream(device, device_id, n_threads);
    });
}

void llaisysStreamDestroy(llaisysStream_t stream) { delete stream; }

int32_t llaisysStreamSynchronize(llaisysStream_t stream) {
    return guard([&] { not_null(stream, "stream")->stream.synchronize(); });
}

int32_t llaisysStreamMakeExact(llaisysStream_t stream) {
    return guard([&] { not_null(stream, "stream")->stream.make_exact(); });
}

int32_t llaisysStreamThreads(llaisysStream_t stream, int32_t *n_threads) {
    return guard([&] {
        not_null(n_threads, "n_threads");
        *n_threads = device::pool_of(not_null(stream, "stream")->stream).size();
    });
}

int32_t llaisysBenchProbe(llaisysStream_t stream, LlaisysProbe probe, double *value) {
    return guard([&] {
        require(probe >= LLAISYS_PROBE_READ_BANDWIDTH && probe <= LLAISYS_PROBE_BF16,
                "probe must be in [0, 4], got ", int(probe));
        not_null(value, "value");
        const device::Stream &on = not_null(stream, "stream")->stream;
        const auto kind = device::Probe(int(probe));
        *value = on.runtime().measure != nullptr ? on.runtime().measure(on.native(), kind)
                                                 : device::measure(device::pool_of(on), kind);
    });
}

int32_t llaisysBenchParallelRegion(llaisysStream_t stream, int32_t count, double *seconds) {
    return guard([&] {
        device::ThreadPool &pool = device::pool_of(not_null(stream, "stream")->stream);
        not_null(seconds, "seconds");
        const auto start = std::chrono::steady_clock::now();
        for (int32_t i = 0; i < count; ++i) {
            pool.run(pool.size(), [](int64_t, int) {});
        }
        *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
}

namespace {

// The stream; throws when its device cannot capture work.
const device::Stream &recording(llaisysStream_t stream) {
    const device::Stream &on = not_null(stream, "stream")->stream;
    if (on.runtime().time_graph == nullptr) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "device ", on.runtime().name, " cannot record work");
    }
    return on;
}

} // namespace

int32_t llaisysBenchRecord(llaisysStream_t stream) {
    return guard([&] {
        const device::Stream &on = recording(stream);
        on.synchronize();
        on.runtime().begin_capture(on.native());
    });
}

int32_t llaisysBenchReplay(llaisysStream_t stream, int32_t repeats, double *seconds) {
    return guard([&] {
        not_null(seconds, "seconds");
        require(repeats >= 1, "repeats must be at least 1, got ", repeats);
        const device::Stream &on = recording(stream);
        void *graph = on.runtime().end_capture(on.native());
        try {
            *seconds = on.runtime().time_graph(graph, repeats, on.native());
        } catch (...) {
            on.runtime().destroy_graph(graph);
            throw;
        }
        on.runtime().destroy_graph(graph);
    });
}
