#include "device/cuda/cublaslt.hpp"

#include <dlfcn.h>

namespace llaisys::device::cublaslt {

namespace {

template <typename Function> bool find(void *file, const char *name, Function *function) {
    *function = reinterpret_cast<Function>(dlsym(file, name));
    return *function != nullptr;
}

bool load(Library *library) {
    void *file = nullptr;
    for (const char *name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
        file = file != nullptr ? file : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    return file != nullptr && find(file, "cublasLtGetVersion", &library->GetVersion) &&
           find(file, "cublasLtCreate", &library->Create) &&
           find(file, "cublasLtDestroy", &library->Destroy) &&
           find(file, "cublasLtMatmul", &library->Matmul) &&
           find(file, "cublasLtMatmulAlgoGetHeuristic", &library->MatmulAlgoGetHeuristic) &&
           find(file, "cublasLtMatmulDescCreate", &library->MatmulDescCreate) &&
           find(file, "cublasLtMatmulDescDestroy", &library->MatmulDescDestroy) &&
           find(file, "cublasLtMatmulDescSetAttribute", &library->MatmulDescSetAttribute) &&
           find(file, "cublasLtMatmulPreferenceCreate", &library->MatmulPreferenceCreate) &&
           find(file, "cublasLtMatmulPreferenceDestroy", &library->MatmulPreferenceDestroy) &&
           find(file, "cublasLtMatmulPreferenceSetAttribute",
                &library->MatmulPreferenceSetAttribute) &&
           find(file, "cublasLtMatrixLayoutCreate", &library->MatrixLayoutCreate) &&
           find(file, "cublasLtMatrixLayoutDestroy", &library->MatrixLayoutDestroy);
}

} // namespace

const Library *open() {
    static Library library{};
    static const bool is_loaded = load(&library);
    return is_loaded ? &library : nullptr;
}

} // namespace llaisys::device::cublaslt
