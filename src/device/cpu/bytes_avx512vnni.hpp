// Vectors of bytes on AVX-512 with VNNI. See bytes.hpp for the names.
#pragma once

#include "device/cpu/bytes_512.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kUnsignedWeights = true;
constexpr int kByteOffset = 128;

template <int c, bool is_signed> vi dot(vi acc, vb w, const ByteGroup &x) {
    return _mm512_dpbusd_epi32(acc, w, broadcast_quad<c>(x));
}
using vw = vi;

} // namespace llaisys::LLAISYS_CPU_NS
