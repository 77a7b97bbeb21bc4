// Errors inside the library: one exception type with a status code. capi/ turns it into a return
// code and a text.
#pragma once

#include "llaisys/types.h"

#include <sstream>
#include <stdexcept>
#include <string>

namespace llaisys {

class Error : public std::runtime_error {
public:
    Error(llaisysStatus_t status, const std::string &text)
        : std::runtime_error(text), status_(status) {}
    llaisysStatus_t status() const noexcept { return status_; }

private:
    llaisysStatus_t status_;
};

// Joins its arguments into one string.
template <typename... Args> std::string text(const Args &...args) {
    std::ostringstream out;
    (out << ... << args);
    return out.str();
}

template <typename... Args> [[noreturn]] void fail(llaisysStatus_t status, const Args &...args) {
    throw Error(status, text(args...));
}

// Precondition of the caller: throws LLAISYS_ERROR_INVALID with the remaining arguments as text.
template <typename... Args> void require(bool condition, const Args &...args) {
    if (!condition) {
        fail(LLAISYS_ERROR_INVALID, args...);
    }
}

// Internal invariant: throws LLAISYS_ERROR_INTERNAL.
template <typename... Args> void ensure(bool condition, const Args &...args) {
    if (!condition) {
        fail(LLAISYS_ERROR_INTERNAL, "internal error: ", args...);
    }
}

// Runs body() and prefixes the text of an Error with "name index: ", e.g. "layer 3: ".
template <typename Body> void with_context(const char *name, size_t index, const Body &body) {
    try {
        body();
    } catch (const Error &error) {
        fail(error.status(), name, ' ', index, ": ", error.what());
    }
}

} // namespace llaisys
