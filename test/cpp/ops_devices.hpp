// Runs an operator on every device of this build and machine: the CPU with the kernels of each
// instruction set, and a GPU. Inputs and results are host tensors.
#pragma once

#include "ops_reference.hpp"

namespace ops_test {

// body(stream) for each.
template <typename Body> void for_each_device(const Body &body) {
    for_each_isa([&] { body(static_cast<const Stream &>(two_threads())); });
    if (device::has_runtime(LLAISYS_DEVICE_NVIDIA) &&
        device::runtime_of(LLAISYS_DEVICE_NVIDIA).device_count() > 0) {
        static const Stream gpu(LLAISYS_DEVICE_NVIDIA, 0, 1);
        body(gpu);
    }
}

inline bool is_cpu(const Stream &stream) { return stream.type() == LLAISYS_DEVICE_CPU; }

// The values on the device of the stream. A strided tensor keeps a gap between its rows.
inline Tensor on(const Stream &stream, const Tensor &host) {
    if (is_cpu(stream) || !host.defined()) {
        return host;
    }
    const Tensor dense = ops::contiguous(one_thread(), host);
    Tensor copy = Tensor::create(host.shape(), host.dtype(), stream.type(), stream.device_id());
    copy.load(stream, dense.data(), size_t(dense.bytes()));
    if (!host.is_contiguous()) {
        Shape padded = host.shape();
        const int last = padded.ndim() - 1;
        padded[last] += 5;
        const Tensor strided =
            Tensor::create(padded, host.dtype(), stream.type(), stream.device_id())
                .slice(last, 0, host.shape()[last]);
        ops::rearrange(stream, strided, copy);
        stream.synchronize();
        return strided;
    }
    stream.synchronize();
    return copy;
}

inline Tensor to_host(const Stream &stream, const Tensor &tensor) {
    if (is_cpu(stream)) {
        return tensor;
    }
    const Tensor dense = ops::contiguous(stream, tensor);
    const Tensor host = Tensor::create(tensor.shape(), tensor.dtype());
    dense.store(stream, host.data(), size_t(host.bytes()));
    stream.synchronize();
    return host;
}

// Within `roundings` of the dtype, relative to the largest expected value, or to `largest` if that is
// above it. expected: in the order of the elements of `got`, [rows, columns].
inline void check_all_close(const char *what, const Tensor &got,
                            const std::vector<double> &expected, double roundings,
                            double largest = 1e-3) {
    for (const double x : expected) {
        largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
    }
    const double tolerance = roundings * unit_of(got.dtype()) * largest;
    const int64_t columns = got.size(1);
    for (int64_t i = 0; i < got.elements(); ++i) {
        check_close(what, get2(got, i / columns, i % columns), expected[size_t(i)], tolerance);
    }
}

} // namespace ops_test
