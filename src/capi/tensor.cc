#include "capi/guard.hpp"
#include "ops/rearrange/op.hpp"
#include "runtime/weights/weights.hpp"

using namespace llaisys;
using namespace llaisys::capi;

namespace {

Shape shape_from(const int64_t *sizes, int32_t ndim) {
    require(sizes != nullptr || ndim == 0, "shape is NULL");
    return Shape(sizes, ndim);
}

// Runs make(), which returns a tensor, and stores a handle of it; NULL when it throws.
template <typename Make> int32_t give(llaisysTensor_t *result, const char *name, const Make &make) {
    return guard([&] {
        *not_null(result, name) = nullptr;
        *result = new LlaisysTensor(make());
    });
}

} // namespace

int32_t llaisysTensorCreate(const int64_t *shape, int32_t ndim, llaisysDataType_t dtype,
                            llaisysDeviceType_t device, int32_t device_id,
                            llaisysTensor_t *tensor) {
    // Most are weights, which a model packs and releases at once.
    return give(tensor, "tensor", [&] {
        return Tensor::create(shape_from(shape, ndim), dtype, device, device_id,
                              device::Lifetime::temporary);
    });
}

int32_t llaisysTensorMap(const char *path, uint64_t offset, const int64_t *shape, int32_t ndim,
                         llaisysDataType_t dtype, llaisysTensor_t *tensor) {
    return give(tensor, "tensor", [&] {
        return Tensor::map(not_null(path, "path"), offset, shape_from(shape, ndim), dtype);
    });
}

int32_t llaisysTensorDestroy(llaisysTensor_t tensor) {
    return guard([&] {
        require(tensor == nullptr || !runtime::WeightTable::is_owned(tensor),
                "tensor belongs to a model, which destroys it");
        delete tensor;
    });
}

void *llaisysTensorData(llaisysTensor_t tensor) {
    const bool has_values =
        tensor != nullptr && tensor->tensor.defined() && tensor->tensor.elements() > 0;
    return has_values ? tensor->tensor.data() : nullptr;
}

int32_t llaisysTensorNdim(llaisysTensor_t tensor) {
    return tensor != nullptr ? tensor->tensor.ndim() : -1;
}

int32_t llaisysTensorShape(llaisysTensor_t tensor, int64_t *shape) {
    return guard([&] {
        const Shape &sizes = not_null(tensor, "tensor")->tensor.shape();
        require(shape != nullptr || sizes.ndim() == 0, "shape is NULL");
        for (int dim = 0; dim < sizes.ndim(); ++dim) {
            shape[dim] = sizes[dim];
        }
    });
}

int32_t llaisysTensorStrides(llaisysTensor_t tensor, int64_t *strides) {
    return guard([&] {
        const Shape &steps = not_null(tensor, "tensor")->tensor.strides();
        require(strides != nullptr || steps.ndim() == 0, "strides is NULL");
        for (int dim = 0; dim < steps.ndim(); ++dim) {
            strides[dim] = steps[dim];
        }
    });
}

llaisysDataType_t llaisysTensorDataType(llaisysTensor_t tensor) {
    return tensor != nullptr ? tensor->tensor.dtype() : LLAISYS_DTYPE_INVALID;
}

int32_t llaisysTensorIsContiguous(llaisysTensor_t tensor) {
    return tensor != nullptr ? int32_t(tensor->tensor.is_contiguous()) : -1;
}

int32_t llaisysTensorIsMapped(llaisysTensor_t tensor) {
    if (tensor == nullptr) {
        return -1;
    }
    return int32_t(tensor->tensor.defined() && tensor->tensor.is_mapped());
}

int32_t llaisysTensorLoad(llaisysTensor_t tensor, const void *data, size_t n_bytes) {
    return guard([&] {
        tensor_of(tensor, "tensor");
        require(data != nullptr || n_bytes == 0, "data is NULL");
        tensor->tensor.load(data, n_bytes);
    });
}

int32_t llaisysTensorStore(llaisysTensor_t tensor, void *data, size_t n_bytes) {
    return guard([&] {
        tensor_of(tensor, "tensor");
        require(data != nullptr || n_bytes == 0, "data is NULL");
        tensor->tensor.store(data, n_bytes);
    });
}

int32_t llaisysTensorView(llaisysTensor_t tensor, const int64_t *shape, int32_t ndim,
                          llaisysTensor_t *view) {
    return give(view, "view",
                [&] { return tensor_of(tensor, "tensor").view(shape_from(shape, ndim)); });
}

int32_t llaisysTensorSlice(llaisysTensor_t tensor, int32_t dim, int64_t start, int64_t end,
                           llaisysTensor_t *view) {
    return give(view, "view", [&] { return tensor_of(tensor, "tensor").slice(dim, start, end); });
}

int32_t llaisysTensorPermute(llaisysTensor_t tensor, const int32_t *order, llaisysTensor_t *view) {
    return give(view, "view", [&] {
        const Tensor &source = tensor_of(tensor, "tensor");
        require(order != nullptr || source.ndim() == 0, "order is NULL");
        return source.permute(order);
    });
}

int32_t llaisysTensorContiguous(llaisysTensor_t tensor, llaisysTensor_t *result) {
    return give(result, "result", [&] {
        const Tensor &source = tensor_of(tensor, "tensor");
        const device::Stream stream(source.device(), source.device_id(), 1);
        Tensor dense = ops::contiguous(stream, source);
        stream.synchronize();
        return dense;
    });
}
