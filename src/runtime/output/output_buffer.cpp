#include "runtime/output/output_buffer.hpp"

namespace llaisys::runtime {

void OutputBuffer::reserve(int64_t n_rows) {
    if (logits_.defined() && n_rows <= capacity()) {
        return;
    }
    clear();
    logits_ = Tensor(); // freed first: both may not fit into memory together
    logits_ = Tensor::create({n_rows, row_size_}, LLAISYS_DTYPE_F32, device_, device_id_);
    ids_.reserve(size_t(n_rows));
}

Tensor OutputBuffer::append(const int32_t *token_ids, int64_t n, int64_t n_padded) {
    const int64_t first = n_rows();
    ensure(first + n_padded <= capacity(), "output buffer has ", capacity(), " rows, ",
           first + n_padded, " are needed");
    ids_.insert(ids_.end(), token_ids, token_ids + n);
    return logits_.slice(0, first, first + n_padded);
}

float *OutputBuffer::host_rows(const device::Stream &stream) {
    if (ids_.empty()) {
        return nullptr;
    }
    if (device_ == LLAISYS_DEVICE_CPU) {
        stream.synchronize();
        return logits_.as<float>();
    }
    if (n_host_rows_ != n_rows()) {
        if (!host_logits_.defined() || host_logits_.size(0) < capacity()) {
            host_logits_ = Tensor::create(logits_.shape(), LLAISYS_DTYPE_F32);
        }
        const Tensor device_rows = rows();
        device_rows.store(stream, host_logits_.data(), size_t(device_rows.bytes()));
        stream.synchronize();
        n_host_rows_ = n_rows();
    }
    return host_logits_.as<float>();
}

} // namespace llaisys::runtime
