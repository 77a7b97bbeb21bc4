// Vectors of bytes for quantised weights, on top of the vector abstraction of simd.hpp: kLanes lanes
// of four bytes. A bytes_<isa>.hpp, included after its simd_<isa>.hpp, gives:
//   vb; load_bytes, store_bytes (unaligned); low_nibbles, high_nibbles
//   bytes_of, where attention takes keys as bytes: the bits of f32 lanes
//   with_bits<shift, mask>(a, plane): a with the bits of `mask` taken from plane << shift (>> where
//   shift is negative); those bits of a are zero
//   sub_bytes<n>(a): every byte less n
//   kUnsignedWeights: dot wants weights of 0..255, not -128..127; kByteOffset is then 128, else 0
//   ByteGroup, load_group: 32 bytes of x; dot<c, is_signed>(acc, w, x): acc + the products of each
//   lane of w with quad c of x; weights below 128 may say is_signed = false
//   start_sum(n), sum_of(sum): a sum of products that begins with n, and its value; |sum| < 2^22
//   kSumStart: how a sum of zero is kept, either 0 or the bits of the float kSumBase, in which case
//   float_of_bits(sum) is kSumBase + its value
//   broadcast_int(p), start_sum_less<n>(total): a sum that begins with -n * total
//   hold(sum): the compiler keeps the order of what comes before and after
//   load_u8, load_i8: kLanes bytes as f32; sum_of_16: of bytes; store_ints, where attention is taken as
//   bytes
//   kPackedRows: up to so many rows unpacking weights in every tile costs less than storing them
//   kRowsFirst: the registers hold the weights of all vectors of a tile beside its sums
//   quant_height(m): of the first of the register tiles that m rows are cut into, kQuantRows at most;
//   quant_vectors(rows, is_split): its width
#pragma once
