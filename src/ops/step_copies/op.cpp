#include "ops/step_copies/op.hpp"

#include "ops/checks.hpp"
#include "ops/step_copies/cuda.hpp"

#include <cstring>

namespace llaisys::ops {

namespace {

constexpr int64_t kUnit = 16; // bytes

bool lies_on_units(const void *memory) { return reinterpret_cast<uintptr_t>(memory) % kUnit == 0; }

void check_range(const Checks &check, const std::byte *to, const std::byte *from, int64_t bytes) {
    if (bytes < 0 || bytes % kUnit != 0 || !lies_on_units(to) || !lies_on_units(from)) {
        fail(LLAISYS_ERROR_INVALID, check.op, ": bytes: got ", bytes, " from ",
             static_cast<const void *>(from), " to ", static_cast<const void *>(to),
             ", expected multiples of ", kUnit);
    }
}

void check_drawn(const Checks &check, const DrawnTokens &drawn, const std::byte *to,
                 int64_t bytes) {
    const int64_t n = drawn.tokens.size(0);
    check.vector("tokens", drawn.tokens, LLAISYS_DTYPE_I64, n);
    check.vector("sources", drawn.sources, LLAISYS_DTYPE_I32, n);
    check.vector("drawn", drawn.drawn, LLAISYS_DTYPE_I64, drawn.drawn.size(0));
    for (const Tensor *part : {&drawn.tokens, &drawn.sources}) {
        if (part->data() < to || part->data() + part->bytes() > to + bytes ||
            !lies_on_units(part->data())) {
            fail(LLAISYS_ERROR_INVALID, check.op, ": ",
                 part == &drawn.tokens ? "tokens" : "sources",
                 ": got memory elsewhere, expected a part of what is brought in, on ", kUnit,
                 " bytes");
        }
    }
}

void copy_cpu(std::byte *to, const std::byte *from, int64_t bytes) {
    if (to != from && bytes > 0) {
        std::memcpy(to, from, size_t(bytes));
    }
}

void fill_drawn_cpu(const DrawnTokens &drawn) {
    for (int64_t i = 0; i < drawn.tokens.size(0); ++i) {
        const int32_t source = drawn.sources.as<int32_t>()[i];
        if (source >= 0) {
            drawn.tokens.as<int64_t>()[i] = drawn.drawn.as<int64_t>()[source];
        }
    }
}

} // namespace

void bring_in(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes,
              const DrawnTokens *drawn) {
    const Checks check{"bring_in", stream};
    check_range(check, to, from, bytes);
    if (drawn != nullptr) {
        check_drawn(check, *drawn, to, bytes);
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        copy_cpu(to, from, bytes);
        return drawn != nullptr ? fill_drawn_cpu(*drawn) : void();
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return bring_in_cuda(stream, to, from, bytes, drawn);
#endif
    default:
        check.no_kernel();
    }
}

void bring_out(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes) {
    const Checks check{"bring_out", stream};
    check_range(check, to, from, bytes);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return copy_cpu(to, from, bytes);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return bring_out_cuda(stream, to, from, bytes);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
