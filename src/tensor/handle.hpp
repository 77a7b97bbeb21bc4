// What a public tensor handle points to.
#pragma once

#include "tensor/tensor.hpp"

#include <atomic>

struct LlaisysTensor {
    explicit LlaisysTensor(llaisys::Tensor t) : tensor(std::move(t)), serial(next_serial()) {}

    // Without storage once a model has laid the values out anew and let the original go.
    llaisys::Tensor tensor;
    // The weight table that took the handle over last; empty: none, or it is gone. The handle may
    // have left its slots since.
    std::weak_ptr<const void> owner;
    // Tells two handles apart even when the second was born at the address of the first.
    const uint64_t serial;

private:
    static uint64_t next_serial() {
        static std::atomic<uint64_t> counter{0};
        return ++counter;
    }
};
