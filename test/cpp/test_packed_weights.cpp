// Packed weights: when a slot is packed, sharing between slots, and release of the original.
#include "check.hpp"
#include "fake_device.hpp"
#include "runtime/weights/packed_weights.hpp"

using namespace llaisys;
using namespace llaisys::runtime;

namespace {

constexpr int64_t kRows = 5, kColumns = 3;

llaisysTensor_t make(float first, DeviceType device = LLAISYS_DEVICE_CPU) {
    auto *handle =
        new LlaisysTensor(Tensor::create({kRows, kColumns}, LLAISYS_DTYPE_F32, device, 0));
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
        handle->tensor.as<float>()[i] = first + float(i);
    }
    return handle;
}

// An embedding, the head and one weight of products for each of two layers.
struct Fixture {
    explicit Fixture(DeviceType device = LLAISYS_DEVICE_CPU)
        : stream(device, 0, 1), table(device, 0), packed(table) {
        table.add_global("embed", &slots[0], {kRows, kColumns});
        table.add_global("head", &slots[1], {kRows, kColumns});
        table.add_layers("q", &slots[2], 2, {kRows, kColumns});
        packed.add_lookup(&slots[0], &embed);
        packed.add(&slots[1], &head);
        packed.add(&slots[2], &q[0]);
        packed.add(&slots[3], &q[1]);
    }
    void replace(const char *field, llaisysTensor_t handle, int layer = 0) {
        packed.replace(stream, field, layer, handle);
    }
    void fill() {
        replace("embed", make(0));
        replace("head", make(100));
        replace("q", make(200), 0);
        replace("q", make(300), 1);
    }
    // The first value of row 2.
    float row_of(const PackedWeight &weight) const {
        const int64_t row = 2;
        Tensor index = Tensor::create({1}, LLAISYS_DTYPE_I64);
        index.load(&row, sizeof row);
        const Tensor out = Tensor::create({1, kColumns}, LLAISYS_DTYPE_F32);
        ops::linear_rows(stream, out, index, weight.weight);
        stream.synchronize();
        return *out.as<float>();
    }

    device::Stream stream;
    llaisysTensor_t slots[4] = {};
    PackedWeight embed, head, q[2];
    WeightTable table;
    PackedWeights packed;
};

} // namespace

TEST(linear_weight_is_packed_and_embedding_stays_a_tensor) {
    Fixture fixture;
    fixture.fill();
    fixture.packed.prepare(fixture.stream);
    CHECK(fixture.slots[0]->tensor.defined() && !fixture.embed.weight.defined());
    for (int i = 1; i < 4; ++i) {
        CHECK(!fixture.slots[i]->tensor.defined());
    }
    CHECK_EQ(fixture.row_of(fixture.head), 106.0f);
    CHECK_EQ(fixture.row_of(fixture.q[1]), 306.0f);
}

TEST(tied_embedding_shares_the_packed_head_in_either_order) {
    for (const bool embed_first : {true, false}) {
        Fixture fixture;
        fixture.fill();
        llaisysTensor_t shared = make(7);
        fixture.replace(embed_first ? "embed" : "head", shared);
        fixture.replace(embed_first ? "head" : "embed", shared);
        CHECK(fixture.embed.weight.bytes.data() == fixture.head.weight.bytes.data());
        fixture.replace("head", make(100)); // the embedding keeps its weight
        fixture.packed.prepare(fixture.stream);
        CHECK_EQ(fixture.row_of(fixture.embed), 13.0f);
        CHECK_EQ(fixture.row_of(fixture.head), 106.0f);
        fixture.replace("embed", make(0)); // an untied embedding is a tensor again
        fixture.packed.prepare(fixture.stream);
        CHECK(!fixture.embed.weight.defined() && fixture.slots[0]->tensor.defined());
    }
}

TEST(quantised_embedding_is_always_packed) {
    for (const bool is_tied : {false, true}) {
        const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
        llaisysTensor_t slots[2] = {};
        PackedWeight embed, head;
        WeightTable table(LLAISYS_DEVICE_CPU, 0);
        PackedWeights packed(table);
        table.add_global("embed", &slots[0], {kRows, 32});
        table.add_global("head", &slots[1], {kRows, 32});
        packed.add_lookup(&slots[0], &embed);
        packed.add(&slots[1], &head);
        const auto make_blocks = [] {
            return new LlaisysTensor(Tensor::create({kRows, 32}, LLAISYS_DTYPE_Q8_0));
        };
        packed.replace(stream, "embed", 0, make_blocks());
        packed.replace(stream, "head", 0, is_tied ? slots[0] : make_blocks());
        packed.prepare(stream);
        CHECK(embed.weight.defined() && !slots[0]->tensor.defined());
        CHECK_EQ(embed.weight.bytes.data() == head.weight.bytes.data(), is_tied);
    }
}

TEST(slots_with_one_handle_share_one_copy) {
    Fixture fixture;
    fixture.fill();
    fixture.replace("q", fixture.slots[2], 1);
    CHECK(fixture.q[0].weight.bytes.data() == fixture.q[1].weight.bytes.data());
    llaisysTensor_t displaced = fixture.slots[1];
    fixture.slots[1] = fixture.slots[2]; // written directly: the caller owns the previous handle
    fixture.packed.prepare(fixture.stream);
    CHECK_EQ(fixture.row_of(fixture.head), 206.0f);
    delete displaced;
}

TEST(error_names_a_weight_without_values) {
    Fixture fixture;
    fixture.fill();
    llaisysTensor_t empty = fixture.slots[3];
    fixture.slots[3] = make(1); // written directly: the test owns `empty` again, without values
    fixture.packed.prepare(fixture.stream);
    llaisysTensor_t filled = fixture.slots[3];
    fixture.slots[3] = empty;
    CHECK_THROWS(fixture.packed.prepare(fixture.stream),
                 "weight q of layer 1 has no values: replace it");
    fixture.slots[3] = filled;
    fixture.packed.prepare(fixture.stream);
    CHECK_EQ(fixture.row_of(fixture.q[1]), 7.0f);
    delete empty;
}

TEST(caller_keeps_a_weight_that_cannot_be_packed) {
    fake::Device device; // has no kernels
    Fixture fixture(LLAISYS_DEVICE_NVIDIA);
    llaisysTensor_t handle = make(1, LLAISYS_DEVICE_NVIDIA);
    CHECK_THROWS(fixture.replace("head", handle), "linear_weight");
    CHECK(fixture.slots[1] == nullptr && !fixture.head.weight.defined());
    CHECK(handle->tensor.defined());
    delete handle;
}
