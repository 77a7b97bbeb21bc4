// A view {offset, shape, strides} on shared storage. Copies share the bytes and allocate nothing.
// Strides are in elements and never negative.
#pragma once

#include "base/dtype.hpp"
#include "llaisys/tensor.h"
#include "tensor/storage.hpp"

#include <array>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <string>

namespace llaisys {

// Up to LLAISYS_MAX_DIMS sizes, inline.
class Shape {
public:
    Shape() = default;
    Shape(std::initializer_list<int64_t> sizes) : Shape(sizes.begin(), int(sizes.size())) {}
    // Throws when ndim is out of range.
    Shape(const int64_t *sizes, int ndim);

    int ndim() const { return ndim_; }
    int64_t operator[](int dim) const { return sizes_[size_t(dim)]; }
    int64_t &operator[](int dim) { return sizes_[size_t(dim)]; }
    const int64_t *data() const { return sizes_.data(); }
    void append(int64_t size);
    bool operator==(const Shape &other) const;
    bool operator!=(const Shape &other) const { return !(*this == other); }

    // Throws when a size is negative or the product overflows.
    int64_t elements() const;
    std::string text() const; // "[3, 4]"

private:
    std::array<int64_t, LLAISYS_MAX_DIMS> sizes_{};
    int ndim_ = 0;
};

// Writes text(). Lets a check name a shape without formatting it unless the check fails.
std::ostream &operator<<(std::ostream &out, const Shape &shape);

class Tensor {
public:
    Tensor() = default; // no storage: defined() is false

    // Zeroed memory of a device.
    static Tensor create(const Shape &shape, DType dtype, DeviceType device = LLAISYS_DEVICE_CPU,
                         int device_id = 0,
                         device::Lifetime lifetime = device::Lifetime::persistent);
    // The bytes of a mapped file at offset; a copy when they are not aligned.
    static Tensor map(const std::string &path, uint64_t offset, const Shape &shape, DType dtype);
    // A contiguous tensor at `offset` bytes of a storage; throws when it does not fit.
    static Tensor on(std::shared_ptr<Storage> storage, int64_t offset, const Shape &shape,
                     DType dtype);

    // Shape and dtype alone; defined() is false.
    static Tensor described(const Shape &shape, DType dtype);

    bool defined() const { return storage_ != nullptr; }
    int ndim() const { return shape_.ndim(); }
    const Shape &shape() const { return shape_; }
    const Shape &strides() const { return strides_; }
    int64_t size(int dim) const { return shape_[dim]; }
    int64_t stride(int dim) const { return strides_[dim]; }
    int64_t elements() const { return elements_; }
    int64_t bytes() const { return bytes_of(dtype_, elements_); }
    DType dtype() const { return dtype_; }
    DeviceType device() const { return storage_->device(); }
    int device_id() const { return storage_->device_id(); }
    bool is_mapped() const { return storage_->is_mapped(); }
    const std::shared_ptr<Storage> &storage() const { return storage_; }

    std::byte *data() const { return data_; }
    // Typed access; the caller has checked the dtype.
    template <typename T> T *as() const { return reinterpret_cast<T *>(data_); }

    bool is_contiguous() const;
    // Only the last dimension must be contiguous.
    bool has_dense_rows() const;

    // Views; throw for invalid arguments.
    Tensor view(const Shape &shape) const;
    Tensor slice(int dim, int64_t start, int64_t end) const;
    Tensor permute(const int *order) const;
    Tensor without_storage() const { return described(shape_, dtype_); }

    // Copy between the tensor, which must be contiguous and have n_bytes, and host memory, in
    // stream order. load has read `data` when it returns; store has written it once the stream is
    // synchronised. Without a stream both block until done and are not ordered with other work.
    void load(const device::Stream &stream, const void *data, size_t n_bytes) {
        load(&stream, data, n_bytes);
    }
    void store(const device::Stream &stream, void *data, size_t n_bytes) const {
        store(&stream, data, n_bytes);
    }
    void load(const void *data, size_t n_bytes) { load(nullptr, data, n_bytes); }
    void store(void *data, size_t n_bytes) const { store(nullptr, data, n_bytes); }

private:
    void check_copy(const char *name, size_t n_bytes) const;
    void load(const device::Stream *stream, const void *data, size_t n_bytes);
    void store(const device::Stream *stream, void *data, size_t n_bytes) const;
    Tensor(std::shared_ptr<Storage> storage, std::byte *data, const Shape &shape,
           const Shape &strides, DType dtype);

    std::shared_ptr<Storage> storage_;
    std::byte *data_ = nullptr;
    Shape shape_;
    Shape strides_;
    int64_t elements_ = 0;
    DType dtype_ = LLAISYS_DTYPE_INVALID;
};

} // namespace llaisys
