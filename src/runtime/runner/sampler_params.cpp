#include "runtime/runner/sampler_params.hpp"

#include "base/check.hpp"

#include <cmath>
#include <cstring>
#include <string>

namespace llaisys::runtime {

namespace {

// Whether the value, converted to float or int32, is within the limits.
bool is_within(const NumberField &field, double value) {
    const double largest = field.real != nullptr ? double(std::numeric_limits<float>::max())
                                                 : double(std::numeric_limits<int32_t>::max());
    if (!(std::fabs(value) <= largest) ||
        (field.integer != nullptr && value != std::trunc(value))) {
        return false;
    }
    const double stored = field.real != nullptr ? double(float(value)) : value;
    const Limits &limits = field.limits;
    return stored <= limits.high && (limits.above_low ? stored > limits.low : stored >= limits.low);
}

std::string rule_of(const NumberField &field) {
    const Limits &limits = field.limits;
    const char *kind = field.integer != nullptr ? "an integer " : "finite and ";
    if (std::isfinite(limits.high)) {
        return text("in ", limits.above_low ? "(" : "[", limits.low, ", ", limits.high, "]");
    }
    if (std::isfinite(limits.low)) {
        return text(kind, limits.above_low ? "above " : "at least ", limits.low);
    }
    return "finite";
}

const NumberField &field_of(const char *name, int32_t i) {
    for (const NumberField &field : kNumberFields) {
        if (std::strcmp(field.name, name) == 0) {
            return field;
        }
    }
    std::string known;
    for (const NumberField &field : kNumberFields) {
        known += text(known.empty() ? "" : ", ", field.name);
    }
    fail(LLAISYS_ERROR_INVALID, "numbers[", i, "].name must be one of ", known, ", got ",
         std::string(name).substr(0, 64));
}

} // namespace

NumberColumns::NumberColumns(const LlaisysSamplingMetadata &s) {
    require(s.n_numbers >= 0, "n_numbers must be at least 0, got ", s.n_numbers);
    require(s.numbers != nullptr || s.n_numbers == 0, "numbers is NULL, with ", s.n_numbers,
            " entries");
    for (int32_t i = 0; i < s.n_numbers; ++i) {
        const LlaisysSamplingNumber &number = s.numbers[i];
        require(number.name != nullptr, "numbers[", i, "].name is NULL");
        const NumberField &field = field_of(number.name, i);
        const double *&values = values_[size_t(&field - kNumberFields)];
        require(values == nullptr, "numbers[", i, "].name repeats ", field.name);
        require(number.values != nullptr || s.n_rows == 0, "numbers[", i, "].values, of ",
                field.name, ", is NULL");
        values = number.values;
        for (int32_t r = 0; r < s.n_rows; ++r) {
            if (!is_within(field, values[r])) {
                fail(LLAISYS_ERROR_INVALID, field.name, "[", r, "] must be ", rule_of(field),
                     ", got ", values[r]);
            }
        }
    }
}

RowNumbers NumberColumns::row(int32_t r) const {
    RowNumbers numbers;
    for (size_t f = 0; f < values_.size(); ++f) {
        if (values_[f] != nullptr) {
            kNumberFields[f].set(&numbers, values_[f][r]);
        }
    }
    return numbers;
}

} // namespace llaisys::runtime
