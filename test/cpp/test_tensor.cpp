// Shapes, views and storage. Views are compared with a reference: the list of element offsets in
// row-major order.
#include "check.hpp"
#include "ops/rearrange/op.hpp"
#include "tensor/tensor.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <unistd.h>

using namespace llaisys;

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// i32 with values 0, 1, 2, ..: the value of an element is its offset in the storage.
Tensor counting(const Shape &shape) {
    Tensor tensor = Tensor::create(shape, LLAISYS_DTYPE_I32);
    std::iota(tensor.as<int32_t>(), tensor.as<int32_t>() + tensor.elements(), 0);
    return tensor;
}

// The values in row-major order, by index arithmetic.
std::vector<int32_t> values_of(const Tensor &tensor) {
    std::vector<int32_t> values;
    for (int64_t i = 0; i < tensor.elements(); ++i) {
        int64_t rest = i;
        int64_t offset = 0;
        for (int dim = tensor.ndim() - 1; dim >= 0; --dim) {
            offset += rest % tensor.size(dim) * tensor.stride(dim);
            rest /= tensor.size(dim);
        }
        values.push_back(tensor.as<int32_t>()[offset]);
    }
    return values;
}

// Whether strides exist with which a shape describes `offsets`, by brute force. Strides of
// dimensions of size 1 are ignored.
bool can_describe(const std::vector<int32_t> &offsets, const Shape &shape) {
    Shape strides = shape;
    int64_t inner = 1;
    for (int dim = shape.ndim() - 1; dim >= 0; --dim) {
        strides[dim] = shape[dim] > 1 ? offsets[size_t(inner)] - offsets[0] : 0;
        inner *= shape[dim];
    }
    for (size_t i = 0; i < offsets.size(); ++i) {
        int64_t rest = int64_t(i);
        int64_t offset = offsets[0];
        for (int dim = shape.ndim() - 1; dim >= 0; --dim) {
            offset += rest % shape[dim] * strides[dim];
            rest /= shape[dim];
        }
        if (offset != offsets[i]) {
            return false;
        }
    }
    return true;
}

int below(std::mt19937 &random, int64_t limit) { return int(random() % uint32_t(limit)); }

Shape random_shape(std::mt19937 &random, int64_t elements) {
    Shape shape;
    while (elements > 1 && shape.ndim() < 4) {
        std::vector<int64_t> divisors;
        for (int64_t d = 1; d <= elements; ++d) {
            if (elements % d == 0) {
                divisors.push_back(d);
            }
        }
        shape.append(divisors[size_t(below(random, int64_t(divisors.size())))]);
        elements /= shape[shape.ndim() - 1];
    }
    shape.append(elements);
    return shape;
}

Tensor randomly_cut(std::mt19937 &random, Tensor tensor) {
    for (int dim = 0; dim < tensor.ndim(); ++dim) {
        if (random() % 3 == 0) {
            const int64_t start = below(random, tensor.size(dim));
            const int64_t end = start + 1 + below(random, tensor.size(dim) - start);
            tensor = tensor.slice(dim, start, end);
        }
    }
    if (random() % 2 == 0) {
        std::vector<int> order(size_t(tensor.ndim()));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        tensor = tensor.permute(order.data());
    }
    return tensor;
}

// A temporary file.
class TempFile {
public:
    explicit TempFile(const std::vector<char> &bytes) {
        const int fd = mkstemp(path_);
        CHECK(fd >= 0);
        write(bytes);
        close(fd);
    }
    ~TempFile() { unlink(path_); }
    void write(const std::vector<char> &bytes) const {
        std::FILE *file = std::fopen(path_, "wb");
        CHECK(bytes.empty() || std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
        std::fclose(file);
    }
    std::string path() const { return path_; }

private:
    char path_[64] = "/tmp/llaisys_test_tensor_XXXXXX";
};

std::vector<char> pattern(size_t n) {
    std::vector<char> bytes(n);
    for (size_t i = 0; i < n; ++i) {
        bytes[i] = char(i * 7 + i / 256);
    }
    return bytes;
}

} // namespace

TEST(shapes_count_their_elements) {
    CHECK_EQ(Shape({}).elements(), 1);
    CHECK_EQ(Shape({3, 4}).elements(), 12);
    CHECK_EQ(Shape({3, 0, 4}).elements(), 0);
    CHECK_EQ(Shape({1, 2, 3, 4, 5, 6}).elements(), 720);
    CHECK_EQ(Shape({3, 4}).text(), "[3, 4]");
    CHECK_EQ(Shape({}).text(), "[]");
    CHECK(Shape({3, 4}) == Shape({3, 4}));
    CHECK(Shape({3, 4}) != Shape({3, 4, 1}));
    CHECK(Shape({3, 4}) != Shape({4, 3}));
}

TEST(invalid_shapes_are_rejected) {
    CHECK_THROWS(Shape({1, 2, 3, 4, 5, 6, 7}), "ndim must be in [0, 6]", "7");
    const int64_t sizes[] = {1};
    CHECK_THROWS(Shape(sizes, -1), "ndim", "-1");
    CHECK_THROWS(Shape({2, -1}).elements(), "[2, -1]", "negative");
    CHECK_THROWS(Shape({kMost, 2}).elements(), "too many elements");
    CHECK_THROWS(Shape({int64_t(1) << 32, int64_t(1) << 31}).elements(), "too many elements");
    CHECK_THROWS(Shape({0, kMost, 2}).elements(), "too many elements"); // strides overflow
    CHECK_THROWS(Tensor::create({kMost}, LLAISYS_DTYPE_F32), "overflows");
    CHECK_THROWS(Tensor::create({int64_t(1) << 60}, LLAISYS_DTYPE_F32), "could not be allocated");
    CHECK_THROWS(Tensor::create({4}, LLAISYS_DTYPE_INVALID), "unknown dtype");
    CHECK_THROWS(Tensor::create({4}, LLAISYS_DTYPE_F32, LLAISYS_DEVICE_CPU, 1), "device_id", "1");
    CHECK_THROWS(Tensor::create({4}, LLAISYS_DTYPE_F32, LLAISYS_DEVICE_NVIDIA), "nvidia");
}

TEST(memory_is_zeroed_and_aligned_at_every_size) {
    for (const int64_t n : {0, 1, 3, 63, 64, 65, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1}) {
        const Tensor tensor = Tensor::create({n}, LLAISYS_DTYPE_U8);
        CHECK(tensor.data() != nullptr);
        CHECK_EQ(reinterpret_cast<uintptr_t>(tensor.data()) % 64, 0u);
        const uint8_t *bytes = tensor.as<uint8_t>();
        CHECK(std::all_of(bytes, bytes + n, [](uint8_t byte) { return byte == 0; }));
        std::memset(tensor.data(), 1, size_t(n)); // writable
    }
}

TEST(views_share_storage_and_keep_it_alive) {
    Tensor row;
    std::weak_ptr<Storage> storage;
    {
        const Tensor whole = counting({4, 6});
        storage = whole.storage();
        row = whole.slice(0, 2, 3);
        CHECK(row.storage() == whole.storage());
    }
    CHECK(!storage.expired());
    CHECK(values_of(row) == std::vector<int32_t>({12, 13, 14, 15, 16, 17}));
    CHECK(row.is_contiguous());
    const Tensor bare = row.without_storage();
    row = Tensor();
    CHECK(storage.expired());
    CHECK(!bare.defined());
    CHECK(bare.shape() == Shape({1, 6}) && bare.dtype() == LLAISYS_DTYPE_I32);
    CHECK_THROWS(Tensor(bare).load(nullptr, 24), "no storage");
    CHECK_THROWS(bare.store(nullptr, 24), "no storage");
    CHECK_THROWS(bare.slice(0, 0, 1), "no storage");
}

TEST(slices_check_their_range) {
    const Tensor tensor = counting({4, 6});
    const Tensor column = tensor.slice(1, 5, 6);
    CHECK(values_of(column) == std::vector<int32_t>({5, 11, 17, 23}));
    CHECK(!column.is_contiguous());
    CHECK(column.has_dense_rows()); // rows of one
    CHECK(tensor.slice(1, 2, 4).has_dense_rows());
    const int swap[] = {1, 0};
    CHECK(!tensor.permute(swap).has_dense_rows());
    const Tensor none = tensor.slice(0, 4, 4);
    CHECK_EQ(none.elements(), 0);
    CHECK(none.is_contiguous() && none.data() == tensor.data());
    CHECK_THROWS(tensor.slice(2, 0, 1), "dim must be in [0, 2)", "2");
    CHECK_THROWS(tensor.slice(-1, 0, 1), "dim", "-1");
    CHECK_THROWS(tensor.slice(0, -1, 1), "[-1, 1)");
    CHECK_THROWS(tensor.slice(0, 3, 2), "[3, 2)");
    CHECK_THROWS(tensor.slice(0, 0, 5), "[0, 5) is not inside [0, 4)");
    CHECK_THROWS(counting({}).slice(0, 0, 0), "dim must be in [0, 0)");
}

TEST(permutations_check_their_order) {
    const Tensor tensor = counting({2, 3});
    const int swap[] = {1, 0};
    CHECK(values_of(tensor.permute(swap)) == std::vector<int32_t>({0, 3, 1, 4, 2, 5}));
    const int twice[] = {1, 1};
    const int outside[] = {0, 2};
    const int negative[] = {-1, 0};
    CHECK_THROWS(tensor.permute(twice), "order[1] = 1");
    CHECK_THROWS(tensor.permute(outside), "order[1] = 2");
    CHECK_THROWS(tensor.permute(negative), "order[0] = -1");
}

TEST(view_succeeds_exactly_when_the_shape_describes_the_elements) {
    std::mt19937 random(11);
    int n_views = 0;
    int n_refused = 0;
    for (int round = 0; round < 20000; ++round) {
        Shape shape;
        for (int dim = below(random, 5); dim > 0; --dim) {
            shape.append(1 + below(random, 5));
        }
        const Tensor tensor = randomly_cut(random, counting(shape));
        const Shape wanted = random_shape(random, tensor.elements());
        const std::vector<int32_t> expected = values_of(tensor);
        try {
            const Tensor view = tensor.view(wanted);
            CHECK(view.shape() == wanted);
            CHECK(values_of(view) == expected);
            CHECK(view.data() == tensor.data());
            ++n_views;
        } catch (const Error &error) {
            CHECK_EQ(int(error.status()), int(LLAISYS_ERROR_INVALID));
            CHECK(!can_describe(expected, wanted));
            ++n_refused;
        }
    }
    CHECK(n_views > 1000 && n_refused > 1000); // both outcomes occurred
}

TEST(view_with_another_number_of_elements_is_rejected) {
    CHECK_THROWS(counting({2, 3}).view({7}), "view", "[7]", "6", "[2, 3]");
    CHECK_THROWS(counting({2, 3}).view({-6}), "negative");
    CHECK_THROWS(counting({2, 3}).view({}), "[]");
    CHECK_EQ(counting({0, 3}).view({5, 0}).elements(), 0);
    CHECK_EQ(counting({}).view({1, 1}).ndim(), 2);
    CHECK_EQ(counting({1}).view({}).ndim(), 0);
}

TEST(contiguous_and_rearrange_move_the_right_values) {
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    std::mt19937 random(5);
    for (int round = 0; round < 5000; ++round) {
        Shape shape;
        for (int dim = below(random, 6); dim > 0; --dim) {
            shape.append(1 + below(random, 4));
        }
        const Tensor source = randomly_cut(random, counting(shape));
        const std::vector<int32_t> expected = values_of(source);
        const Tensor dense = ops::contiguous(stream, source);
        CHECK(dense.is_contiguous() && values_of(dense) == expected);
        CHECK_EQ(dense.storage() == source.storage(), source.is_contiguous());

        // Into a strided tensor of the same shape: every second element of a wider one.
        Shape wide = source.shape();
        wide.append(2);
        const Tensor target = Tensor::create(wide, LLAISYS_DTYPE_I32).slice(wide.ndim() - 1, 1, 2);
        ops::rearrange(stream, target, source.view([&] {
            Shape unit = source.shape();
            unit.append(1);
            return unit;
        }()));
        CHECK(values_of(target) == expected);
        const int32_t *all = reinterpret_cast<const int32_t *>(target.storage()->data());
        for (int64_t i = 0; i < target.elements(); ++i) {
            CHECK_EQ(all[2 * i], 0); // gaps are unchanged
        }
    }
    CHECK_THROWS(ops::rearrange(stream, counting({2}), counting({3})), "[2]", "[3]");
    CHECK_THROWS(ops::rearrange(stream, counting({2}), Tensor::create({2}, LLAISYS_DTYPE_F32)),
                 "i32", "f32");
    ops::rearrange(stream, counting({0, 3}), counting({0, 3}));
}

TEST(load_and_store_need_the_exact_size_and_a_contiguous_tensor) {
    Tensor tensor = Tensor::create({2, 2}, LLAISYS_DTYPE_I32);
    const int32_t values[] = {1, 2, 3, 4};
    tensor.load(values, sizeof values);
    int32_t back[4] = {};
    tensor.store(back, sizeof back);
    CHECK(std::equal(values, values + 4, back));
    CHECK_THROWS(tensor.load(values, 15), "16", "15");
    CHECK_THROWS(tensor.store(back, 17), "16", "17");
    CHECK_THROWS(tensor.slice(1, 0, 1).load(values, 8), "contiguous");
    CHECK_THROWS(tensor.slice(1, 0, 1).store(back, 8), "contiguous");
    tensor.slice(0, 0, 0).load(nullptr, 0); // nothing to copy
}

TEST(tensors_inside_storage_must_fit) {
    auto storage = std::make_shared<Storage>(LLAISYS_DEVICE_CPU, 0, 64);
    CHECK_EQ(Tensor::on(storage, 32, {8}, LLAISYS_DTYPE_F32).data() - storage->data(), 32);
    CHECK_EQ(Tensor::on(storage, 64, {0}, LLAISYS_DTYPE_F32).elements(), 0);
    CHECK_THROWS(Tensor::on(storage, 33, {8}, LLAISYS_DTYPE_F32), "32 bytes", "33", "64");
    CHECK_THROWS(Tensor::on(storage, 65, {0}, LLAISYS_DTYPE_F32), "does not fit");
    CHECK_THROWS(Tensor::on(storage, -1, {1}, LLAISYS_DTYPE_F32), "-1");
    CHECK_THROWS(Tensor::on(storage, kMost, {16}, LLAISYS_DTYPE_F32), "does not fit");
}

TEST(tensors_of_a_file_share_one_mapping) {
    const std::vector<char> bytes = pattern(3 * 4096 + 40);
    const TempFile file(bytes);
    Tensor a = Tensor::map(file.path(), 8, {2, 4}, LLAISYS_DTYPE_F32);
    const Tensor b = Tensor::map(file.path(), 40, {3 * 4096}, LLAISYS_DTYPE_U8);
    CHECK(a.is_mapped() && b.is_mapped());
    CHECK_EQ(b.data() - a.data(), 32); // one mapping
    CHECK(std::memcmp(a.data(), bytes.data() + 8, 32) == 0);
    CHECK(std::memcmp(b.data(), bytes.data() + 40, 3 * 4096) == 0);
    CHECK_THROWS(a.load(bytes.data(), 32), "read-only");

    const Tensor odd = Tensor::map(file.path(), 3, {2}, LLAISYS_DTYPE_F32); // misaligned: a copy
    CHECK(!odd.is_mapped() && std::memcmp(odd.data(), bytes.data() + 3, 8) == 0);
    const Tensor none = Tensor::map(file.path(), bytes.size(), {0}, LLAISYS_DTYPE_F32);
    CHECK(none.defined() && none.elements() == 0);
}

TEST(dropped_pages_are_read_again) {
    const std::vector<char> bytes = pattern(64 * 4096);
    const TempFile file(bytes);
    for (const int64_t offset : {0, 1, 4095, 4096, 5000}) {
        for (const int64_t n : {0, 1, 4096, 8191, 40 * 4096}) {
            const Tensor tensor = Tensor::map(file.path(), uint64_t(offset), {n}, LLAISYS_DTYPE_U8);
            for (int repeat = 0; repeat < 2; ++repeat) {
                CHECK(std::memcmp(tensor.data(), bytes.data() + offset, size_t(n)) == 0);
                tensor.storage()->drop_pages();
            }
            CHECK(std::memcmp(tensor.data(), bytes.data() + offset, size_t(n)) == 0);
        }
    }
    const Tensor owned = counting({4096});
    owned.storage()->drop_pages(); // not mapped: no effect
    CHECK_EQ(owned.as<int32_t>()[4095], 4095);
}

TEST(short_missing_and_irregular_files_are_rejected) {
    const TempFile file(pattern(100));
    CHECK_THROWS(Tensor::map(file.path(), 0, {26}, LLAISYS_DTYPE_F32), "too short", "104", "100");
    CHECK_THROWS(Tensor::map(file.path(), 101, {0}, LLAISYS_DTYPE_U8), "too short", "101");
    CHECK_THROWS(Tensor::map(file.path(), UINT64_MAX, {1}, LLAISYS_DTYPE_U8), "too short");
    CHECK_THROWS(Tensor::map(file.path(), 0, {int64_t(1) << 60}, LLAISYS_DTYPE_F32), "too short");
    CHECK_THROWS(Tensor::map("/nowhere/file", 0, {1}, LLAISYS_DTYPE_U8), "/nowhere/file",
                 "No such");
    CHECK_THROWS(Tensor::map("/tmp", 0, {1}, LLAISYS_DTYPE_U8), "/tmp", "regular file");
    const TempFile empty({});
    CHECK_THROWS(Tensor::map(empty.path(), 0, {1}, LLAISYS_DTYPE_U8), "too short");
    CHECK_EQ(Tensor::map(empty.path(), 0, {0}, LLAISYS_DTYPE_U8).elements(), 0);
}

TEST(replaced_file_gets_its_own_mapping) {
    const TempFile file(pattern(4096));
    const Tensor before = Tensor::map(file.path(), 0, {4096}, LLAISYS_DTYPE_U8);
    unlink(file.path().c_str());
    file.write(std::vector<char>(5000, 'x'));
    const Tensor after = Tensor::map(file.path(), 0, {5000}, LLAISYS_DTYPE_U8);
    CHECK_EQ(after.as<char>()[4999], 'x');
    CHECK(std::memcmp(before.data(), pattern(4096).data(), 4096) == 0);
}

TEST(last_tensor_unmaps_the_file) {
    const TempFile file(pattern(4096));
    std::weak_ptr<FileMapping> mapping;
    {
        const Tensor tensor = Tensor::map(file.path(), 0, {64}, LLAISYS_DTYPE_U8);
        mapping = FileMapping::open(file.path());
        CHECK(mapping.lock()->data() == tensor.data());
        CHECK_EQ(mapping.lock()->bytes(), 4096u);
    }
    CHECK(mapping.expired());
}
