// A grouped linear: the rows of a head are a group.
#include "ops/head_linear/op.hpp"

#include <vector>

namespace llaisys::ops {

void head_linear_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
                     const ExpertWeights &weights) {
    static thread_local std::vector<Tensor> outs; // of each head, [n, out_features]
    static thread_local std::vector<LinearPart> parts;
    static thread_local std::vector<LinearGroup> groups;
    static thread_local std::vector<int32_t> rows; // [heads, n]: row of `in` as [n * heads, k]
    const int64_t n = in.size(0);
    const int64_t heads = weights.count;
    outs.clear();
    parts.clear();
    groups.clear();
    rows.clear();
    outs.reserve(size_t(heads)); // stable addresses
    parts.reserve(size_t(heads));
    for (int64_t h = 0; h < heads; ++h) {
        outs.push_back(out.slice(1, h, h + 1).view({n, weights.out_features}));
        parts.push_back({&weights.each[size_t(h)], nullptr, &outs.back()});
        groups.push_back({h * n, n, &parts.back(), h * n});
        for (int64_t t = 0; t < n; ++t) {
            rows.push_back(int32_t(t * heads + h));
        }
    }
    linear_groups(stream, in.view({n * heads, weights.in_features}), rows.data(), groups.data(),
                  heads, 1);
    outs.clear(); // releases the storage
}

} // namespace llaisys::ops
