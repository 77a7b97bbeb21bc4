// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): a counter
// and a key in, four independent 32-bit words out. No state, so a sample depends on its key alone.
#pragma once

#include <array>
#include <cstdint>

namespace llaisys::runtime {

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                                      std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t(0xD2511F53u) * counter[0];
        const uint64_t product1 = uint64_t(0xCD9E8D57u) * counter[2];
        counter = {uint32_t(product1 >> 32) ^ counter[1] ^ key[0], uint32_t(product1),
                   uint32_t(product0 >> 32) ^ counter[3] ^ key[1], uint32_t(product0)};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return counter;
}

// Independent random streams for the same key.
enum class Purpose : uint32_t { token = 0, xtc = 1 };

// In [0, 1), a multiple of 2^-53.
inline double uniform(uint64_t seed, int32_t choice, int64_t position,
                      Purpose purpose = Purpose::token) {
    const uint64_t at = uint64_t(position);
    const std::array<uint32_t, 4> words =
        philox({uint32_t(at), uint32_t(at >> 32), uint32_t(choice), uint32_t(purpose)},
               {uint32_t(seed), uint32_t(seed >> 32)});
    return double(((uint64_t(words[0]) << 32) | words[1]) >> 11) * 0x1p-53;
}

} // namespace llaisys::runtime
