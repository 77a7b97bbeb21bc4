// Byte vectors for quantised weights, on top of the vector abstraction of simd.hpp: kLanes lanes of
// four bytes. A bytes_<isa>.hpp, included after its simd_<isa>.hpp, defines:
//   vb; load_bytes, store_bytes (unaligned); low_nibbles, high_nibbles
//   bytes_of: the bits of f32 lanes (where attention uses byte keys)
//   with_bits<shift, mask>(a, plane): a with the bits of `mask` from plane << shift (>> for a
//   negative shift); those bits of a must be zero
//   sub_bytes<n>(a): subtracts n from every byte
//   kUnsignedWeights: dot takes weights of 0..255 instead of -128..127; kByteOffset is then 128, else 0
//   ByteGroup, load_group: 32 bytes of x; dot<c, is_signed>(acc, w, x): acc + the products of each
//   lane of w with quad c of x; weights below 128 may use is_signed = false
//   vw: sums of products in 16 bits, where there is no dot product of bytes (elsewhere vi, unused):
//   dot<c, false>(vw, w, x); add_words(sum, vw): both added in 32 bits
//   start_sum(n), sum_of(sum): a sum of products that starts with n, and its value; |sum| < 2^22
//   kSumStart: representation of a zero sum, either 0 or the bits of the float kSumBase; in the latter
//   case float_of_bits(sum) is kSumBase + the value
//   broadcast_int(p), start_sum_less<n>(total): a sum that starts with -n * total
//   hold(sum): a compiler barrier that keeps the order of instructions before and after it
//   load_u8, load_i8: kLanes bytes as f32; sum_of_16: sum of bytes; store_ints (attention on bytes)
//   kPackedRows: up to this many rows, unpacking weights in every tile is cheaper than storing them
//   kRowsFirst: the registers hold the weights of all vectors of a tile beside its sums
//   quant_height(m): height of the first register tile for m rows, at most kQuantRows;
//   quant_vectors(rows, is_split): its width
#pragma once

#include "device/cpu/simd.hpp"

namespace llaisys::LLAISYS_CPU_NS {

inline vf float_of_bits(vi sum) { return vf(sum); }
template <typename V> void hold(V &) {} // an instruction set may overload it

} // namespace llaisys::LLAISYS_CPU_NS
