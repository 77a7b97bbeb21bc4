// Sampling operators on the GPU against the CPU, bit for bit: masks, biases and penalties, sums
// and picks, sampler processors, ranks; and the copies at the start and end of a step, by kernels and
// by the copy engine.
//
//   check_sample_rows [check|small]
#include "../../cpp/sample_rows_reference.hpp"
#include "common.cuh"

#include "ops/sample_rows/op.hpp"
#include "ops/step_copies/op.hpp"
#include "ops/topk/op.hpp"

#include <cstring>

using namespace check;
using namespace llaisys;

namespace {

// The same values on either device.
class Place {
public:
    explicit Place(DeviceType type) : stream(type, 0, 1) {}
    template <typename T>
    Tensor put(const std::vector<T> &values, const Shape &shape, DType dtype) const {
        Tensor tensor = Tensor::create(shape, dtype, stream.type(), 0);
        tensor.load(stream, values.data(), size_t(tensor.bytes()));
        stream.synchronize();
        return tensor;
    }
    Tensor make(const Shape &shape, DType dtype) const {
        return Tensor::create(shape, dtype, stream.type(), 0);
    }
    std::vector<std::byte> bytes_of(const Tensor &tensor) const {
        std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
        tensor.store(stream, bytes.data(), bytes.size());
        stream.synchronize();
        return bytes;
    }
    device::Stream stream;
};

constexpr DType kI32 = LLAISYS_DTYPE_I32, kI64 = LLAISYS_DTYPE_I64, kF32 = LLAISYS_DTYPE_F32;

// Random rows and their sampling parameters.
struct Case {
    int64_t vocabulary, n;
    std::vector<float> logits;
    std::vector<int32_t> rows, mask_rows, masks, bias_offsets{0}, bias_ids;
    std::vector<float> bias_values, penalties, temperatures, processor_values;
    std::vector<int32_t> history_offsets{0}, history_tokens, history_sampled, pending_rows;
    std::vector<int64_t> sampled, uniforms;
    std::vector<int32_t> kinds, processor_offsets{0}, processors;

    Case(int64_t vocabulary_, int64_t n_, unsigned seed) : vocabulary(vocabulary_), n(n_) {
        std::mt19937 random(seed);
        const auto below = [&](int64_t limit) { return int32_t(random() % uint64_t(limit)); };
        logits = normal<float>(size_t(n * vocabulary), seed, seed % 2 == 0 ? 3.0f : 0.7f);
        for (size_t i = 0; i < logits.size(); i += 7) {
            logits[i] = i % 2 == 0 ? std::round(logits[i]) : (i % 5 == 0 ? NAN : -INFINITY);
        }
        masks.assign(size_t((vocabulary + 31) / 32), int32_t(0xDDDDDDDDu));
        for (int64_t r = 0; r < n; ++r) {
            rows.push_back(below(n));
            logits[size_t(rows.back() * vocabulary)] = 2;
            mask_rows.push_back(r % 3 == 0 ? 0 : -1);
            for (int32_t id = below(3); r % 2 == 0 && id < vocabulary && id < 9; id += below(3)) {
                bias_ids.push_back(id); // ascending, with duplicates
                bias_values.push_back(float(below(7)) * 0.3f - 1);
                id += int32_t(bias_ids.size() % 2);
            }
            bias_offsets.push_back(int32_t(bias_ids.size()));
            for (int64_t id = below(5); r % 4 < 2 && id < vocabulary && id < 3000;
                 id += 1 + below(9)) {
                history_tokens.push_back(int32_t(id));
                history_sampled.push_back(below(3));
            }
            history_offsets.push_back(int32_t(history_tokens.size()));
            penalties.insert(penalties.end(), {1.3f, 0.5f, -0.25f});
            sampled.push_back(below(vocabulary));
            pending_rows.push_back(r % 4 < 2 ? below(n) : -1);
            temperatures.push_back(r % 3 == 0 ? 1.0f : 0.3f * float(1 + below(6)));
            const double u = double(random()) / 4294967296.0;
            uniforms.emplace_back();
            std::memcpy(&uniforms.back(), &u, sizeof u);
            const int kind = below(8);
            kinds.push_back(kind == 0 ? 0 : kind == 1 ? 1 : 2);
            for (int processor = 0; kinds.back() == 2 && processor < 1 + below(4); ++processor) {
                const auto what = ops::LogitsProcessorKind(below(processor == 0 ? 3 : 4));
                processors.push_back(int32_t(what));
                processor_values.push_back(
                    what == ops::LogitsProcessorKind::top_k
                        ? float(1 + below(std::min<int64_t>(vocabulary, 256)))
                    : what == ops::LogitsProcessorKind::top_p ? 0.05f + 0.01f * float(below(90))
                    : what == ops::LogitsProcessorKind::min_p ? 0.001f * float(1 + below(300))
                                                              : 0.5f + 0.1f * float(below(9)));
            }
            processor_offsets.push_back(int32_t(processors.size()));
        }
    }
};

template <typename T> const std::vector<T> &or_one(const std::vector<T> &values) {
    static const std::vector<T> one(1);
    return values.empty() ? one : values;
}

// All results of the operators, in order.
std::vector<std::vector<std::byte>> run(const Place &place, const Case &c) {
    const auto vector = [&](const auto &values, DType dtype) {
        const auto &some = or_one(values);
        return place.put(some, {int64_t(some.size())}, dtype);
    };
    const Tensor logits = place.put(c.logits, {c.n, c.vocabulary}, kF32);
    ops::RowAdjustments a;
    a.rows = vector(c.rows, kI32);
    a.mask_rows = vector(c.mask_rows, kI32);
    a.masks = vector(c.masks, kI32);
    a.bias_offsets = vector(c.bias_offsets, kI32);
    a.bias_ids = vector(c.bias_ids, kI32);
    a.bias_values = vector(c.bias_values, kF32);
    a.history_offsets = vector(c.history_offsets, kI32);
    a.history_tokens = vector(c.history_tokens, kI32);
    a.history_sampled = vector(c.history_sampled, kI32);
    a.penalties = vector(c.penalties, kF32);
    a.pending_rows = vector(c.pending_rows, kI32);
    a.sampled = vector(c.sampled, kI64);
    ops::RowSampling d;
    d.kinds = vector(c.kinds, kI32);
    d.temperatures = vector(c.temperatures, kF32);
    d.uniforms = vector(c.uniforms, kI64);
    d.processor_offsets = vector(c.processor_offsets, kI32);
    d.processors = vector(c.processors, kI32);
    d.processor_values = vector(c.processor_values, kF32);
    d.may_be_wide = true;

    const int64_t k = std::min(c.vocabulary, ops::kMaxTopK);
    const int64_t m = std::min<int64_t>(k, 5);
    const Tensor adjusted = place.make({c.n, c.vocabulary}, kF32);
    const Tensor best_ids = place.make({c.n, k}, kI32), best = place.make({c.n, k}, kF32);
    const Tensor sums = place.make({c.n}, kI64), picks = place.make({c.n}, kI32);
    const Tensor ids = place.make({c.n}, kI64), is_open = place.make({c.n}, kI32);
    const ops::RowRanks ranks{place.make({c.n}, kF32), place.make({c.n}, kI32),
                              place.make({c.n, m}, kI32), place.make({c.n, m}, kF32)};
    ops::adjust_rows(place.stream, adjusted, logits, a);
    ops::topk(place.stream, best_ids, best, adjusted);
    ops::weigh_rows(place.stream, sums, picks, adjusted, best, Tensor(), d.temperatures,
                    d.uniforms);
    ops::sample_rows(place.stream, ids, is_open, adjusted, best_ids, best, sums, picks, d);
    std::vector<int32_t> own(static_cast<size_t>(c.n));
    for (size_t i = 0; i < own.size(); ++i) {
        own[i] = int32_t(i);
    }
    ops::rank_rows(place.stream, ranks, ids, adjusted, vector(own, kI32), best_ids, best);
    std::vector<std::vector<std::byte>> found;
    for (const Tensor &tensor : {best_ids, sums, picks, ids, is_open, ranks.ranks, ranks.top_ids}) {
        found.push_back(place.bytes_of(tensor));
    }
    return found;
}

void check_case(const Place &cpu, const Place &gpu, int64_t vocabulary, int64_t n, unsigned seed) {
    static const char *const kNames[] = {"best", "sums", "picks", "ids", "open", "ranks", "tops"};
    const Case c(vocabulary, n, seed);
    const auto expected = run(cpu, c), got = run(gpu, c);
    for (size_t i = 0; i < expected.size(); ++i) {
        report(got[i] == expected[i],
               line("vocabulary %lld, seed %u: %s", (long long)vocabulary, seed, kNames[i]));
    }
}

// Copies bytes to the GPU with n sampled tokens inserted, and back.
void check_copies(const Place &gpu, int64_t bytes, int64_t n) {
    const device::Runtime &runtime = gpu.stream.runtime();
    auto *host = static_cast<std::byte *>(runtime.allocate_host(size_t(bytes)));
    auto *back = static_cast<std::byte *>(runtime.allocate_host(size_t(bytes)));
    const auto memory = std::make_shared<Storage>(LLAISYS_DEVICE_NVIDIA, 0, bytes);
    const int64_t tokens_at = 64;
    const int64_t sources_at = tokens_at + (n * 8 + 63) / 64 * 64;
    std::vector<int64_t> sampled(size_t(n + 3));
    std::vector<std::byte> wanted(static_cast<size_t>(bytes));
    for (int64_t i = 0; i < bytes; ++i) {
        host[i] = std::byte(i * 7 + i / 251);
    }
    for (size_t i = 0; i < sampled.size(); ++i) {
        sampled[i] = int64_t(i) * 10007 + (int64_t(1) << 33);
    }
    auto *sources = reinterpret_cast<int32_t *>(host + sources_at);
    for (int64_t i = 0; i < n; ++i) {
        sources[i] = i % 3 == 1 ? -1 : int32_t((i * 5) % (n + 3));
    }
    std::memcpy(wanted.data(), host, wanted.size());
    for (int64_t i = 0; i < n; ++i) {
        if (sources[i] >= 0) {
            std::memcpy(wanted.data() + tokens_at + i * 8, &sampled[size_t(sources[i])], 8);
        }
    }
    const ops::SampledTokens tokens{Tensor::on(memory, tokens_at, {n}, kI64),
                                    Tensor::on(memory, sources_at, {n}, kI32),
                                    gpu.put(sampled, {n + 3}, kI64)};
    ops::bring_in(gpu.stream, memory->data(), host, bytes, n > 0 ? &tokens : nullptr);
    ops::bring_out(gpu.stream, back, memory->data(), bytes);
    gpu.stream.synchronize();
    report(std::memcmp(back, wanted.data(), wanted.size()) == 0,
           text("copies of ", bytes, " bytes with ", n, " tokens"));
    runtime.release_host(host);
    runtime.release_host(back);
}

} // namespace

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    try {
        // The GPU first: compute-sanitizer attaches at the first CUDA call, which fails after the
        // CPU kernels have requested AMX (its signal stack is too small then).
        const Place gpu(LLAISYS_DEVICE_NVIDIA), cpu(LLAISYS_DEVICE_CPU);
        if (what == "small") { // for compute-sanitizer
            check_case(cpu, gpu, 700, 6, 1);
            check_case(cpu, gpu, 5, 3, 2);
            check_copies(gpu, 640, 5);
        } else if (what.empty() || what == "check") {
            for (const int64_t vocabulary : {1, 5, 200, 256, 257, 1000, 40003, 151936}) {
                for (unsigned seed = 1; seed < (vocabulary < 2000    ? 30u
                                                : vocabulary < 50000 ? 9u
                                                                     : 3u);
                     ++seed) {
                    check_case(cpu, gpu, vocabulary, 16, seed);
                }
            }
            for (const int64_t n : {0, 1, 2, 3, 64, 257}) {
                for (const int64_t bytes : {4096, 131072, 131088, 400000}) {
                    check_copies(gpu, bytes, n);
                }
            }
            std::printf("sample_rows: %d failed\n", failures());
        }
    } catch (const std::exception &error) {
        report(false, error.what());
    }
    return failures() > 0 ? 1 : 0;
}
