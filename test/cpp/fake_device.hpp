// A fake device: CPU memory behind its own function table, which counts copies. Its streams have no
// threads.
#pragma once

#include "base/check.hpp"
#include "device/runtime.hpp"

#include <atomic>
#include <utility>
#include <vector>

namespace fake {

using namespace llaisys;

struct Copies {
    int host_to_device = 0, device_to_host = 0, device_to_device = 0;
    int without_stream = 0; // of any kind
};

inline Copies &copies() {
    static Copies counts;
    return counts;
}

// Installs the fake device as LLAISYS_DEVICE_NVIDIA during its lifetime; resets the counts.
class Device {
public:
    Device() {
        copies() = {};
        table_ = device::cpu_runtime();
        table_.type = LLAISYS_DEVICE_NVIDIA;
        table_.name = "fake";
        table_.copy = copy;
        table_.create_stream = [](int, int) -> void * { return &copies(); };
        table_.destroy_stream = [](void *) {};
        device::use_runtime(LLAISYS_DEVICE_NVIDIA, &table_);
    }
    ~Device() { device::use_runtime(LLAISYS_DEVICE_NVIDIA, nullptr); }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

private:
    static void copy(void *dst, const void *src, size_t bytes, device::CopyKind kind,
                     void *stream) {
        copies().host_to_device += kind == device::CopyKind::host_to_device;
        copies().device_to_host += kind == device::CopyKind::device_to_host;
        copies().device_to_device += kind == device::CopyKind::device_to_device;
        copies().without_stream += stream == nullptr;
        device::cpu_runtime().copy(dst, src, bytes, kind, stream);
    }
    device::Runtime table_;
};

// Records the sizes of CPU allocations during its lifetime.
class CountedAllocations {
public:
    CountedAllocations() {
        sizes_.clear();
        table_ = device::cpu_runtime();
        table_.allocate = [](int device_id, size_t bytes, device::Lifetime lifetime) {
            sizes_.push_back(int64_t(bytes));
            return device::cpu_runtime().allocate(device_id, bytes, lifetime);
        };
        device::use_runtime(LLAISYS_DEVICE_CPU, &table_);
    }
    ~CountedAllocations() { device::use_runtime(LLAISYS_DEVICE_CPU, nullptr); }
    CountedAllocations(const CountedAllocations &) = delete;
    CountedAllocations &operator=(const CountedAllocations &) = delete;

    int64_t count() const { return int64_t(sizes_.size()); }
    // The sizes since the last call.
    std::vector<int64_t> take() { return std::exchange(sizes_, {}); }

private:
    inline static std::vector<int64_t> sizes_;
    device::Runtime table_;
};

// During its lifetime, the n-th CPU allocation after fail_at(n), from 0, fails.
class FailingMemory {
public:
    FailingMemory() {
        left_ = -1;
        table_ = device::cpu_runtime();
        table_.allocate = [](int device_id, size_t bytes, device::Lifetime lifetime) {
            count();
            return device::cpu_runtime().allocate(device_id, bytes, lifetime);
        };
        table_.allocate_host = [](size_t bytes) {
            count();
            return device::cpu_runtime().allocate_host(bytes);
        };
        device::use_runtime(LLAISYS_DEVICE_CPU, &table_);
    }
    ~FailingMemory() { device::use_runtime(LLAISYS_DEVICE_CPU, nullptr); }
    FailingMemory(const FailingMemory &) = delete;
    FailingMemory &operator=(const FailingMemory &) = delete;

    void fail_at(int n) { left_ = n; }
    void work() { left_ = -1; }

private:
    static void count() { ensure(left_ < 0 || left_-- > 0, "the fake allocation failed"); }
    inline static int left_ = -1;
    device::Runtime table_;
};

// During its lifetime, a CPU event completes when a later one is recorded or after complete_all(),
// like on a device with a queue. After fail() every query throws.
class LateEvents {
public:
    LateEvents() {
        recorded_ = 0;
        is_open_ = false;
        is_broken_ = false;
        table_ = device::cpu_runtime();
        table_.create_event = [](int) -> void * { return new std::atomic<int64_t>(0); };
        table_.destroy_event = [](void *event) { delete number_of(event); };
        table_.record_event = [](void *event, void *) { *number_of(event) = ++recorded_; };
        table_.query_event = [](void *event) {
            ensure(!is_broken_, "the fake device is broken");
            return is_open_ || *number_of(event) < recorded_;
        };
        device::use_runtime(LLAISYS_DEVICE_CPU, &table_);
    }
    ~LateEvents() { device::use_runtime(LLAISYS_DEVICE_CPU, nullptr); }
    LateEvents(const LateEvents &) = delete;
    LateEvents &operator=(const LateEvents &) = delete;

    void complete_all() { is_open_ = true; }
    void fail() { is_broken_ = true; }

private:
    static std::atomic<int64_t> *number_of(void *event) {
        return static_cast<std::atomic<int64_t> *>(event);
    }
    inline static std::atomic<int64_t> recorded_{0};
    inline static std::atomic<bool> is_open_{false};
    inline static std::atomic<bool> is_broken_{false};
    device::Runtime table_;
};

} // namespace fake
