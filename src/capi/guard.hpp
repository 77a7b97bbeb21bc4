// C API boundary: turns exceptions into status codes and a per-thread error text.
#pragma once

#include "base/check.hpp"
#include "device/runtime.hpp"
#include "llaisys.h"
#include "ops/linear/op.hpp"
#include "tensor/handle.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>

struct LlaisysStream {
    LlaisysStream(llaisys::DeviceType device, int device_id, int n_threads)
        : stream(device, device_id, n_threads) {}
    llaisys::device::Stream stream;
};

struct LlaisysLinearWeight {
    llaisys::ops::LinearWeight weight;
};

namespace llaisys::capi {

// Stores the text for llaisysLastError of this thread.
void set_last_error(int32_t code, const char *text) noexcept;

// Runs body, which returns nothing or an int32_t code; an exception becomes its status code.
template <typename Body> int32_t guard(const Body &body) noexcept {
    try {
        if constexpr (std::is_void_v<decltype(body())>) {
            body();
            return LLAISYS_OK;
        } else {
            return body();
        }
    } catch (const Error &error) {
        set_last_error(error.status(), error.what());
        return error.status();
    } catch (const std::bad_alloc &) {
        set_last_error(LLAISYS_ERROR_MEMORY, "out of memory");
        return LLAISYS_ERROR_MEMORY;
    } catch (const std::exception &error) {
        set_last_error(LLAISYS_ERROR_INTERNAL, error.what());
        return LLAISYS_ERROR_INTERNAL;
    } catch (...) {
        set_last_error(LLAISYS_ERROR_INTERNAL, "unknown exception");
        return LLAISYS_ERROR_INTERNAL;
    }
}

// Throws naming the argument when it is NULL.
template <typename T> T *not_null(T *pointer, const char *name) {
    require(pointer != nullptr, name, " is NULL");
    return pointer;
}

// Throws unless a struct of the caller has the size that this library was built with.
template <typename T> T &sized(T *value, const char *name) {
    not_null(value, name);
    require(value->struct_size == sizeof *value, name, ".struct_size must be ", sizeof *value,
            ", got ", value->struct_size);
    return *value;
}

// Writes at most capacity bytes of a text, including the final 0.
inline void write_text(const std::string &from, char *to, size_t capacity) {
    if (capacity > 0) {
        const size_t n = std::min(capacity - 1, from.size());
        std::memcpy(to, from.data(), n);
        to[n] = '\0';
    }
}

// The tensor of a handle, an argument of `op`; throws when it has no values.
inline const Tensor &tensor_of(llaisysTensor_t handle, const char *name, const char *op = "") {
    const char *separator = *op != '\0' ? ": " : "";
    require(handle != nullptr, op, separator, name, " is NULL");
    require(handle->tensor.defined(), op, separator, name,
            ": a model owns the values of this tensor");
    return handle->tensor;
}

} // namespace llaisys::capi
