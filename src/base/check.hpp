// Errors inside the library: one exception type with a status code, raised by checks that say what
// was got and what was expected. capi/ turns it into a return code and a text.
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

// The caller's fault: `condition` must hold or the rest of the arguments become the error text.
template <typename... Args> void require(bool condition, const Args &...args) {
    if (!condition) {
        fail(LLAISYS_ERROR_INVALID, args...);
    }
}

// Our own fault: a broken invariant.
template <typename... Args> void ensure(bool condition, const Args &...args) {
    if (!condition) {
        fail(LLAISYS_ERROR_INTERNAL, "internal error: ", args...);
    }
}

// Runs body(); the text of an Error out of it gets the place before it: "layer 3: ...". Costs nothing
// while nothing fails.
template <typename Body> void at_place(const char *name, size_t index, const Body &body) {
    try {
        body();
    } catch (const Error &error) {
        fail(error.status(), name, ' ', index, ": ", error.what());
    }
}

} // namespace llaisys
