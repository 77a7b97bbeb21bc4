// Argument checks and error texts of collectives, shared by all backends.
#pragma once

#include "parallel/process_group.hpp"

namespace llaisys::parallel {

// One call of one rank, for checks and error texts.
struct CallSite {
    OpType type;
    const GroupOptions &options;
    int rank; // in the group

    int world() const { return int(options.ranks.size()); }

    // "AllReduce: group TP0, rank 1 of 2, cpu:0"
    std::string text() const;

    // Contiguous and on the group's device.
    void check_tensor(const char *name, const tensor_t &tensor) const;
    // Same dtype, and `large` holds one `small` per rank.
    void check_shards(const char *large_name, const tensor_t &large, const char *small_name,
                      const tensor_t &small) const;
    void check_rank(const char *name, int rank) const;
    void check_peer(const char *name, int rank) const; // check_rank, and not the caller
    void check_reduction(DType dtype, function::ReduceOpType op) const;
    // sum f32, as many terms of a real dtype.
    void check_addition(const tensor_t &sum, const tensor_t &terms) const;

private:
    // require() with the text of the call site.
    template <typename... Args> void check(bool condition, const Args &...args) const {
        if (!condition) {
            fail(LLAISYS_ERROR_INVALID, text(), ": ", args...);
        }
    }
};

} // namespace llaisys::parallel
