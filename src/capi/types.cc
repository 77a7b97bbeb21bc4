#include "capi/guard.hpp"

#include <string>

namespace llaisys::capi {

namespace {
thread_local std::string last_error;
thread_local int32_t last_error_code = LLAISYS_OK;
} // namespace

void set_last_error(int32_t code, const char *text) noexcept {
    last_error_code = code;
    try {
        last_error = text;
    } catch (...) { // no memory for the text: keep the previous one
    }
}

} // namespace llaisys::capi

using namespace llaisys;

uint32_t llaisysAbiVersion(void) { return LLAISYS_ABI_VERSION; }

const char *llaisysLastError(void) { return capi::last_error.c_str(); }

int32_t llaisysLastErrorCode(void) { return capi::last_error_code; }

const char *llaisysDataTypeName(llaisysDataType_t dtype) { return name_of(dtype); }

int32_t llaisysDataTypeGetTraits(llaisysDataType_t dtype, LlaisysDataTypeTraits *traits) {
    return capi::guard([&] { *capi::not_null(traits, "traits") = traits_of(dtype); });
}
