// Probes for tile products: four independent accumulators.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/tiles_amx.hpp"

#include "device/cpu/probes.hpp"

namespace llaisys::device::probes {

namespace {

using Tiles = cpu_amx::AmxTiles;

template <typename Round> float tile_rounds(int64_t rounds, const Round &round) {
    alignas(64) float values[16 * 16] = {};
    Tiles::configure({{16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}});
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
    Tiles::load<4>(values, 64);
    Tiles::load<5>(values, 64);
    Tiles::load<6>(values, 64);
    Tiles::load<7>(values, 64);
    for (int64_t i = 0; i < rounds; ++i) {
        round();
    }
    Tiles::store<0>(values, 64);
    Tiles::release();
    return values[0];
}

} // namespace

float tile_bf16_rounds(int64_t rounds, int64_t *operations) {
    *operations = 4 * 2 * 16 * 16 * 32;
    return tile_rounds(rounds, [] {
        Tiles::dot_bf16<0, 4, 6>();
        Tiles::dot_bf16<1, 4, 7>();
        Tiles::dot_bf16<2, 5, 6>();
        Tiles::dot_bf16<3, 5, 7>();
    });
}

float tile_i8_rounds(int64_t rounds, int64_t *operations) {
    *operations = 4 * 2 * 16 * 16 * 64;
    return tile_rounds(rounds, [] {
        Tiles::dot_bytes<0, 4, 6>();
        Tiles::dot_bytes<1, 4, 7>();
        Tiles::dot_bytes<2, 5, 6>();
        Tiles::dot_bytes<3, 5, 7>();
    });
}

} // namespace llaisys::device::probes
