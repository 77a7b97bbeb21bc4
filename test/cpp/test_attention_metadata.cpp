// AttentionMetadataBuilder: which single tokens count as long sequences.
#include "check.hpp"
#include "runtime/runner/attention_metadata_builder.hpp"

#include <vector>

using namespace llaisys;
using namespace llaisys::runtime;

namespace {

// One decode token per sequence, at these positions.
class Step {
public:
    explicit Step(const std::vector<int64_t> &positions)
        : n_(int32_t(positions.size())), rows_(positions.size()), slots_(positions.size()),
          tables_(positions.size()) {
        step_.n_tokens = n_;
        step_.positions = positions;
        for (int32_t i = 0; i < n_; ++i) {
            rows_[size_t(i)] = i;
        }
    }
    int64_t n_long(AttentionMetadataBuilder *builder, int64_t n_padded) const {
        LlaisysStepInput blocks{};
        blocks.slot_mapping = slots_.data();
        blocks.n_seq = n_;
        blocks.block_tables = tables_.data();
        blocks.block_table_width = 1;
        UbatchRange range;
        range.n = n_;
        builder->build_block(step_, range, blocks, 16, rows_);
        return builder->n_long(n_padded);
    }

private:
    int32_t n_;
    PreparedStep step_;
    std::vector<int32_t> rows_, slots_, tables_;
};

constexpr int64_t kLast = ops::kLongSequence; // this position sees one entry more than a short one

} // namespace

TEST(long_sequences_are_counted_and_rounded_up_to_a_power_of_two) {
    AttentionMetadataBuilder builder({0, 0});
    CHECK_EQ(Step({kLast - 1, 5}).n_long(&builder, 2), 0);
    CHECK_EQ(Step({5, kLast, 7}).n_long(&builder, 4), 1);
    CHECK_EQ(Step({kLast, 9, kLast + 1, 30000, 8}).n_long(&builder, 8), 4);
    CHECK_EQ(Step({kLast, kLast, kLast}).n_long(&builder, 3), 3); // no more than there are
}

TEST(many_long_sequences_are_not_split_further) {
    AttentionMetadataBuilder builder({0});
    const auto most = size_t(ops::kMaxLongSequences);
    CHECK_EQ(Step(std::vector<int64_t>(most, kLast)).n_long(&builder, 64), ops::kMaxLongSequences);
    CHECK_EQ(Step(std::vector<int64_t>(most + 1, kLast)).n_long(&builder, 64), 0);
}

TEST(a_window_shortens_a_sequence_unless_another_layer_sees_it_all) {
    AttentionMetadataBuilder windowed({512}), mixed({512, 0});
    CHECK_EQ(Step({30000}).n_long(&windowed, 1), 0);
    CHECK_EQ(Step({30000}).n_long(&mixed, 1), 1);
}

TEST(run_extents_are_whole_pages_of_the_longest_token) {
    std::vector<int32_t> extents{7};
    const int32_t ends[] = {9, 5, 17, 3, 3, 16, 1};
    // Runs of tokens 0 to 2 and 4 to 5; token 3 and token 6 are single.
    CHECK_EQ(ops::find_run_extents(ends, {0, 3, 4, 2}, &extents), 48);
    CHECK(extents == std::vector<int32_t>({0, 17, 32, 16}));
    CHECK_EQ(ops::find_run_extents(ends, {}, &extents), 0);
    CHECK(extents.empty());
    const int32_t large[] = {INT32_MAX / 2, 1, INT32_MAX / 2 + 9, 1};
    CHECK_EQ(ops::find_run_extents(large, {0, 2, 2, 2}, &extents), 0); // not in 32 bits
}
