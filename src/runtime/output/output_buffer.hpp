// Output rows of a step (logits or hidden states) and the tokens they belong to.
#pragma once

#include "tensor/tensor.hpp"

#include <vector>

namespace llaisys::runtime {

class OutputBuffer {
public:
    OutputBuffer(DeviceType device, int device_id, int64_t row_size)
        : device_(device), device_id_(device_id), row_size_(row_size) {}

    // Grow-only capacity of n rows. Growing discards existing rows.
    void reserve(int64_t n_rows);
    void clear() {
        ids_.clear();
        n_host_rows_ = 0;
    }

    // Appends rows for the given tokens and returns their buffer, f32 [n_padded, row_size], where
    // rows from n on are padding. All rows of a step must be reserved together.
    Tensor append(const int32_t *token_ids, int64_t n, int64_t n_padded);
    Tensor append(const int32_t *token_ids, int64_t n) { return append(token_ids, n, n); }

    int32_t n_rows() const { return int32_t(ids_.size()); }
    int64_t row_size() const { return row_size_; }
    const int32_t *ids() const { return ids_.data(); }
    // f32 [n_rows, row_size] on the device.
    Tensor rows() const { return logits_.slice(0, 0, n_rows()); }
    // The rows in host memory, after synchronizing the stream; null: no rows. On the CPU their own
    // memory, elsewhere a copy, made once per number of rows. Valid until clear, append or reserve.
    float *host_rows(const device::Stream &stream);

    int64_t capacity() const { return logits_.defined() ? logits_.size(0) : 0; }

private:
    DeviceType device_;
    int device_id_;
    int64_t row_size_;
    Tensor logits_;
    Tensor host_logits_; // only on devices other than the CPU
    int32_t n_host_rows_ = 0;
    std::vector<int32_t> ids_;
};

} // namespace llaisys::runtime
