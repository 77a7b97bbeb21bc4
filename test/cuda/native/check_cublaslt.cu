// Times of cuBLASLt for the GEMMs of a step with more than 16 rows, with weights that exceed L2:
// first heuristic result, best of the first 8, best of all; against the DRAM and tensor core
// bounds; and the best algorithm of the first ROWS applied to all others. Results are checked by
// test/cuda/test_cuda_ops.py.
//
//   check_cublaslt time [ROWS...]      default: 32 64 128 256 4000 16384
#include "common.cuh"

#include "device/cuda/cublaslt.hpp"

#include <cstdlib>
#include <map>
#include <memory>

using namespace check;
using namespace llaisys::device;

namespace {

constexpr int kFew = 8, kAllOfThem = 64; // heuristic results
constexpr size_t kWorkspace = size_t(64) << 20;
constexpr size_t kCold = size_t(256) << 20; // bytes of weights between two uses of the same copy

struct Shape {
    const char *name;
    int64_t n, k;
    bool adds; // accumulates into f32; otherwise writes bf16
    int64_t ldx;
};
struct Model {
    const char *name;
    std::vector<Shape> shapes;
};
const Model kModels[] = {{"1.5B",
                          {{"qkv", 2048, 1536, false, 1536},
                           {"o", 1536, 1536, true, 1536},
                           {"gate/up", 17920, 1536, false, 1536},
                           {"down", 1536, 8960, true, 17920}}},
                         {"7B",
                          {{"qkv", 4608, 3584, false, 3584},
                           {"o", 3584, 3584, true, 3584},
                           {"gate/up", 37888, 3584, false, 3584},
                           {"down", 3584, 18944, true, 37888}}}};

void ensure_status(int status, const char *call) {
    if (status != cublaslt::kSuccess) {
        throw std::runtime_error(line("%s: status %d", call, status));
    }
}

class CublasLtTimer {
public:
    explicit CublasLtTimer(CudaStream &stream)
        : stream_(stream), lt_(*cublaslt::open()), workspace_(kWorkspace) {
        ensure_status(lt_.Create(&handle_), "Create");
    }
    ~CublasLtTimer() { lt_.Destroy(handle_); }
    CublasLtTimer(const CublasLtTimer &) = delete;
    CublasLtTimer &operator=(const CublasLtTimer &) = delete;

    void time(const char *model, const Shape &s, int64_t m) {
        const size_t weight = size_t(s.n * s.k);
        const int copies = int(std::max<size_t>(1, kCold / (weight * 2)));
        const Array<bf16> w(weight * size_t(copies)), x(size_t(m * s.ldx));
        Array<float> out(size_t(m * s.n)); // large enough for bf16 too
        fill(w.get(), w.size(), 3);
        fill(x.get(), x.size(), 4);
        out.clear();
        cublaslt::MatmulDesc desc = nullptr;
        cublaslt::MatrixLayout a = nullptr, b = nullptr, d = nullptr;
        ensure_status(lt_.MatmulDescCreate(&desc, cublaslt::kCompute32F, CUDA_R_32F), "Desc");
        const int32_t transposed = cublaslt::kTransposed;
        lt_.MatmulDescSetAttribute(desc, cublaslt::kMatmulTransA, &transposed, sizeof transposed);
        lt_.MatrixLayoutCreate(&a, CUDA_R_16BF, uint64_t(s.k), uint64_t(s.n), s.k);
        lt_.MatrixLayoutCreate(&b, CUDA_R_16BF, uint64_t(s.k), uint64_t(m), s.ldx);
        lt_.MatrixLayoutCreate(&d, s.adds ? CUDA_R_32F : CUDA_R_16BF, uint64_t(s.n), uint64_t(m),
                               s.n);
        cublaslt::Preference preference = nullptr;
        lt_.MatmulPreferenceCreate(&preference);
        lt_.MatmulPreferenceSetAttribute(preference, cublaslt::kPreferenceMaxWorkspace, &kWorkspace,
                                         sizeof kWorkspace);
        std::vector<cublaslt::HeuristicResult> found(kAllOfThem);
        int count = 0;
        ensure_status(lt_.MatmulAlgoGetHeuristic(handle_, desc, a, b, d, d, preference, kAllOfThem,
                                                 found.data(), &count),
                      "GetHeuristic");
        double first = 0, best_of_few = 1e30, best = 1e30, borrowed = 0;
        int at = 0;
        const float one = 1, beta = s.adds ? 1 : 0;
        const bool is_long = m > 1024;
        const auto known = best_at_first_.find(&s);
        if (known != best_at_first_.end()) {
            found.resize(size_t(count));
            found.push_back(known->second);
        }
        for (int i = 0; i < count + (known != best_at_first_.end() ? 1 : 0); ++i) {
            bool runs = true;
            const double us = time_of(
                stream_, is_long ? 2 : std::max(4, copies),
                [&](int run) {
                    runs = runs &&
                           lt_.Matmul(handle_, desc, &one, w.get() + weight * size_t(run % copies),
                                      a, x.get(), b, &beta, out.get(), d, out.get(), d,
                                      &found[size_t(i)].algorithm, workspace_.get(), kWorkspace,
                                      stream_.stream) == cublaslt::kSuccess;
                },
                is_long ? 3 : 5);
            if (!runs) {
                continue;
            }
            if (i == count) {
                borrowed = us;
                continue;
            }
            first = i == 0 ? us : first;
            best_of_few = i < kFew ? std::min(best_of_few, us) : best_of_few;
            at = us < best ? i : at;
            best = std::min(best, us);
        }
        best_at_first_.emplace(&s, found[size_t(at)]);
        const double bytes =
            2.0 * double(weight) + 2.0 * double(m * s.k) + double(m * s.n) * (s.adds ? 8 : 2);
        const double operations = 2.0 * double(m) * double(weight);
        const double floor = 1e6 * std::max(bytes / kReadBandwidth, operations / kPeak);
        std::printf(
            "%-5s %5lld rows %-8s floor %7.1f  first %7.1f  best of %d %7.1f  of %2d %7.1f (number "
            "%2d: %4.0f TFLOP/s, %3.0f%% of the floor)  algorithm of first ROWS %7.1f\n",
            model, static_cast<long long>(m), s.name, floor, first, kFew, best_of_few, count, best,
            at, operations / best / 1e6, 100 * floor / best, borrowed);
        std::fflush(stdout);
        lt_.MatmulPreferenceDestroy(preference);
        lt_.MatrixLayoutDestroy(a);
        lt_.MatrixLayoutDestroy(b);
        lt_.MatrixLayoutDestroy(d);
        lt_.MatmulDescDestroy(desc);
    }

private:
    CudaStream &stream_;
    const cublaslt::Library &lt_;
    cublaslt::Handle handle_ = nullptr;
    Array<unsigned char> workspace_;
    std::map<const Shape *, cublaslt::HeuristicResult> best_at_first_;
};

} // namespace

int main(int argc, char **argv) {
    try {
        CudaStream stream(0);
        if (cublaslt::open() == nullptr) {
            throw std::runtime_error("cuBLASLt cannot be loaded");
        }
        std::vector<int64_t> rows;
        for (int i = 2; i < argc; ++i) {
            rows.push_back(std::atoll(argv[i]));
        }
        CublasLtTimer timer(stream);
        for (const Model &model : kModels) {
            for (const int64_t m :
                 rows.empty() ? std::vector<int64_t>{32, 64, 128, 256, 4000, 16384} : rows) {
                for (const Shape &shape : model.shapes) {
                    timer.time(model.name, shape, m);
                }
            }
        }
    } catch (const std::exception &error) {
        report(false, error.what());
    }
    return failures() > 0 ? 1 : 0;
}
