#include "device/cuda/cublaslt_gemm.hpp"

#include "base/dtype.hpp"
#include "base/graph_rows.hpp"
#include "device/cuda/cublaslt.hpp"
#include "device/cuda/cuda_runtime.hpp"
#include "device/tuning_file.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <tuple>
#include <vector>

namespace llaisys::device {

namespace {

using cublaslt::Library;

constexpr size_t kWorkspace = size_t(64) << 20; // larger than the L2 of an H200
constexpr int kCandidates = 8;
constexpr int kTimedRuns = 3;
constexpr float kRetryLimit = 1.15f; // times the best: not timed again
// rows of captured steps; above, the search costs more than it gains
constexpr int64_t kMaxSearchedRows = 256;
constexpr size_t kMaxPlans = 8192;

// Row counts for which algorithms are timed, where the caller allows it: those of captured steps
// and of the largest step, which recur. Prompts have any length and use the first
// heuristic result.
bool is_searched(int64_t rows) {
    return rows > kMaxGraphRows ||
           (rows >= 8 && rows <= kMaxSearchedRows && graph_rows(rows) == rows);
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
    case LLAISYS_DTYPE_F8_G128:
        return CUDA_R_8F_E4M3;
    default:
        fail(LLAISYS_ERROR_UNSUPPORTED, "cuBLASLt: no products of ", name_of(dtype));
    }
}

// cuBLASLt descriptors of a shape. cuBLASLt is column-major: the weight is [k, n] transposed, x
// is [k, m] and out is [n, m].
class Plan {
public:
    Plan(const Library &library, const GemmProblem &p) : library_(library) {
        const cudaDataType_t type = type_of(p.dtype);
        check(library.MatmulDescCreate(&matmul, cublaslt::kCompute32F, CUDA_R_32F),
              "MatmulDescCreate");
        const int32_t transposed = cublaslt::kTransposed;
        check(library.MatmulDescSetAttribute(matmul, cublaslt::kMatmulTransA, &transposed,
                                             sizeof transposed),
              "MatmulDescSetAttribute");
        if (p.dtype == LLAISYS_DTYPE_F8_G128) {
            set(cublaslt::kMatmulFastAccum, int8_t(1));
            set(cublaslt::kMatmulScaleModeA, cublaslt::kScaleOuterVector);
            set(cublaslt::kMatmulScaleModeB, cublaslt::kScaleOuterVector);
            set_scales(p);
        }
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

    void set_scales(const GemmProblem &p) const {
        if (p.x_scales != nullptr) {
            set(cublaslt::kMatmulScaleA, p.weight_scales);
            set(cublaslt::kMatmulScaleB, p.x_scales);
        }
    }

    cublaslt::MatmulDesc matmul = nullptr;
    cublaslt::MatrixLayout a = nullptr;
    cublaslt::MatrixLayout b = nullptr;
    cublaslt::MatrixLayout d = nullptr;
    cublaslt::Algorithm algorithm{};
    bool is_possible = false;
    bool is_tried = false; // candidates have been timed

private:
    // An unsupported attribute leaves the plan without algorithms.
    template <typename T> void set(int attribute, const T &value) const {
        library_.MatmulDescSetAttribute(matmul, attribute, &value, sizeof value);
    }
    void layout(cublaslt::MatrixLayout *result, cudaDataType_t type, int64_t rows, int64_t columns,
                int64_t ld) {
        check(library_.MatrixLayoutCreate(result, type, uint64_t(rows), uint64_t(columns), ld),
              "MatrixLayoutCreate");
    }
    const Library &library_;
};

// Device memory that is freed at the end of its scope; null when out of memory.
using TimingOutput = std::unique_ptr<void, cudaError_t (*)(void *)>;
TimingOutput allocate_output(size_t bytes) {
    void *data = nullptr;
    if (cudaMalloc(&data, bytes) != cudaSuccess) {
        cudaGetLastError();
        data = nullptr;
    }
    return {data, cudaFree};
}

// A GEMM as captured in a CUDA graph, including the memset or reduction kernels of its algorithm.
class CapturedGemm {
public:
    CapturedGemm() = default;
    ~CapturedGemm() {
        if (ready_ != nullptr) {
            cudaGraphExecDestroy(ready_);
        }
    }
    CapturedGemm(const CapturedGemm &) = delete;
    CapturedGemm &operator=(const CapturedGemm &) = delete;

    // False when `queue` returns false or its work cannot be captured.
    template <typename Queue> bool capture(cudaStream_t stream, const Queue &queue) {
        cudaGraph_t graph = nullptr;
        LLAISYS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        const bool is_queued = queue();
        const bool is_captured = cudaStreamEndCapture(stream, &graph) == cudaSuccess && is_queued &&
                                 cudaGraphInstantiate(&ready_, graph, 0) == cudaSuccess &&
                                 cudaGraphUpload(ready_, stream) == cudaSuccess;
        if (graph != nullptr) {
            cudaGraphDestroy(graph);
        }
        cudaGetLastError();
        return is_captured;
    }
    void launch(cudaStream_t stream) const { LLAISYS_CUDA(cudaGraphLaunch(ready_, stream)); }

private:
    cudaGraphExec_t ready_ = nullptr;
};

// What the times of algorithms depend on, in one line.
std::string tuning_identity(const Library &library, int device_id) {
    cudaDeviceProp device{};
    LLAISYS_CUDA(cudaGetDeviceProperties(&device, device_id));
    int driver = 0;
    LLAISYS_CUDA(cudaDriverGetVersion(&driver));
    std::string kernel_module;
    std::ifstream version("/proc/driver/nvidia/version");
    std::getline(version, kernel_module);
    return std::string(device.name) + ", driver " + std::to_string(driver) + " " + kernel_module +
           ", cuBLASLt " + std::to_string(library.GetVersion()) + ", ABI " +
           std::to_string(LLAISYS_ABI_VERSION) + ", " + std::to_string(kCandidates) + " candidates";
}

class CublasLt final : public CublasLtGemm {
public:
    CublasLt(const Library &library, int device_id)
        : library_(library), device_id_(device_id), trial_out_(device_id) {
        LLAISYS_CUDA(cudaSetDevice(device_id));
        const std::string identity = tuning_identity(library, device_id);
        tuning_ = std::make_unique<TuningFile>(TuningFile::path_of(identity), identity);
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

    bool run(cudaStream_t stream, const GemmProblem &p, bool may_try) override {
        Plan &plan = plan_of(stream, p, false);
        if (may_try && !plan.is_tried && plan.is_possible && is_searched(p.m) &&
            !is_capturing(stream)) {
            plan.is_tried = true;
            search(stream, p, &plan);
        }
        return run(stream, p, plan);
    }

    bool run_invariant(cudaStream_t stream, const GemmProblem &p) override {
        ensure(p.m == kInvariantRows && p.ldx == p.k && p.ldo == p.n && !p.accumulates &&
                   p.out_dtype == LLAISYS_DTYPE_F32,
               "run_invariant: ", p.m, " rows, strides of ", p.ldx, " and ", p.ldo);
        return run(stream, p, plan_of(stream, p, true));
    }

private:
    // The last field: batch-invariant.
    using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int, int, bool>;

    bool run(cudaStream_t stream, const GemmProblem &p, const Plan &plan) {
        if (!plan.is_possible) {
            return false;
        }
        check(multiply(stream, p, plan, plan.algorithm, p.out, p.accumulates), "Matmul");
        return true;
    }

    int multiply(cudaStream_t stream, const GemmProblem &p, const Plan &plan,
                 const cublaslt::Algorithm &algorithm, void *out, bool accumulates) {
        const float one = 1.0f;
        const float beta = accumulates ? 1.0f : 0.0f;
        plan.set_scales(p);
        return library_.Matmul(handle_, plan.matmul, &one, p.weight, plan.a, p.x, plan.b, &beta,
                               out, plan.d, out, plan.d, &algorithm, workspace_, kWorkspace,
                               stream);
    }

    Plan &plan_of(cudaStream_t stream, const GemmProblem &p, bool is_invariant) {
        const Key key{p.m, p.n, p.k, p.ldx, p.ldo, int(p.dtype), int(p.out_dtype), is_invariant};
        const auto found = plans_.find(key);
        if (found != plans_.end()) {
            return *found->second;
        }
        if (plans_.size() >= kMaxPlans) {
            plans_.clear();
        }
        auto plan = std::make_unique<Plan>(library_, p);
        choose(stream, p, plan.get(), is_invariant);
        return *plans_.emplace(key, std::move(plan)).first->second;
    }

    // Heuristic results of cuBLASLt, best first.
    std::vector<cublaslt::HeuristicResult> heuristics(const Plan &plan, bool is_invariant) {
        cublaslt::Preference preference = nullptr;
        check(library_.MatmulPreferenceCreate(&preference), "MatmulPreferenceCreate");
        const size_t limit = kWorkspace;
        library_.MatmulPreferenceSetAttribute(preference, cublaslt::kPreferenceMaxWorkspace, &limit,
                                              sizeof limit);
        if (is_invariant) { // no split-K reduction
            const uint32_t none = cublaslt::kNoReduction;
            library_.MatmulPreferenceSetAttribute(preference, cublaslt::kPreferenceReductions,
                                                  &none, sizeof none);
        }
        std::vector<cublaslt::HeuristicResult> found(kCandidates);
        int count = 0;
        const int status =
            library_.MatmulAlgoGetHeuristic(handle_, plan.matmul, plan.a, plan.b, plan.d, plan.d,
                                            preference, kCandidates, found.data(), &count);
        library_.MatmulPreferenceDestroy(preference);
        found.resize(status == cublaslt::kSuccess ? size_t(count) : 0);
        return found;
    }

    void choose(cudaStream_t stream, const GemmProblem &p, Plan *plan, bool is_invariant) {
        const std::vector<cublaslt::HeuristicResult> found = heuristics(*plan, is_invariant);
        if (!is_invariant) {
            plan->is_possible = !found.empty();
            plan->algorithm = found.empty() ? plan->algorithm : found[0].algorithm;
            return;
        }
        ensure(!is_capturing(stream), "cuBLASLt: a batch-invariant GEMM of ", p.n, " x ", p.k,
               " is captured before its first run");
        for (size_t i = 0; i < found.size() && !plan->is_possible; ++i) {
            plan->algorithm = found[i].algorithm;
            plan->is_possible = is_row_invariant(stream, p, *plan);
        }
    }

    static bool is_capturing(cudaStream_t stream) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        LLAISYS_CUDA(cudaStreamIsCapturing(stream, &status));
        return status != cudaStreamCaptureStatusNone;
    }

    // Runs the algorithm on identical rows and compares the result rows bit by bit.
    bool is_row_invariant(cudaStream_t stream, const GemmProblem &p, const Plan &plan) {
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
        GemmProblem trial = p;
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

    // Uses the remembered candidate, or times all and remembers the fastest. Results go to `out` when it is overwritten
    // anyway. L2 is flushed before each run by writing the workspace, as the other layers of a
    // model would. GEMMs of captured steps are timed as graphs: some algorithms start with a
    // memset, which costs 5 us in a graph and almost nothing outside.
    void search(cudaStream_t stream, const GemmProblem &p, Plan *plan) {
        const std::vector<cublaslt::HeuristicResult> found = heuristics(*plan, false);
        std::string key = "gemm";
        for (const int64_t part : {p.m, p.n, p.k, p.ldx, p.ldo, int64_t(p.dtype),
                                   int64_t(p.out_dtype), int64_t(p.accumulates)}) {
            key += " " + std::to_string(part);
        }
        const int remembered = tuning_->find(key);
        if (remembered >= 0 && size_t(remembered) < found.size()) {
            plan->algorithm = found[size_t(remembered)].algorithm;
            return;
        }
        const bool is_large = p.m > kMaxGraphRows;
        TimingOutput large(nullptr, cudaFree);
        void *out = p.out;
        const size_t bytes = size_t(bytes_of(p.out_dtype, p.m * p.ldo));
        if (p.accumulates && is_large) {
            large = allocate_output(bytes);
            out = large.get();
        } else if (p.accumulates) {
            out = trial_out_.at_least(bytes);
        }
        if (out == nullptr) {
            return; // out of memory: keep the first heuristic result
        }
        const int timed_runs = is_large ? 1 : kTimedRuns;
        float best = 0;
        int fastest = -1;
        for (const cublaslt::HeuristicResult &candidate : found) {
            const auto run_once = [&] {
                return multiply(stream, p, *plan, candidate.algorithm, out, p.accumulates) ==
                       cublaslt::kSuccess;
            };
            CapturedGemm captured;
            float least = 0;
            bool runs = run_once() && (is_large || captured.capture(stream, run_once)); // warm-up
            for (int run = 0; run < timed_runs && runs; ++run) {
                LLAISYS_CUDA(cudaMemsetAsync(workspace_, run, kWorkspace, stream));
                LLAISYS_CUDA(cudaEventRecord(begin_, stream));
                if (is_large) {
                    runs = run_once();
                } else {
                    captured.launch(stream);
                }
                LLAISYS_CUDA(cudaEventRecord(end_, stream));
                LLAISYS_CUDA(cudaEventSynchronize(end_));
                float milliseconds = 0;
                LLAISYS_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
                least = run == 0 ? milliseconds : std::min(least, milliseconds);
                if (best > 0 && least > kRetryLimit * best) {
                    break;
                }
            }
            if (runs && (best == 0 || least < best)) {
                best = least;
                fastest = int(&candidate - found.data());
                plan->algorithm = candidate.algorithm;
            }
        }
        if (fastest >= 0) {
            tuning_->remember(key, fastest);
        }
    }

    const Library &library_;
    int device_id_;
    cublaslt::Handle handle_ = nullptr;
    void *workspace_ = nullptr;
    GrowingMemory trial_out_; // for GEMMs that accumulate
    std::unique_ptr<TuningFile> tuning_;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
    std::map<Key, std::unique_ptr<Plan>> plans_;
};

} // namespace

std::unique_ptr<CublasLtGemm> CublasLtGemm::open(int device_id) {
    const Library *library = cublaslt::open();
    return library != nullptr ? std::make_unique<CublasLt>(*library, device_id) : nullptr;
}

} // namespace llaisys::device
