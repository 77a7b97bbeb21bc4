#include "tensor/tensor.hpp"

#include <cstring>
#include <limits>

namespace llaisys {

Shape::Shape(const int64_t *sizes, int ndim) {
    require(ndim >= 0 && ndim <= LLAISYS_MAX_DIMS, "ndim must be in [0, ", LLAISYS_MAX_DIMS,
            "], got ", ndim);
    for (int dim = 0; dim < ndim; ++dim) {
        append(sizes[dim]);
    }
}

void Shape::append(int64_t size) {
    require(ndim_ < LLAISYS_MAX_DIMS, "a tensor has at most ", LLAISYS_MAX_DIMS, " dimensions");
    sizes_[size_t(ndim_++)] = size;
}

bool Shape::operator==(const Shape &other) const {
    if (ndim_ != other.ndim_) {
        return false;
    }
    for (int dim = 0; dim < ndim_; ++dim) {
        if ((*this)[dim] != other[dim]) {
            return false;
        }
    }
    return true;
}

int64_t Shape::elements() const {
    int64_t elements = 1;
    bool is_empty = false;
    for (int dim = 0; dim < ndim_; ++dim) {
        const int64_t size = (*this)[dim];
        require(size >= 0, "shape ", *this, " has a negative size");
        is_empty = is_empty || size == 0;
        if (size > 0) {
            require(elements <= std::numeric_limits<int64_t>::max() / size, "shape ", *this,
                    " has too many elements");
            elements *= size;
        }
    }
    return is_empty ? 0 : elements;
}

std::string Shape::text() const {
    std::string text = "[";
    for (int dim = 0; dim < ndim_; ++dim) {
        text += (dim > 0 ? ", " : "") + std::to_string((*this)[dim]);
    }
    return text + "]";
}

std::ostream &operator<<(std::ostream &out, const Shape &shape) { return out << shape.text(); }

namespace {

Shape dense_strides(const Shape &shape) {
    Shape strides = shape;
    int64_t stride = 1;
    for (int dim = shape.ndim() - 1; dim >= 0; --dim) {
        strides[dim] = stride;
        stride *= shape[dim] > 0 ? shape[dim] : 1;
    }
    return strides;
}

// Bytes of a dense tensor: rows of whole blocks.
int64_t dense_bytes(const Shape &shape, DType dtype) {
    const int64_t unit = traits_of(dtype).block_elements;
    const int64_t row = shape.ndim() > 0 ? shape[shape.ndim() - 1] : 1;
    require(row % unit == 0, "a row of ", name_of(dtype), " is made of blocks of ", unit,
            " elements, got shape ", shape);
    return bytes_of(dtype, shape.elements());
}

} // namespace

Tensor::Tensor(std::shared_ptr<Storage> storage, std::byte *data, const Shape &shape,
               const Shape &strides, DType dtype)
    : storage_(std::move(storage)), data_(data), shape_(shape), strides_(strides),
      elements_(shape.elements()), dtype_(dtype) {}

Tensor Tensor::create(const Shape &shape, DType dtype, DeviceType device, int device_id,
                      device::Lifetime lifetime) {
    const int64_t bytes = dense_bytes(shape, dtype);
    auto storage = std::make_shared<Storage>(device, device_id, bytes, lifetime);
    return on(std::move(storage), 0, shape, dtype);
}

Tensor Tensor::on(std::shared_ptr<Storage> storage, int64_t offset, const Shape &shape,
                  DType dtype) {
    const int64_t bytes = dense_bytes(shape, dtype);
    require(offset >= 0 && offset <= storage->bytes() && bytes <= storage->bytes() - offset,
            "a tensor of ", bytes, " bytes at offset ", offset, " does not fit into ",
            storage->bytes(), " bytes of storage");
    std::byte *data = storage->data() + offset;
    return Tensor(std::move(storage), data, shape, dense_strides(shape), dtype);
}

Tensor Tensor::described(const Shape &shape, DType dtype) {
    return Tensor(nullptr, nullptr, shape, dense_strides(shape), dtype);
}

Tensor Tensor::map(const std::string &path, uint64_t offset, const Shape &shape, DType dtype) {
    const int64_t bytes = dense_bytes(shape, dtype);
    auto file = FileMapping::open(path);
    if (offset > file->bytes() || uint64_t(bytes) > file->bytes() - offset) {
        fail(LLAISYS_ERROR_IO, path, " is too short: a tensor of ", bytes, " bytes at offset ",
             offset, " ends past its ", file->bytes(), " bytes");
    }
    const std::byte *data = file->data() + offset;
    const bool is_aligned = offset % uint64_t(traits_of(dtype).block_bytes) == 0;
    if (!is_aligned || bytes == 0) {
        Tensor copy = create(shape, dtype);
        if (bytes > 0) {
            std::memcpy(copy.data(), data, size_t(bytes));
        }
        return copy;
    }
    return on(std::make_shared<Storage>(std::move(file), offset, bytes), 0, shape, dtype);
}

bool Tensor::is_contiguous() const {
    int64_t expected = 1;
    for (int dim = ndim() - 1; dim >= 0; --dim) {
        if (size(dim) != 1 && stride(dim) != expected) {
            return elements_ == 0;
        }
        expected *= size(dim);
    }
    return true;
}

bool Tensor::has_dense_rows() const {
    return ndim() == 0 || size(ndim() - 1) <= 1 || stride(ndim() - 1) == 1;
}

Tensor Tensor::view(const Shape &shape) const {
    require(shape.elements() == elements_, "view: shape ", shape, " must have the ", elements_,
            " elements of ", shape_);
    if (is_contiguous()) {
        return Tensor(storage_, data_, shape, dense_strides(shape), dtype_);
    }
    // Walk both shapes from the right; each new dimension must fall inside one run of old
    // dimensions that are contiguous with each other.
    Shape strides = shape;
    int old_dim = ndim() - 1;
    int64_t run = 1;    // elements of the current run not yet covered
    int64_t stride = 1; // of the next new dimension
    for (int dim = shape.ndim() - 1; dim >= 0; --dim) {
        if (run == 1) {
            while (old_dim >= 0 && size(old_dim) == 1) {
                --old_dim;
            }
            if (old_dim >= 0) {
                stride = strides_[old_dim];
                run = size(old_dim--);
                while (old_dim >= 0 && (size(old_dim) == 1 || strides_[old_dim] == stride * run)) {
                    run *= size(old_dim--);
                }
            }
        }
        require(shape[dim] != 0 && run % shape[dim] == 0, "view: shape ", shape,
                " is not a view of shape ", shape_, " with strides ", strides_, " without a copy");
        strides[dim] = stride;
        stride *= shape[dim];
        run /= shape[dim];
    }
    return Tensor(storage_, data_, shape, strides, dtype_);
}

Tensor Tensor::slice(int dim, int64_t start, int64_t end) const {
    require(defined(), "slice: the tensor has no storage");
    require(dim >= 0 && dim < ndim(), "slice: dim must be in [0, ", ndim(), "), got ", dim);
    require(start >= 0 && start <= end && end <= size(dim), "slice: [", start, ", ", end,
            ") is not inside [0, ", size(dim), ")");
    require(traits_of(dtype_).block_elements == 1 || dim < ndim() - 1, "slice: blocks of ",
            name_of(dtype_), " cannot be split");
    Shape shape = shape_;
    shape[dim] = end - start;
    const int64_t offset = shape.elements() == 0 ? 0 : bytes_of(dtype_, start * stride(dim));
    return Tensor(storage_, data_ + offset, shape, strides_, dtype_);
}

Tensor Tensor::permute(const int *order) const {
    Shape shape = shape_;
    Shape strides = strides_;
    unsigned seen = 0;
    for (int dim = 0; dim < ndim(); ++dim) {
        const int from = order[dim];
        require(from >= 0 && from < ndim() && (seen & (1u << from)) == 0, "permute: order[", dim,
                "] = ", from, " is not part of a permutation of 0..", ndim() - 1);
        seen |= 1u << from;
        shape[dim] = shape_[from];
        strides[dim] = strides_[from];
    }
    return Tensor(storage_, data_, shape, strides, dtype_);
}

void Tensor::check_copy(const char *name, size_t n_bytes) const {
    require(defined(), name, ": the tensor has no storage");
    require(is_contiguous(), name, ": the tensor must be contiguous");
    require(n_bytes == size_t(bytes()), name, ": the tensor has ", bytes(), " bytes, got ",
            n_bytes);
}

void Tensor::load(const device::Stream *stream, const void *data, size_t n_bytes) {
    check_copy("load", n_bytes);
    require(!is_mapped(), "load: a mapped tensor is read-only");
    storage_->runtime().copy(data_, data, n_bytes, device::CopyKind::host_to_device,
                             stream != nullptr ? stream->native() : nullptr);
}

void Tensor::store(const device::Stream *stream, void *data, size_t n_bytes) const {
    check_copy("store", n_bytes);
    storage_->runtime().copy(data, data_, n_bytes, device::CopyKind::device_to_host,
                             stream != nullptr ? stream->native() : nullptr);
}

} // namespace llaisys
