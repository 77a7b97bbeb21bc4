#include "runtime/workspace/workspace.hpp"

namespace llaisys::runtime {

void Workspace::reserve(int64_t bytes) {
    if (bytes <= capacity()) {
        return;
    }
    arena_ = std::make_shared<Storage>(device_, device_id_, bytes);
    used_ = 0;
    ++allocations_;
}

Workspace Workspace::measuring() {
    Workspace workspace(LLAISYS_DEVICE_CPU, 0);
    workspace.is_measuring_ = true;
    return workspace;
}

Tensor Workspace::allocate(const Shape &shape, DType dtype) {
    const int64_t bytes = aligned(bytes_of(dtype, shape.elements()));
    if (is_measuring_) {
        used_ += bytes;
        return Tensor::described(shape, dtype);
    }
    ensure(arena_ && bytes <= arena_->bytes() - used_, "workspace of ", capacity(), " bytes has ",
           capacity() - used_, " left, ", bytes, " are needed");
    Tensor tensor = Tensor::on(arena_, used_, shape, dtype);
    used_ += bytes;
    return tensor;
}

} // namespace llaisys::runtime
