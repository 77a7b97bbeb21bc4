#include "ops/step_copies/op.hpp"

#include "ops/checks.hpp"

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

void check_sampled(const Checks &check, const SampledTokens &sampled, const std::byte *to,
                   int64_t bytes) {
    const int64_t n = sampled.tokens.size(0);
    check.vector("tokens", sampled.tokens, LLAISYS_DTYPE_I64, n);
    check.vector("sources", sampled.sources, LLAISYS_DTYPE_I32, n);
    check.vector("sampled", sampled.sampled, LLAISYS_DTYPE_I64, sampled.sampled.size(0));
    for (const Tensor *part : {&sampled.tokens, &sampled.sources}) {
        if (part->data() < to || part->data() + part->bytes() > to + bytes ||
            !lies_on_units(part->data())) {
            fail(LLAISYS_ERROR_INVALID, check.op, ": ",
                 part == &sampled.tokens ? "tokens" : "sources",
                 ": got memory elsewhere, expected a part of what is brought in, on ", kUnit,
                 " bytes");
        }
    }
}

void bring_out_cpu(const device::Stream & /*stream*/, std::byte *to, const std::byte *from,
                   int64_t bytes) {
    if (to != from && bytes > 0) {
        std::memcpy(to, from, size_t(bytes));
    }
}

void bring_in_cpu(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes,
                  const SampledTokens *sampled) {
    bring_out_cpu(stream, to, from, bytes);
    for (int64_t i = 0; sampled != nullptr && i < sampled->tokens.size(0); ++i) {
        const int32_t source = sampled->sources.as<int32_t>()[i];
        if (source >= 0) {
            sampled->tokens.as<int64_t>()[i] = sampled->sampled.as<int64_t>()[source];
        }
    }
}

} // namespace

void bring_in(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes,
              const SampledTokens *sampled) {
    const Checks check{"bring_in", stream};
    check_range(check, to, from, bytes);
    if (sampled != nullptr) {
        check_sampled(check, *sampled, to, bytes);
    }
    check.dispatch(LLAISYS_KERNELS(bring_in), to, from, bytes, sampled);
}

void bring_out(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes) {
    const Checks check{"bring_out", stream};
    check_range(check, to, from, bytes);
    check.dispatch(LLAISYS_KERNELS(bring_out), to, from, bytes);
}

} // namespace llaisys::ops
