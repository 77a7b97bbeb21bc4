#include "ops/moe/op.hpp"

#include "ops/cpu/rows.hpp"
#include "ops/glu/op.hpp"

#include <cmath>
#include <limits>

namespace llaisys::ops {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Scores of one row; NaN becomes -inf.
void scores_of(const float *logits, int64_t n, bool is_sigmoid, float *scores) {
    if (is_sigmoid) {
        for (int64_t e = 0; e < n; ++e) {
            scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
        }
    } else {
        float max = kLowest;
        for (int64_t e = 0; e < n; ++e) {
            max = std::max(max, logits[e] == logits[e] ? logits[e] : kLowest);
        }
        float sum = 0;
        for (int64_t e = 0; e < n; ++e) {
            scores[e] = max == kLowest ? 0.0f : std::exp(logits[e] - max);
            sum += scores[e] == scores[e] ? scores[e] : 0.0f;
        }
        for (int64_t e = 0; e < n; ++e) {
            scores[e] = sum > 0 ? scores[e] / sum : 0.0f;
        }
    }
    for (int64_t e = 0; e < n; ++e) {
        scores[e] = scores[e] == scores[e] ? scores[e] : kLowest;
    }
}

// Index of the largest value that is not taken, the lowest on a tie. At least one is not taken.
int64_t best_of(const float *values, const uint8_t *taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i) {
        if (taken[i] == 0 && (best < 0 || values[i] > values[best])) {
            best = i;
        }
    }
    return best;
}

// Marks the experts outside the selected groups as taken.
void exclude_groups(const float *choice, int64_t n_experts, const MoeRouting &routing,
                    bool has_bias, uint8_t *taken) {
    const int64_t groups = routing.n_groups;
    const int64_t width = n_experts / groups;
    static thread_local std::vector<float> group_scores;
    static thread_local std::vector<uint8_t> is_kept;
    group_scores.assign(size_t(groups), kLowest);
    is_kept.assign(size_t(groups), 0);
    for (int64_t g = 0; g < groups; ++g) {
        float first = kLowest;
        float second = kLowest;
        for (int64_t e = g * width; e < (g + 1) * width; ++e) {
            if (choice[e] > first) {
                second = first;
                first = choice[e];
            } else if (choice[e] > second) {
                second = choice[e];
            }
        }
        group_scores[size_t(g)] = has_bias && width > 1 ? first + second : first;
    }
    for (int i = 0; i < routing.n_top_groups; ++i) {
        is_kept[size_t(best_of(group_scores.data(), is_kept.data(), groups))] = 1;
    }
    for (int64_t e = 0; e < n_experts; ++e) {
        taken[e] = is_kept[size_t(e / width)] == 0 ? 1 : 0;
    }
}

void route_row(const float *logits, const float *bias, int64_t n_experts, int64_t k,
               const MoeRouting &routing, int32_t *experts, float *weights) {
    static thread_local std::vector<float> scores, choice;
    static thread_local std::vector<uint8_t> taken;
    scores.resize(size_t(n_experts));
    choice.resize(size_t(n_experts));
    taken.assign(size_t(n_experts), 0);
    scores_of(logits, n_experts, routing.is_sigmoid, scores.data());
    for (int64_t e = 0; e < n_experts; ++e) {
        choice[size_t(e)] = scores[size_t(e)] + (bias != nullptr ? bias[e] : 0.0f);
    }
    if (routing.n_top_groups < routing.n_groups) {
        exclude_groups(choice.data(), n_experts, routing, bias != nullptr, taken.data());
    }
    float sum = 0;
    for (int64_t j = 0; j < k; ++j) {
        const int64_t best = best_of(choice.data(), taken.data(), n_experts);
        taken[size_t(best)] = 1;
        experts[j] = int32_t(best);
        weights[j] = scores[size_t(best)] > kLowest ? scores[size_t(best)] : 0.0f;
        sum += weights[j];
    }
    const float factor = routing.is_renormalised ? routing.scale / (sum + 1e-20f) : routing.scale;
    for (int64_t j = 0; j < k; ++j) {
        weights[j] *= factor;
    }
}

// The pairs (token, choice), sorted by expert; of the calling thread.
struct Plan {
    std::vector<int32_t> tokens;    // [pairs]: token of a sorted pair
    std::vector<int32_t> positions; // [pairs]: sorted position of pair t * k + j
    std::vector<int32_t> offsets;   // [E + 1]: first sorted pair of an expert
    std::vector<LinearGroup> groups;
    std::vector<LinearPart> parts; // [groups, 2]
    std::vector<Tensor> biases;    // [groups, 2]
};

void sort_pairs(const Tensor &experts, int64_t n_experts, Plan *plan) {
    const int64_t k = experts.size(1);
    const int64_t pairs = experts.elements();
    const int32_t *ids = experts.as<int32_t>();
    plan->tokens.resize(size_t(pairs));
    plan->positions.resize(size_t(pairs));
    plan->offsets.assign(size_t(n_experts) + 1, 0);
    for (int64_t p = 0; p < pairs; ++p) {
        ++plan->offsets[size_t(ids[p]) + 1];
    }
    for (int64_t e = 0; e < n_experts; ++e) {
        plan->offsets[size_t(e) + 1] += plan->offsets[size_t(e)];
    }
    for (int64_t p = 0; p < pairs; ++p) {
        const int32_t position = plan->offsets[size_t(ids[p])]++;
        plan->positions[size_t(p)] = position;
        plan->tokens[size_t(position)] = int32_t(p / k);
    }
    for (int64_t e = n_experts; e > 0; --e) { // undo the increments
        plan->offsets[size_t(e)] = plan->offsets[size_t(e) - 1];
    }
    plan->offsets[0] = 0;
}

struct ExpertPart {
    const ExpertWeights *weights;
    const Tensor *bias;
    const Tensor *out;
};

// The grouped products of every expert that has tokens.
void run_groups(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                const ExpertPart *parts, int n_parts, Plan *plan) {
    const int64_t n_experts = parts[0].weights->count;
    plan->groups.clear();
    plan->parts.clear();
    plan->biases.clear();
    plan->parts.reserve(size_t(n_experts * n_parts)); // stable addresses
    plan->biases.reserve(size_t(n_experts * n_parts));
    for (int64_t e = 0; e < n_experts; ++e) {
        const int64_t first = plan->offsets[size_t(e)];
        const int64_t count = plan->offsets[size_t(e) + 1] - first;
        if (count == 0) {
            continue;
        }
        const size_t at = plan->parts.size();
        for (int p = 0; p < n_parts; ++p) {
            const Tensor *bias = nullptr;
            if (parts[p].bias != nullptr) {
                plan->biases.push_back(
                    parts[p].bias->slice(0, e, e + 1).view({parts[p].weights->out_features}));
                bias = &plan->biases.back();
            }
            plan->parts.push_back({&parts[p].weights->each[size_t(e)], bias, parts[p].out});
        }
        plan->groups.push_back({first, count, &plan->parts[at]});
    }
    linear_groups(stream, in, rows, plan->groups.data(), int64_t(plan->groups.size()), n_parts);
}

// The activation of gpt-oss; f32 rows.
void clamped_swiglu(const device::Stream &stream, const Tensor &gate, const Tensor &up, float limit,
                    float alpha) {
    const int64_t d = gate.size(1);
    cpu::for_rows(stream, gate.size(0), 16 * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first * d; i < last * d; ++i) {
            const float g = std::min(gate.as<float>()[i], limit);
            const float u = std::clamp(up.as<float>()[i], -limit, limit);
            gate.as<float>()[i] = (u + 1.0f) * g / (1.0f + std::exp(-alpha * g));
        }
    });
}

} // namespace

void moe_route_cpu(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                   const Tensor &logits, const Tensor *bias, const MoeRouting &routing) {
    const int64_t n_experts = logits.size(1);
    const int64_t k = experts.size(1);
    cpu::for_rows(stream, logits.size(0), (16 + k) * n_experts, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            route_row(logits.as<float>() + t * n_experts,
                      bias != nullptr ? bias->as<float>() : nullptr, n_experts, k, routing,
                      experts.as<int32_t>() + t * k, weights.as<float>() + t * k);
        }
    });
}

void moe_mlp_cpu(const device::Stream &stream, const Tensor &out, bool adds, const Tensor &in,
                 const Tensor &experts, const Tensor &weights, const ExpertMlp &mlp,
                 const MoeBuffers &buffers) {
    static thread_local Plan plan;
    static thread_local cpu::Scratch scratch;
    const int64_t n = in.size(0);
    const int64_t k = experts.size(1);
    const int64_t hidden = in.size(1);
    sort_pairs(experts, mlp.gate->count, &plan);
    const ExpertPart inputs[] = {{mlp.gate, mlp.gate_bias, &buffers.gate},
                                 {mlp.up, mlp.up_bias, &buffers.up}};
    run_groups(stream, in, plan.tokens.data(), inputs, 2, &plan);
    if (mlp.limit > 0) {
        require(buffers.gate.dtype() == LLAISYS_DTYPE_F32, "moe_mlp: activations must be f32");
        clamped_swiglu(stream, buffers.gate, buffers.up, mlp.limit, mlp.alpha);
    } else {
        swiglu(stream, buffers.gate, buffers.gate, buffers.up);
    }
    const ExpertPart output{mlp.down, mlp.down_bias, &buffers.out};
    run_groups(stream, buffers.gate, nullptr, &output, 1, &plan);
    const cpu::Kernels &kernels = cpu::kernels();
    const std::vector<int32_t> &positions = plan.positions; // of the calling thread
    float *wide = scratch.floats(2 * n * hidden);
    cpu::for_rows(stream, n, 2 * k * hidden, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            float *sum = wide + 2 * t * hidden;
            float *buffer = sum + hidden;
            std::fill(sum, sum + hidden, 0.0f);
            for (int64_t j = 0; j < k; ++j) {
                const float weight = weights.as<float>()[t * k + j];
                const float *row =
                    cpu::read(kernels, cpu::row_of(buffers.out, positions[size_t(t * k + j)]),
                              buffer, hidden);
                for (int64_t i = 0; i < hidden; ++i) {
                    sum[i] += weight * row[i];
                }
            }
            const cpu::Values to = cpu::row_of(out, t);
            if (adds) {
                for (int64_t i = 0; i < hidden; ++i) {
                    sum[i] += to.floats()[i];
                }
            }
            cpu::finish(kernels, to, sum, hidden);
        }
    });
}

void sigmoid_scale_cpu(const device::Stream &stream, const Tensor &rows, const Tensor &logits) {
    const int64_t d = rows.size(1);
    cpu::for_rows(stream, rows.size(0), d, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            const float factor = 1.0f / (1.0f + std::exp(-logits.as<float>()[t]));
            visit_real(rows.dtype(), [&](auto type) {
                using T = decltype(type);
                T *row = rows.as<T>() + t * rows.stride(0);
                for (int64_t i = 0; i < d; ++i) {
                    row[i] = from_f32<T>(to_f32(row[i]) * factor);
                }
            });
        }
    });
}

} // namespace llaisys::ops
