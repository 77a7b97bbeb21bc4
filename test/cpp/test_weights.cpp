// WeightTable: ownership of handles, rejected and missing weights.
#include "check.hpp"
#include "runtime/weights/weights.hpp"

#include <algorithm>

using namespace llaisys;
using namespace llaisys::runtime;

namespace {

using WeakStorage = std::weak_ptr<Storage>;

// A handle, and a weak pointer to its storage.
llaisysTensor_t make(const Shape &shape, WeakStorage *storage = nullptr,
                     DType dtype = LLAISYS_DTYPE_F32) {
    auto *handle = new LlaisysTensor(Tensor::create(shape, dtype));
    if (storage != nullptr) {
        *storage = handle->tensor.storage();
    }
    return handle;
}

// The slot table of a small model.
struct Slots {
    llaisysTensor_t embed = nullptr;
    llaisysTensor_t head = nullptr;
    llaisysTensor_t q[3] = {};
    llaisysTensor_t bias[3] = {};
};

struct Fixture {
    Slots slots;
    WeightTable table{LLAISYS_DEVICE_CPU, 0};

    Fixture() {
        table.add_global("embed", &slots.embed, {5, 4});
        table.add_global("head", &slots.head, {5, 4});
        table.add_layers("q", slots.q, 3, {4, 4});
        table.add_layers("bias", slots.bias, 3, {4}, true);
    }
    void fill() {
        llaisysTensor_t shared = make({5, 4});
        table.replace("embed", 0, shared);
        table.replace("head", 0, shared);
        for (int layer = 0; layer < 3; ++layer) {
            table.replace("q", layer, make({4, 4}));
        }
    }
};

} // namespace

TEST(shared_handle_is_destroyed_with_its_last_slot) {
    WeakStorage storage, other;
    Fixture fixture;
    llaisysTensor_t shared = make({5, 4}, &storage);
    fixture.table.replace("embed", 0, shared);
    fixture.table.replace("head", 0, shared);
    fixture.table.replace("head", 0, make({5, 4}, &other));
    CHECK(!storage.expired()); // embed still holds it
    fixture.table.replace("embed", 0, fixture.slots.head);
    CHECK(storage.expired());
    CHECK(!other.expired());
}

TEST(table_destroys_remaining_handles_once) {
    WeakStorage storages[4];
    {
        Fixture fixture;
        llaisysTensor_t shared = make({5, 4}, &storages[0]);
        fixture.table.replace("embed", 0, shared);
        fixture.table.replace("head", 0, shared);
        for (int layer = 0; layer < 3; ++layer) {
            fixture.table.replace("q", layer, make({4, 4}, &storages[layer + 1]));
        }
        for (const WeakStorage &storage : storages) {
            CHECK(!storage.expired());
        }
    }
    for (const WeakStorage &storage : storages) {
        CHECK(storage.expired());
    }
}

TEST(repeated_replace_keeps_one_handle) {
    Fixture fixture;
    std::vector<WeakStorage> storages(200);
    for (size_t i = 0; i < storages.size(); ++i) {
        fixture.table.replace("q", 1, make({4, 4}, &storages[i]));
        fixture.table.replace("q", 1, fixture.slots.q[1]); // itself: no effect
        for (size_t j = 0; j <= i; ++j) {
            CHECK_EQ(storages[j].expired(), j < i);
        }
    }
}

TEST(replace_slot_and_destroy_unique_on_bare_slots) {
    WeakStorage a, b;
    llaisysTensor_t slots[3] = {make({2}, &a), nullptr, nullptr};
    slots[1] = slots[0];
    const std::vector<llaisysTensor_t *> all = {&slots[0], &slots[1], &slots[2]};
    replace_slot(&slots[0], make({2}, &b), all);
    CHECK(!a.expired());
    replace_slot(&slots[1], nullptr, all);
    CHECK(a.expired() && slots[1] == nullptr);
    slots[1] = slots[2] = slots[0];
    destroy_unique(all);
    CHECK(b.expired());
    CHECK(slots[0] == nullptr && slots[1] == nullptr && slots[2] == nullptr);
    destroy_unique(all); // empty slots are valid
    replace_slot(&slots[0], make({2}, &a));
    replace_slot(&slots[0], nullptr);
    CHECK(a.expired());
}

TEST(rejected_weight_stays_with_the_caller) {
    Fixture fixture;
    fixture.fill();
    const uint64_t before = fixture.table.fingerprint();
    WeakStorage storage;
    llaisysTensor_t wrong = make({4, 5}, &storage);
    CHECK_THROWS(fixture.table.replace("q", 2, wrong), "q of layer 2", "[4, 4]", "[4, 5]");
    CHECK_THROWS(fixture.table.replace("embed", 0, wrong), "weight embed", "[5, 4]", "[4, 5]");
    CHECK_THROWS(fixture.table.replace("k", 0, wrong), "embed, head, q, bias", "'k'");
    delete wrong;
    llaisysTensor_t right = make({4, 4}, &storage);
    CHECK_THROWS(fixture.table.replace("q", 3, right), "layer must be in [0, 3)", "3");
    CHECK_THROWS(fixture.table.replace("q", -1, right), "layer", "-1");
    CHECK_THROWS(fixture.table.replace("q", 0, nullptr), "q of layer 0", "NULL");
    const int swap[] = {1, 0};
    const Tensor square = right->tensor;
    right->tensor = square.permute(swap);
    CHECK_THROWS(fixture.table.replace("q", 0, right), "contiguous", "[1, 4]");
    right->tensor = square.without_storage();
    CHECK_THROWS(fixture.table.replace("q", 0, right), "another model owns the values");
    delete right;
    llaisysTensor_t integers = make({4, 4}, nullptr, LLAISYS_DTYPE_I32);
    CHECK_THROWS(fixture.table.replace("q", 0, integers), "f32, f16, bf16 or a quantised one",
                 "i32");
    delete integers;
    CHECK_EQ(fixture.table.fingerprint(), before);
}

TEST(slots_owned_by_the_table_are_empty_and_have_stable_addresses) {
    WeakStorage storage;
    {
        WeightTable table(LLAISYS_DEVICE_CPU, 0);
        llaisysTensor_t *first = table.add_layers("q0", {true, true}, {4, 4});
        CHECK(first[0] == nullptr && first[1] == nullptr);
        table.replace("q0", 1, make({4, 4}, &storage));
        for (int i = 1; i < 50; ++i) {
            table.add_layers(text("q", i), {true, true}, {4, 4}, true);
        }
        CHECK(first[1] != nullptr && first[1]->tensor.storage() == storage.lock());
        CHECK_THROWS(table.check_complete(), "q0 of layer 0 is missing");
    }
    CHECK(storage.expired());
}

TEST(layer_of_a_global_slot_is_ignored) {
    Fixture fixture;
    fixture.table.replace("embed", 17, make({5, 4}));
    fixture.table.replace("embed", -3, make({5, 4}));
    CHECK(fixture.slots.embed != nullptr);
}

TEST(check_complete_names_missing_and_invalid_weights) {
    Fixture fixture;
    CHECK_THROWS(fixture.table.check_complete(), "embed is missing");
    fixture.fill();
    fixture.table.check_complete(); // biases are optional
    llaisysTensor_t kept = fixture.slots.q[1];
    fixture.slots.q[1] = nullptr; // as through the public struct
    CHECK_THROWS(fixture.table.check_complete(), "q of layer 1 is missing");
    fixture.slots.q[1] = make({4, 3});
    CHECK_THROWS(fixture.table.check_complete(), "q of layer 1", "[4, 3]");
    delete fixture.slots.q[1];
    fixture.slots.q[1] = kept;
    kept->tensor = kept->tensor.without_storage(); // packed by the model: still complete
    fixture.table.check_complete();
    fixture.table.replace("bias", 2, make({4}));
    fixture.table.check_complete();
}

TEST(fingerprint_changes_with_every_handle) {
    Fixture fixture;
    std::vector<uint64_t> seen = {fixture.table.fingerprint()};
    fixture.fill();
    for (int i = 0; i < 100; ++i) {
        seen.push_back(fixture.table.fingerprint());
        CHECK_EQ(seen.back(), fixture.table.fingerprint());
        // The new handle may reuse an old address: serials differ.
        fixture.table.replace("q", i % 3, make({4, 4}));
    }
    std::sort(seen.begin(), seen.end());
    CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
}
