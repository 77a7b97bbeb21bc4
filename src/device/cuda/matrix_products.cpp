#include "device/cuda/matrix_products.hpp"

#include "base/dtype.hpp"
#include "device/cuda/cublaslt.hpp"
#include "device/cuda/cuda_runtime.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

namespace llaisys::device {

namespace {

using cublaslt::Library;

constexpr size_t kWorkspace = size_t(64) << 20;
constexpr int kCandidates = 8;
constexpr int kTimedRuns = 3;
constexpr size_t kFlushed = size_t(128) << 20; // more than any second-level cache holds
constexpr int64_t kSearchUpTo = 256; // rows: above, trying would take longer than it gives
constexpr size_t kMaxPlans = 8192;

// Rows for which algorithms are tried, a hundred milliseconds for a model: those of recorded steps, which
// come again and again (CapturedSteps), so that it is done with when the warm-up is. A prompt may be of any
// length, and takes the first proposal.
bool is_searched(int64_t rows) {
    int64_t step = 8;
    while (rows > 8 * step) {
        step *= 2;
    }
    return rows <= kSearchUpTo && rows % step == 0;
}

void check(int status, const char *call) {
    ensure(status == cublaslt::kSuccess, "cuBLASLt: ", call, ": status ", status);
}

cudaDataType_t type_of(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_F32:
        return CUDA_R_32F;
    case LLAISYS_DTYPE_F16:
        return CUDA_R_16F;
    case LLAISYS_DTYPE_BF16:
        return CUDA_R_16BF;
    default:
        fail(LLAISYS_ERROR_UNSUPPORTED, "cuBLASLt: no products of ", name_of(dtype));
    }
}

// Everything cuBLASLt needs to know of a shape. In its column-major eyes the weight is [k, n]
// transposed, x is [k, m] and out is [n, m].
class Plan {
public:
    Plan(const Library &library, const MatrixProduct &p) : library_(library) {
        const cudaDataType_t type = type_of(p.dtype);
        check(library.MatmulDescCreate(&matmul, cublaslt::kCompute32F, CUDA_R_32F),
              "MatmulDescCreate");
        const int32_t transposed = cublaslt::kTransposed;
        check(library.MatmulDescSetAttribute(matmul, cublaslt::kMatmulTransA, &transposed,
                                             sizeof transposed),
              "MatmulDescSetAttribute");
        layout(&a, type, p.k, p.n, p.k);
        layout(&b, type, p.k, p.m, p.ldx);
        layout(&d, type_of(p.out_dtype), p.n, p.m, p.ldo);
    }
    ~Plan() {
        library_.MatrixLayoutDestroy(a);
        library_.MatrixLayoutDestroy(b);
        library_.MatrixLayoutDestroy(d);
        library_.MatmulDescDestroy(matmul);
    }
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;

    cublaslt::MatmulDesc matmul = nullptr;
    cublaslt::MatrixLayout a = nullptr;
    cublaslt::MatrixLayout b = nullptr;
    cublaslt::MatrixLayout d = nullptr;
    cublaslt::Algorithm algorithm{};
    bool is_possible = false;

private:
    void layout(cublaslt::MatrixLayout *result, cudaDataType_t type, int64_t rows, int64_t columns,
                int64_t ld) {
        check(library_.MatrixLayoutCreate(result, type, uint64_t(rows), uint64_t(columns), ld),
              "MatrixLayoutCreate");
    }
    const Library &library_;
};

class CublasLt final : public MatrixProducts {
public:
    CublasLt(const Library &library, int device_id) : library_(library), device_id_(device_id) {
        LLAISYS_CUDA(cudaSetDevice(device_id));
        check(library.Create(&handle_), "Create");
        LLAISYS_CUDA(cudaMalloc(&workspace_, kWorkspace));
        LLAISYS_CUDA(cudaEventCreate(&begin_));
        LLAISYS_CUDA(cudaEventCreate(&end_));
    }
    ~CublasLt() override {
        plans_.clear();
        cudaSetDevice(device_id_);
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
        cudaFree(workspace_);
        library_.Destroy(handle_);
    }

    bool run(cudaStream_t stream, const MatrixProduct &p) override { return run(stream, p, false); }

    bool run_even(cudaStream_t stream, const MatrixProduct &p) override {
        ensure(p.m == kEvenRows && p.ldx == p.k && p.ldo == p.n && !p.accumulates &&
                   p.out_dtype == LLAISYS_DTYPE_F32,
               "run_even: ", p.m, " rows, strides of ", p.ldx, " and ", p.ldo);
        return run(stream, p, true);
    }

private:
    // The last: whether it is even.
    using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int, int, bool>;

    bool run(cudaStream_t stream, const MatrixProduct &p, bool is_even) {
        Plan &plan = plan_of(stream, p, is_even);
        if (!plan.is_possible) {
            return false;
        }
        check(multiply(stream, p, plan, plan.algorithm, p.out, p.accumulates), "Matmul");
        return true;
    }

    int multiply(cudaStream_t stream, const MatrixProduct &p, const Plan &plan,
                 const cublaslt::Algorithm &algorithm, void *out, bool accumulates) {
        const float one = 1.0f;
        const float beta = accumulates ? 1.0f : 0.0f;
        return library_.Matmul(handle_, plan.matmul, &one, p.weight, plan.a, p.x, plan.b, &beta,
                               out, plan.d, out, plan.d, &algorithm, workspace_, kWorkspace,
                               stream);
    }

    Plan &plan_of(cudaStream_t stream, const MatrixProduct &p, bool is_even) {
        const Key key{p.m, p.n, p.k, p.ldx, p.ldo, int(p.dtype), int(p.out_dtype), is_even};
        const auto found = plans_.find(key);
        if (found != plans_.end()) {
            return *found->second;
        }
        if (plans_.size() >= kMaxPlans) {
            plans_.clear();
        }
        auto plan = std::make_unique<Plan>(library_, p);
        choose(stream, p, plan.get(), is_even);
        return *plans_.emplace(key, std::move(plan)).first->second;
    }

    void choose(cudaStream_t stream, const MatrixProduct &p, Plan *plan, bool is_even) {
        cublaslt::Preference preference = nullptr;
        check(library_.MatmulPreferenceCreate(&preference), "MatmulPreferenceCreate");
        const size_t limit = kWorkspace;
        library_.MatmulPreferenceSetAttribute(preference, cublaslt::kPreferenceMaxWorkspace, &limit,
                                              sizeof limit);
        if (is_even) { // sums in one piece
            const uint32_t none = cublaslt::kNoReduction;
            library_.MatmulPreferenceSetAttribute(preference, cublaslt::kPreferenceReductions,
                                                  &none, sizeof none);
        }
        cublaslt::HeuristicResult found[kCandidates];
        int count = 0;
        const int status =
            library_.MatmulAlgoGetHeuristic(handle_, plan->matmul, plan->a, plan->b, plan->d,
                                            plan->d, preference, kCandidates, found, &count);
        library_.MatmulPreferenceDestroy(preference);
        if (status != cublaslt::kSuccess || count == 0) {
            return;
        }
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        LLAISYS_CUDA(cudaStreamIsCapturing(stream, &capture));
        if (is_even) {
            ensure(capture == cudaStreamCaptureStatusNone, "cuBLASLt: an even product of ", p.n,
                   " x ", p.k, " is recorded before its first run");
            for (int i = 0; i < count && !plan->is_possible; ++i) {
                plan->algorithm = found[i].algorithm;
                plan->is_possible = is_row_even(stream, p, *plan);
            }
            return;
        }
        plan->is_possible = true;
        plan->algorithm = found[0].algorithm;
        if (is_searched(p.m) && capture == cudaStreamCaptureStatusNone) {
            search(stream, p, plan, found, count);
        }
    }

    // Multiplies rows that are all alike, and compares the results bit by bit.
    bool is_row_even(cudaStream_t stream, const MatrixProduct &p, const Plan &plan) {
        std::vector<uint16_t> x(size_t(p.m * p.k)); // +-[0.5, 1) in bf16, +-[1.75, 1.88) in f16
        for (size_t i = 0; i < x.size(); ++i) {
            const uint32_t mixed = uint32_t(i % size_t(p.k)) * 2654435761u;
            x[i] = uint16_t(0x3f00u | ((mixed >> 12) & 0x807fu));
        }
        std::vector<uint32_t> out(size_t(p.m * p.n));
        const size_t x_bytes = x.size() * sizeof x[0];
        const size_t out_bytes = out.size() * sizeof out[0];
        void *memory = nullptr;
        LLAISYS_CUDA(cudaMalloc(&memory, x_bytes + out_bytes)); // x: m * k * 2, a multiple of 256
        MatrixProduct trial = p;
        trial.x = memory;
        trial.out = static_cast<std::byte *>(memory) + x_bytes;
        cudaMemcpyAsync(memory, x.data(), x_bytes, cudaMemcpyHostToDevice, stream);
        const int status = multiply(stream, trial, plan, plan.algorithm, trial.out, false);
        cudaMemcpyAsync(out.data(), trial.out, out_bytes, cudaMemcpyDeviceToHost, stream);
        const cudaError_t end = cudaStreamSynchronize(stream);
        cudaFree(memory);
        cuda_check(end, "cudaStreamSynchronize");
        const size_t n = size_t(p.n);
        for (size_t row = 1; row < size_t(p.m); ++row) {
            if (std::memcmp(out.data(), out.data() + row * n, n * sizeof out[0]) != 0) {
                return false;
            }
        }
        return status == cublaslt::kSuccess;
    }

    // Times the candidates on memory of its own and keeps the fastest. Before each run the caches are
    // filled with something else, as the other layers of a model will have done.
    void search(cudaStream_t stream, const MatrixProduct &p, Plan *plan,
                const cublaslt::HeuristicResult *found, int count) {
        const size_t out_bytes = size_t(bytes_of(p.out_dtype, p.m * p.ldo));
        void *scratch = nullptr;
        if (cudaMalloc(&scratch, out_bytes + kFlushed) != cudaSuccess) {
            cudaGetLastError();
            return;
        }
        float best = 0;
        for (int i = 0; i < count; ++i) {
            float least = 0;
            bool runs = true;
            for (int run = 0; run <= kTimedRuns && runs; ++run) {
                LLAISYS_CUDA(cudaMemsetAsync(static_cast<std::byte *>(scratch) + out_bytes, run,
                                             kFlushed, stream));
                LLAISYS_CUDA(cudaEventRecord(begin_, stream));
                runs = multiply(stream, p, *plan, found[i].algorithm, scratch, p.accumulates) ==
                       cublaslt::kSuccess;
                LLAISYS_CUDA(cudaEventRecord(end_, stream));
                LLAISYS_CUDA(cudaEventSynchronize(end_));
                float milliseconds = 0;
                LLAISYS_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
                if (run > 0) { // the first is a warm-up
                    least = run == 1 ? milliseconds : std::min(least, milliseconds);
                }
            }
            if (runs && (best == 0 || least < best)) {
                best = least;
                plan->algorithm = found[i].algorithm;
            }
        }
        cudaFree(scratch);
    }

    const Library &library_;
    int device_id_;
    cublaslt::Handle handle_ = nullptr;
    void *workspace_ = nullptr;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
    std::map<Key, std::unique_ptr<Plan>> plans_;
};

} // namespace

std::unique_ptr<MatrixProducts> MatrixProducts::open(int device_id) {
    const Library *library = cublaslt::open();
    return library != nullptr ? std::make_unique<CublasLt>(*library, device_id) : nullptr;
}

} // namespace llaisys::device
