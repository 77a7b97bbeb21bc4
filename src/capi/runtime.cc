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

int32_t llaisysStreamThreads(llaisysStream_t stream, int32_t *n_threads) {
    return guard([&] {
        not_null(n_threads, "n_threads");
        *n_threads = device::pool_of(not_null(stream, "stream")->stream).size();
    });
}

int32_t llaisysSetThreadLimit(int32_t n_threads) {
    return guard([&] { device::ThreadPool::set_process_limit(n_threads); });
}

int32_t llaisysBenchProbe(llaisysStream_t stream, LlaisysProbe probe, double *value) {
    return guard([&] {
        require(probe >= LLAISYS_PROBE_READ_BANDWIDTH && probe <= LLAISYS_PROBE_I8,
                "probe must be in [0, 3], got ", int(probe));
        not_null(value, "value");
        *value = device::measure(device::pool_of(not_null(stream, "stream")->stream),
                                 device::Probe(int(probe)));
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
