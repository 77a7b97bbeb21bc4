// The object behind a llaisysTensor_t.
#pragma once

#include "tensor/tensor.hpp"

#include <atomic>

struct LlaisysTensor {
    explicit LlaisysTensor(llaisys::Tensor t) : tensor(std::move(t)), serial(next_serial()) {}

    // Without storage once a model has packed the values and released the original.
    llaisys::Tensor tensor;
    // The weight table that owned the handle last; expired: none, or destroyed. The table may have
    // removed the handle from its slots since.
    std::weak_ptr<const void> owner;
    // Unique per handle, even when the address of a destroyed handle is reused.
    const uint64_t serial;

private:
    static uint64_t next_serial() {
        static std::atomic<uint64_t> counter{0};
        return ++counter;
    }
};
